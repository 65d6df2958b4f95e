"""The command line: read what was typed, plan, run, draw, print. Turns every user's mistake into a line or two."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

from kvbench import __version__, command
from kvbench.capacity import ESTIMATED, MEASURED, Capacity
from kvbench.composition import CONF, Common, composer, groups, is_launcher, parse
from kvbench.core import KvbenchError
from kvbench.estimate import PER_PROCESS_S
from kvbench.figures.experiment import draw
from kvbench.figures.terminal import aligned, stability, text
from kvbench.metrics import METRICS
from kvbench.plan import Plan, plan
from kvbench.results import SIMULATED, Results
from kvbench.schema import HEADINGS
from kvbench.statistics import intervals_by
from kvbench.sweep import Report, estimate, execute, finished, unfinished

USAGE = """\
kvbench {version}: what a KV-cache memory strategy does to throughput, latency and memory of LLM serving

  python -m kvbench [key=value ...]                        one point
  python -m kvbench -m key=value,value ... [key=value ...] all combinations
  python -m kvbench +experiment=NAME [panel=a] [system=vllm] [key=value ...]   an experiment, or part of it

Choices:
{groups}
Keys (dotted ones are listed by --cfg):
{keys}

  -m, --multirun   multiply comma lists, choice() and range()
  --cfg            print the resolved configuration of the first point, and run nothing
  --dry-run        list what would run, with an estimate of the time, and run nothing
  --version        print the version
  -h, --help       print this

Examples:
  python -m kvbench system=orca_max workload.request_rate=0.5
  python -m kvbench -m system=vllm,orca_max workload.request_rate=1,2
  python -m kvbench system=vllm reservation=max
  python -m kvbench workload=trace workload.path=requests.csv
  python -m kvbench +experiment=fig_throughput panel=a
  python -m kvbench system=vllm live=true
Results go to results/<experiment or adhoc>/. The same command again reuses what is finished.
"""

_REPEATED = ("normalized_latency_mean_s", "ttft_p50_s", "ttft_p99_s", "throughput_req_per_s")
"""Metrics in the table of points with repeats, each between warm-up and last arrival."""
_LABELS = (
    "panel", "system", "model", "hardware", "workload", "request_rate", "duration_s", "kv_cache_bytes", "seed",
)  # fmt: skip
"""Columns that tell points apart; those in which they do not differ are left out."""
_MEASURED = {"simulated_s": "measured_s"}
"""What a column of ``summary.csv`` is called where it was measured."""
_MAX_ROWS = 60
_NARROWEST = 16
"""Characters of a line that a meaning has at least, however narrow the terminal is."""


@dataclass(slots=True)
class _Arguments:
    overrides: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    sweep: bool = False
    shows_config: bool = False
    is_dry: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        The exit status: 0, 1 where a point failed, 2 for a mistake in the command, 130 after Ctrl-C.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # so that a user's own classes are found however kvbench was started
    words = list(sys.argv[1:] if argv is None else argv)
    return command.run("kvbench", lambda: _main(words), "points that are finished stay; the same command resumes")


def _main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(_usage())
        return 0
    if "--version" in argv:
        print(f"kvbench {__version__}")
        return 0
    arguments = _read(argv)
    with composer() as compose:
        planned = plan(compose, parse(arguments.overrides, sweep=arguments.sweep), arguments.launcher)
    if arguments.shows_config:
        _print_config(planned)
        return 0
    for line in dict.fromkeys(capacity.line() for capacity in planned.capacities):
        print(f"Memory: {line}")
    if seconds := planned.arrivals_s:
        print(f"Time: real, one point after the other; requests arrive for {seconds / 60:.1f} minutes in all.")
    if arguments.is_dry:
        _print_plan(planned)
        return 0
    report = execute(planned)
    if report.num_reused:
        print(f"Finished before: {report.num_reused} of {len({row.point.key for row in planned.rows})} points.")
    for line in _measured_memory(planned, report):
        print(f"Memory: {line}")
    if report.rows:
        _present(planned, report)
    return _tell_failures(planned, report)


def _read(argv: list[str]) -> _Arguments:
    """Hydra's habits, as far as they make sense here: overrides, ``-m``, ``--cfg [job]``."""
    arguments = _Arguments()
    rest = iter(argv)
    for word in rest:
        if word in ("-m", "--multirun"):
            arguments.sweep = True
        elif word == "--dry-run":
            arguments.is_dry = True
        elif word in ("--cfg", "-c", "--cfg=job"):
            arguments.shows_config = True
        elif word in ("job", "all") and arguments.shows_config:
            continue
        elif word.startswith("-"):
            raise KvbenchError(f"unknown option {word}; python -m kvbench --help lists the options")
        elif is_launcher(word):
            arguments.launcher.append(word)
        else:
            arguments.overrides.append(word)
    return arguments


def _usage() -> str:
    lines = [f"  {group:<18} {', '.join(options)}" for group, options in groups().items()]
    said = dict(re.findall(r"^(\w+):.*?# (.*)$", (CONF / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE))
    keys = [f"  {each.name:<18} {said[each.name]}" for each in fields_of(Common)]
    return USAGE.format(version=__version__, groups="\n".join(lines), keys="\n".join(keys)).rstrip()


def _print_config(planned: Plan) -> None:
    first = planned.rows[0]
    if len(planned.rows) > 1:
        print(f"# the first of {len(planned.rows)} points")
    print(f"# {planned.folder / 'points' / first.point.folder}")
    print(yaml.safe_dump(first.point.config, sort_keys=False), end="")


def _print_plan(planned: Plan) -> None:
    """What is left of a plan, in the order in which it would run, and how long it may take."""
    rows = finished(planned)
    expected = estimate(planned, rows)
    left, seconds = unfinished(planned, rows, expected)
    print(f"Points: {len(planned.points)}, of which {len(rows)} are finished and {len(left)} would run.")
    if not left:
        return
    cells = [(point.folder, f"{each:.2g}") for point, each in zip(left[:_MAX_ROWS], seconds, strict=False)]
    print(aligned([("point", "seconds"), *cells]))
    if len(left) > _MAX_ROWS:
        print(f"... and {len(left) - _MAX_ROWS} more")
    workers = planned.executor.num_workers
    elapsed_s = max(sum(seconds) / workers, *seconds) + PER_PROCESS_S if workers else 0.0
    shared = f", {_duration(elapsed_s)} with {workers} workers and their start" if workers else ""
    print(f"Time: about {_duration(sum(seconds))} of one core{shared} (estimated {expected.source}).")


def _duration(seconds: float) -> str:
    """In the unit a person would use."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def _present(planned: Plan, report: Report) -> None:
    """Draw where the experiment has a figure, and print a table either way."""
    results = Results(planned.folder)
    with intervals_by(planned.interval):
        table = draw(results, planned.experiment) or _plain_table(report.rows, results)
    print()
    print(_provenance_line(report.rows))
    print(table)
    if rejecting := [row for row in report.rows if row["num_rejected"]]:
        count = sum(row["num_rejected"] for row in rejecting)
        points = f"{len(rejecting)} of {len(report.rows)} points"
        print(f"Rejected: {count:,} requests of {points} can never have their memory; they are in no latency.")
    print(f"Results: {planned.folder}")
    folders = {path.name for path in (planned.folder / "points").iterdir() if not path.name.startswith(".")}
    if others := len(folders - {str(row["point"]) for row in report.rows}):
        print(
            f"{others} points of other commands are in points/ there, but not in summary.csv: that is of one command."
        )


def _plain_table(rows: list[dict[str, Any]], results: Results) -> str:
    """Of what has no table of its own."""
    if len(rows) == 1:
        return _point_table(rows[0])
    if not any(row["repeat"] for row in rows):
        return _table(rows)
    from kvbench.figures import replications  # brings pandas

    labels = [name for name in _labels(rows) if name != "seed"]
    return replications.table(results.summary, labels, {f"steady_{name}": HEADINGS[name] for name in _REPEATED})


def _measured_memory(planned: Plan, report: Report) -> list[str]:
    """The distinct capacity reports of points whose pool was sized when they started."""
    if not any(capacity.source == ESTIMATED for capacity in planned.capacities):
        return []
    results = Results(planned.folder)
    found = (results.manifest(row)["capacity"] for row in report.rows)
    names = [each.name for each in fields_of(Capacity)]
    lines = (Capacity(**{name: each[name] for name in names}).line() for each in found if each["source"] == MEASURED)
    return list(dict.fromkeys(lines))


def _provenance_line(rows: list[dict[str, Any]]) -> str:
    """What every table has to say of its numbers."""
    devices = " and ".join(dict.fromkeys(str(row["device"]) for row in rows))
    sources = "; ".join(dict.fromkeys(str(row["workload_source"]) for row in rows))
    invalid = {(row["workload"], row["num_dropped"], row["num_clipped"]): None for row in rows}
    lost = [
        f" {name}: of the data {dropped:,} invalid requests are dropped, {clipped:,} clipped."
        for name, dropped, clipped in invalid
        if dropped or clipped
    ]
    return f"All numbers below are {devices}. Lengths: {sources}.{''.join(lost)}"


def _point_table(row: dict[str, Any]) -> str:
    """One point: its metrics with unit and meaning, without those that only another kind of run fills."""
    head = f"{row['system']}, {row['model']} on {row['hardware']}, {row['workload']}"
    head += f" at {row['request_rate']:g} requests/s" if row["request_rate"] is not None else ""
    shown = {
        name: metric
        for name, metric in METRICS.items()
        if not any(part in name for part in ("_iteration_", "steady_")) and (row[name] or name in HEADINGS)
    }
    names = {} if row["device"] == SIMULATED else _MEASURED
    values = {name: stability(row[name]) if name == "stable" else text(row[name]) for name in shown}
    numbers = aligned([("metric", "value"), *((names.get(name, name), value) for name, value in values.items())])
    rows = [("unit", "meaning"), *((each.unit, each.description) for each in shown.values())]
    units = max(len(unit) for unit, _ in rows)
    lines = [f"{line}  {unit:<{units}}  " for line, (unit, _) in zip(numbers.splitlines(), rows, strict=True)]
    room = shutil.get_terminal_size().columns - len(lines[0]) if sys.stdout.isatty() else sys.maxsize
    said = (wrap(meaning, max(room, _NARROWEST), break_on_hyphens=False) for _, meaning in rows)
    below = "\n" + " " * len(lines[0])
    return "\n".join([head, *(line + below.join(parts) for line, parts in zip(lines, said, strict=True))])


def _table(rows: list[dict[str, Any]]) -> str:
    """Several points: what tells them apart, and the metrics most people look for."""
    labels = _labels(rows)
    unusual = {
        "capacity_req_per_s": any(row["capacity_req_per_s"] is not None for row in rows),
        "num_rejected": any(row["num_rejected"] for row in rows),
        "stable": any(row["stable"] is not True for row in rows),
    }
    metrics = [name for name in HEADINGS if unusual.get(name, True)]
    cells = [
        [stability(row["stable"]) if name == "stable" else text(row.get(name)) for name in (*labels, *metrics)]
        for row in rows[:_MAX_ROWS]
    ]
    more = f"\n... and {len(rows) - _MAX_ROWS} more in summary.csv" if len(rows) > _MAX_ROWS else ""
    return aligned([[*labels, *(HEADINGS[name] for name in metrics)], *cells], left=len(labels)) + more


def _labels(rows: list[dict[str, Any]]) -> list[str]:
    return [name for name in _LABELS if name == "system" or len({row.get(name) for row in rows}) > 1]


def _tell_failures(planned: Plan, report: Report) -> int:
    """One line for each reason; returns the exit status."""
    for message, folders in report.failures.items():
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        print(f"kvbench: {folders[0]}{more} failed: {message}", file=sys.stderr)
    if report.num_bugs:
        print(f"kvbench: error.json in its folder under {planned.folder / 'points'} has the traceback", file=sys.stderr)
    return 1 if report.failures else 0
