"""From a plan to rows: run what is not finished, collect what the command asked for."""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvbench.core import KvbenchError
from kvbench.estimate import Estimate, arrivals_s
from kvbench.executors.base import Executor, WorkerLost
from kvbench.folder import clean_up, finished_summary, provenance
from kvbench.parts import is_real
from kvbench.plan import Plan
from kvbench.point import Point
from kvbench.results import COLUMNS, write_csv
from kvbench.run import Outcome, PointRun, run_all


class Interrupted(KeyboardInterrupt):
    """The user stopped the sweep; what is finished stays."""


@dataclass(slots=True)
class Report:
    """What became of a plan.

    Attributes:
        rows: ``summary.csv``.
        failures: message -> the folders of the points that failed with it.
        num_bugs: failures that no user's mistake explains.
        num_reused: points that were finished before.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, list[str]] = field(default_factory=dict)
    num_bugs: int = 0
    num_reused: int = 0


def execute(plan: Plan, *, shows_progress: bool = True) -> Report:
    """Run what is not finished and write ``summary.csv``.

    Points that fail leave ``error.json`` and have no row; the others go on.

    Raises:
        KvbenchError: the results folder cannot be written.
        Interrupted: the user stopped it; the message says how far it got.
    """
    points_dir = plan.folder / "points"
    try:
        points_dir.mkdir(parents=True, exist_ok=True)
        clean_up(points_dir)
    except OSError as error:
        raise KvbenchError(
            f"results cannot be written to {points_dir}: {error.strerror}; give another results_dir= or name="
        ) from None
    points = plan.points
    rows = finished(plan)
    outcomes = {key: Outcome(row) for key, row in rows.items()}
    report = Report(num_reused=len(rows))
    origin = provenance(_git_commit())
    left, seconds = unfinished(plan, rows, estimate(plan, rows))
    disabled = True if plan.is_live or not shows_progress else None  # None: where there is no terminal
    # Absolute, since a worker may be elsewhere.
    runs = [
        PointRun(
            *(point, points_dir.resolve(), plan.keeps_steps, origin, plan.keeps_map),
            headline=f"point {number} of {len(points)}: {_name(point)}" if plan.is_live else None,
        )
        for number, point in enumerate(left, len(outcomes) + 1)
    ]
    with (
        tqdm(total=len(points), initial=len(outcomes), unit="point", disable=disabled) as bar,
        closing(_run(plan.executor, _chunks(runs, seconds, plan.executor))) as results,
    ):
        try:
            running = {point.key: point for point in left}
            bar.set_postfix_str(_current(plan, running))
            for each, outcome in results:
                outcomes[each.point.key] = outcome
                running.pop(each.point.key)
                bar.update()
                bar.set_postfix_str(_current(plan, running))
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted with {len(outcomes)} of {len(points)} points finished; the same command resumes"
            ) from None
    for row in plan.rows:
        outcome = outcomes[row.point.key]
        if outcome.summary is not None:
            labels = {
                "experiment": plan.experiment,
                "panel": row.panel,
                "repeat": row.repeat,
                "point": row.point.folder,
            }
            report.rows.append({**outcome.summary, **labels})
    for key, point in points.items():
        if (message := outcomes[key].error) is not None:
            report.failures.setdefault(message, []).append(point.folder)
            report.num_bugs += outcomes[key].is_bug
    write_csv(plan.folder / "summary.csv", COLUMNS, report.rows)
    return report


def finished(plan: Plan) -> dict[str, dict[str, Any]]:
    """The rows of those of its points that were finished before, by key."""
    points_dir = plan.folder / "points"
    rows = {
        key: finished_summary(point, points_dir, needs_steps=plan.keeps_steps, needs_map=plan.keeps_map)
        for key, point in plan.points.items()
    }
    return {key: row for key, row in rows.items() if row is not None}


def estimate(plan: Plan, rows: Mapping[str, Mapping[str, Any]]) -> Estimate:
    """What the rows of a plan's finished points say of how long others take."""
    return Estimate(((plan.points[key], row["wall_s"]) for key, row in rows.items()), keeps_map=plan.keeps_map)


def unfinished(
    plan: Plan, rows: Mapping[str, Mapping[str, Any]], expected: Estimate
) -> tuple[list[Point], list[float]]:
    """Points without a row, and the wall seconds they may take: the longest first; those of one trace together."""
    left = [(expected.seconds(point), point) for key, point in plan.points.items() if key not in rows]
    left.sort(key=lambda each: (each[0], repr(each[1].config["workload"])), reverse=True)
    return [point for _, point in left], [seconds for seconds, _ in left]


def _chunks(runs: list[PointRun], seconds: list[float], executor: Executor) -> list[list[PointRun]]:
    """Put short points together, without leaving a worker idle; points that follow each other share a process."""
    share = sum(seconds) / (4 * executor.num_workers) if executor.num_workers else inf
    chunks: list[list[PointRun]] = []
    room = 0.0
    for each, expected_s in zip(runs, seconds, strict=True):
        if expected_s > 1.000001 * room or not chunks:  # equal ones fill a share in spite of rounding
            chunks.append([])
            room = min(executor.task_s, share)
        chunks[-1].append(each)
        room -= expected_s
    return chunks


def _run(executor: Executor, chunks: list[list[PointRun]]) -> Generator[tuple[PointRun, Outcome], None, None]:
    """The executor's results, point by point.

    A chunk whose worker was lost is run again in single points: its points did not all lose it. One that is lost again
    is a failure.
    """
    alone: list[list[PointRun]] = []
    with closing(executor.run(run_all, chunks)) as results:
        for chunk, result in results:
            if not isinstance(result, WorkerLost):
                yield from zip(chunk, result, strict=True)
            elif len(chunk) > 1:
                alone += [[each] for each in chunk]
            else:
                yield (
                    chunk[0],
                    Outcome(None, "its process was killed twice (out of memory?); run with fewer executor.num_workers"),
                )
    if alone:
        yield from _run(executor, alone)


def _current(plan: Plan, left: Mapping[str, Point]) -> str:
    """What runs now, for the progress bar: of points that run beside each other, the one that was started first."""
    point = next(iter(left.values()), None)
    if point is None:
        return ""
    seconds = arrivals_s(point.config) if is_real(point.config) else 0.0
    words = f"{_name(point)}, requests arrive for {seconds:.0f} s" if seconds else _name(point)
    others = min(plan.executor.num_workers or 1, len(left)) - 1
    return f"{words}, and {others} more" if others else words


def _name(point: Point) -> str:
    """A point in a few words."""
    return point.folder.rpartition("-")[0]


def _git_commit() -> str | None:
    """The commit the package runs from, with ``+`` where files differ from it; None outside a clone."""
    root = Path(__file__).resolve().parent.parent
    try:
        commit = subprocess.run(
            ["git", "-C", root, "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()
