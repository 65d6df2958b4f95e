"""Executors: every task has one result, whatever happens to the processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from kvbench.core import KvbenchError
from kvbench.executors.base import Executor
from kvbench.executors.local import Local
from kvbench.executors.serial import Serial
from tests.executor_jobs import check_a_kill, check_a_sweep_with_a_kill, process, sleep


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
    check_a_kill(Local(2), tmp_path)


def test_a_sweep_in_processes_is_one_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_a_sweep_with_a_kill(Local(2))


def test_a_closed_run_leaves_no_process() -> None:
    strangers = set(multiprocessing.active_children())  # joblib keeps its workers for other tests
    results = Local(2).run(sleep, [0.0, 60.0, 60.0])
    assert next(results) == (0.0, 0.0)
    started = time.monotonic()
    results.close()
    assert time.monotonic() - started < 10
    assert set(multiprocessing.active_children()) <= strangers


def test_an_unexpected_error_comes_through() -> None:
    strangers = set(multiprocessing.active_children())
    with pytest.raises(TypeError):
        list(Local(2).run(sleep, ["a", "b"]))
    assert set(multiprocessing.active_children()) <= strangers


def test_at_least_one_worker() -> None:
    assert Local().num_workers >= 1
    with pytest.raises(KvbenchError, match=r"executor\.num_workers=0"):
        Local(0)
