"""How fast a sweep of 10,000 points is planned, resumed and loaded: `make bench` writes results/bench/sweep.csv.

Two systems x 100 rates x 50 seeds of a small workload, `records=summary`. Wall seconds of this process;
`executor=local` runs the points. Resumed, the command finds every one of them finished.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.composition import composer, parse
from kvbench.plan import Plan, plan
from kvbench.results import Results
from kvbench.sweep import execute

COLUMNS = ("what", "points", "seconds")


def command(num_points: int, folder: Path) -> list[str]:
    """What is typed for so many points, a multiple of 200."""
    return [
        "workload=fixed", "workload.num_requests=3", "system=vllm,orca_max", "workload.request_rate=range(1,101)",
        f"seed=range(0,{num_points // 200})", "records=summary", f"results_dir={folder}",
    ]  # fmt: skip


def planned(typed: list[str]) -> Plan:
    """The plan of a command."""
    with composer() as compose:
        return plan(compose, parse(typed, sweep=True))


def load(folder: Path) -> int:
    """What an analysis asks for: the summary, and the requests of all points as one table; how many these are."""
    results = Results(folder)
    assert len(results.summary)
    return int(results.dataset("requests").to_table().num_rows)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("results/bench/sweep.csv"))
    options = parser.parse_args()
    rows: list[tuple[str, int, float]] = []

    def timed(what: str, action: Callable[[], object]) -> object:
        started = time.perf_counter()
        found = action()
        rows.append((what, options.points, round(time.perf_counter() - started, 2)))
        print("  ".join(f"{name}={value}" for name, value in zip(COLUMNS, rows[-1], strict=True)), flush=True)
        return found

    with temporary() as folder:
        typed = command(options.points, folder)
        first = timed("plan", lambda: planned(typed))
        assert isinstance(first, Plan)
        assert len(first.rows) == options.points
        timed("run", lambda: execute(first, shows_progress=False))
        again = timed("resume", lambda: execute(first, shows_progress=False))
        if (found := getattr(again, "num_reused", None)) != options.points:
            raise SystemExit(f"{found} of {options.points} points were found finished")
        if (found := timed("load", lambda: load(first.folder))) != 3 * options.points:
            raise SystemExit(f"{found} requests were loaded, not {3 * options.points}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    print(f"wrote {options.out}: wall seconds, once")


@contextmanager
def temporary() -> Iterator[Path]:
    """A folder for the results."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
