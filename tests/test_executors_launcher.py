"""Hydra's launchers: what they run is what `serial` runs."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

from kvbench.composition import composer, parse
from kvbench.core import KvbenchError
from kvbench.executors.launcher import Launcher
from kvbench.plan import plan
from tests.executor_jobs import check_a_sweep_with_a_kill, process, sleep

LAUNCHERS = {
    "joblib": ["hydra.launcher.n_jobs=2"],
    "submitit_local": ["hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=2"],
}
if not {"hydra-ray-launcher"}.isdisjoint(each.name for each in distributions()):
    # It excludes the others: tested in an environment of its own (docs/scale.md), and by itself there.
    LAUNCHERS = {"ray": ["hydra.launcher.ray.init.address=local", "+hydra.launcher.ray.init.num_cpus=2"]}


def launcher(name: str, tmp_path: Path) -> Launcher:
    if name != "basic":
        pytest.importorskip(
            f"hydra_plugins.hydra_{name.partition('_')[0]}_launcher", reason="needs make install EXTRAS=dev,launchers"
        )
    return Launcher([f"hydra/launcher={name}", *LAUNCHERS.get(name, ())], tmp_path / ".launcher")


@pytest.mark.parametrize("name", ["basic", *LAUNCHERS])
def test_results_are_in_the_order_of_the_tasks(name: str, tmp_path: Path) -> None:
    assert list(launcher(name, tmp_path).run(sleep, [0.1, 0.0])) == [(0.1, 0.1), (0.0, 0.0)]
    assert not list((tmp_path / ".launcher").iterdir())
    assert list(launcher(name, tmp_path).run(process, [])) == []


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # submitit waits for no local job it lost
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_sweep_of_a_launcher_is_one_in_this_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_a_sweep_with_a_kill(launcher(name, tmp_path))


def test_an_unexpected_error_comes_through(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        list(launcher("basic", tmp_path).run(sleep, ["a"]))


def test_a_launcher_that_starts_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def launch(self, jobs: object, initial_job_idx: int) -> None:
            raise RuntimeError("no such partition")

    monkeypatch.setattr("hydra.core.plugins.Plugins.instantiate_launcher", lambda *_, **__: Refusing())
    with pytest.raises(KvbenchError, match="hydra/launcher=basic: the launcher failed: no such partition"):
        list(launcher("basic", tmp_path).run(sleep, [0.0]))


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"hydra/launcher=nothing: .*nothing"):
        Launcher(["hydra/launcher=nothing"], tmp_path)
    with pytest.raises(KvbenchError, match=r"hydra\.launcher\.workers"):
        Launcher(["hydra/launcher=basic", "hydra.launcher.workers=2"], tmp_path)


def test_a_command_has_a_launcher_or_an_executor() -> None:
    with composer() as compose:
        found = plan(compose, parse([], sweep=True), ["hydra/launcher=basic"])
        assert isinstance(found.executor, Launcher)
        with pytest.raises(KvbenchError, match="give one of them"):
            plan(compose, parse(["executor=local"], sweep=True), ["hydra/launcher=basic"])
