"""Executors: every task has one result, whatever happens to the processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvbench.core import KvbenchError
from kvbench.executors.base import Executor, WorkerLost
from kvbench.executors.local import Local
from kvbench.executors.serial import Serial


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


def test_serial_keeps_the_order_and_the_process() -> None:
    assert list(Serial().run(process, [1, 2])) == [(1, os.getpid()), (2, os.getpid())]


def test_local_runs_in_other_processes() -> None:
    found = dict(Local(2).run(process, [1, 2, 3, 4]))
    assert sorted(found) == [1, 2, 3, 4]
    assert os.getpid() not in found.values()


def test_one_task_needs_no_process() -> None:
    assert list(Local(2).run(process, [1])) == [(1, os.getpid())]


@pytest.mark.parametrize("executor", [Serial(), Local(2)])
def test_nothing_to_do(executor: Executor) -> None:
    assert list(executor.run(process, [])) == []


def test_a_killed_worker_costs_nobody_but_the_killer(tmp_path: Path) -> None:
    killed = {2: "once", 5: "always"}
    jobs = [Job(number, tmp_path, killed.get(number, "never")) for number in range(8)]
    found = dict(Local(2).run(work, jobs))
    assert sorted(found) == jobs
    assert isinstance(found[jobs[5]], WorkerLost)
    assert [found[job] for job in jobs if job.number != 5] == [job.number**2 for job in jobs if job.number != 5]
    assert tries(jobs[2]) == 2
    assert tries(jobs[5]) == 2


def test_a_closed_run_leaves_no_process() -> None:
    results = Local(2).run(sleep, [0.0, 60.0, 60.0])
    assert next(results) == (0.0, 0.0)
    started = time.monotonic()
    results.close()
    assert time.monotonic() - started < 10
    assert not multiprocessing.active_children()


def test_an_unexpected_error_comes_through() -> None:
    with pytest.raises(TypeError):
        list(Local(2).run(sleep, ["a", "b"]))
    assert not multiprocessing.active_children()


def test_at_least_one_worker() -> None:
    assert Local().num_workers >= 1
    with pytest.raises(KvbenchError, match=r"executor\.num_workers=0"):
        Local(0)
