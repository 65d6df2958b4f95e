"""What every executor must do, whoever runs its tasks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvbench.allocators.paged import Paged
from kvbench.composition import composer, parse
from kvbench.executors.base import Executor, WorkerLost
from kvbench.executors.serial import Serial
from kvbench.plan import Plan, plan
from kvbench.sweep import execute


class Job(NamedTuple):
    """A task: its number, a folder to leave marks in, and when to be killed."""

    number: int
    marks: Path
    killed: str = "never"


def work(job: Job) -> int:
    """Square a number, or die at the first try, or always."""
    mark = job.marks / str(job.number)
    tries = len(list(job.marks.glob(f"{job.number}.*")))
    mark.with_suffix(f".{tries}").touch()
    if job.killed == "always" or (job.killed == "once" and tries == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return job.number**2


def tries(job: Job) -> int:
    """How often a job was begun."""
    return len(list(job.marks.glob(f"{job.number}.*")))


def sleep(seconds: Any) -> Any:
    """Be busy."""
    time.sleep(seconds)
    return seconds


def process(_: int) -> int:
    """Where a task runs."""
    return os.getpid()


class Deadly(Paged):
    """An allocator whose process is killed in the middle of a run, as long as a file exists."""

    def __init__(
        self,
        num_slots: int,
        flag: str,
        block_size: int = 16,
        copy_on_write: bool = True,
        host_slots: int | None = None,
    ) -> None:
        super().__init__(num_slots, block_size, copy_on_write=copy_on_write, host_slots=host_slots)
        self.flag = flag
        self.num_granted = 0

    def allocate(self, seq: Hashable, slots: int) -> int:
        """As `Paged`, or the end."""
        self.num_granted += 1
        if self.num_granted == 3 and Path(self.flag).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().allocate(seq, slots)


def check_a_kill(executor: Executor, marks: Path) -> None:
    """Of eight tasks one dies once and has its result, one dies always and has none, and nobody else notices."""
    killed = {2: "once", 5: "always"}
    jobs = [Job(number, marks, killed.get(number, "never")) for number in range(8)]
    found = dict(executor.run(work, jobs))
    assert sorted(found) == jobs
    assert isinstance(found[jobs[5]], WorkerLost)
    assert [found[job] for job in jobs if job.number != 5] == [job.number**2 for job in jobs if job.number != 5]
    assert tries(jobs[2]) == 2
    assert tries(jobs[5]) == 2


def check_a_sweep(executor: Executor) -> None:
    """In the current folder: the summary is that of ``serial``."""
    serial, other = _plans(executor, [Path(name).absolute() for name in "abcdef"])
    assert not execute(serial, shows_progress=False).failures
    assert not execute(other, shows_progress=False).failures
    pd.testing.assert_frame_equal(_table(serial), _table(other), check_exact=True)


def check_a_sweep_with_a_kill(executor: Executor) -> None:
    """In the current folder: a kill costs its point alone, the command completes the sweep, as ``serial`` does.

    The points are put into few tasks, so that others share that of the killer.
    """
    flags = [Path(name).absolute() for name in "abcdef"]
    serial, other = _plans(executor, flags)
    assert len(execute(serial, shows_progress=False).rows) == len(flags)
    flags[3].touch()
    report = execute(other, shows_progress=False)
    killed = other.rows[3].point.folder
    assert {message.partition(" (")[0]: points for message, points in report.failures.items()} == {
        "its process was killed twice": [killed]
    }
    assert len(report.rows) == len(flags) - 1
    flags[3].unlink()
    report = execute(other, shows_progress=False)
    assert report.num_reused == len(flags) - 1
    assert not report.failures
    pd.testing.assert_frame_equal(_table(serial), _table(other), check_exact=True)


def _plans(executor: Executor, flags: list[Path]) -> tuple[Plan, Plan]:
    """One sweep, for ``serial`` and for another executor; a point whose flag exists kills its process."""
    typed = ["workload=fixed", "workload.num_requests=9", "allocator._target_=tests.executor_jobs.Deadly"]
    typed += [f"+allocator.flag={','.join(map(str, flags))}", "system=vllm"]
    with composer() as compose:
        serial, other = (plan(compose, parse([*typed, f"name={name}"], sweep=True)) for name in ("serial", "other"))
    return replace(serial, executor=Serial()), replace(other, executor=executor)


def _table(of: Plan) -> pd.DataFrame:
    return pd.read_csv(of.folder / "summary.csv").drop(columns="wall_s")
