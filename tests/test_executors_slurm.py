"""Slurm: a cluster of this machine gives what `serial` gives, and a killed job costs nobody but the killer."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("submitit", reason="executor=slurm needs make install EXTRAS=dev,slurm")

from kvbench.core import KvbenchError
from kvbench.executors import slurm
from kvbench.executors.launcher import Launcher
from kvbench.executors.slurm import Slurm
from tests import single_node_slurm
from tests.executor_jobs import check_a_kill, check_a_sweep, check_a_sweep_with_a_kill, process, sleep

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if reason := single_node_slurm.missing():
        pytest.skip(reason)
    with (
        single_node_slurm.cluster(tmp_path_factory.mktemp("slurm")) as environment,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(slurm, "POLL_S", 0.1)
        yield


def test_a_killed_job_costs_nobody_but_the_killer(tmp_path: Path) -> None:
    check_a_kill(Slurm(str(tmp_path / "slurm"), patience_s=1), tmp_path)
    assert list(tmp_path.glob("slurm/*/second/*.err"))  # the lost job's log is kept


def test_a_sweep_on_a_cluster_is_one_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_a_sweep_with_a_kill(Slurm("slurm", patience_s=1))


def test_a_sweep_of_hydra_s_launcher_is_one_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs make install EXTRAS=dev,slurm,launchers")
    monkeypatch.chdir(tmp_path)
    check_a_sweep(Launcher(["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=2"], tmp_path / ".launcher"))


def test_a_closed_run_leaves_no_job_and_a_whole_one_no_file(tmp_path: Path) -> None:
    executor = Slurm(str(tmp_path))
    results = executor.run(sleep, [0.0, 60.0, 60.0])
    assert next(results) == (0.0, 0.0)
    results.close()
    end = time.monotonic() + 60
    while slurm._queued() and time.monotonic() < end:
        time.sleep(0.2)
    assert slurm._queued() == set()
    for path in tmp_path.iterdir():
        assert path.is_dir()
    before = set(tmp_path.iterdir())
    assert len(dict(executor.run(process, [1]))) == 1
    assert set(tmp_path.iterdir()) == before


def test_more_tasks_than_an_array_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "ARRAY", 2)
    assert dict(Slurm(str(tmp_path)).run(sleep, [0.0, 0.1, 0.2])) == {0.0: 0.0, 0.1: 0.1, 0.2: 0.2}


def test_an_unexpected_error_comes_through(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="TypeError"):
        list(Slurm(str(tmp_path)).run(sleep, ["a"]))


def test_jobs_that_slurm_refuses(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"Slurm refuses the jobs: .*[Pp]artition"):
        list(Slurm(str(tmp_path), partition="none").run(sleep, [0.0]))


def test_nothing_to_do(tmp_path: Path) -> None:
    assert list(Slurm(str(tmp_path)).run(process, [])) == []


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvbenchError, match=r"executor\.timeout_min=0"):
        Slurm(str(tmp_path), timeout_min=0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KvbenchError, match="no sbatch here"):
        Slurm(str(tmp_path))
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(KvbenchError, match="make install EXTRAS=dev,slurm"):
        Slurm(str(tmp_path))


def test_a_queue_that_does_not_answer_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("squeue", 60)

    monkeypatch.setattr(subprocess, "run", silent)
    assert slurm._queued() is None
