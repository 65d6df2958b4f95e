"""Jobs of one of Hydra's launchers: joblib, submitit, ray or any other plug-in that is installed."""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

from hydra import initialize
from hydra._internal.callbacks import Callbacks
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from kvbench.core import KvbenchError
from kvbench.executors.base import Result, Task, WorkerLost


class Launcher:
    """One job for each task.

    A launcher says nothing before its last job has ended, and when one dies it tells neither which nor what the others
    returned. So jobs leave their results in files, and those without one are launched once more, then one by one.

    Args:
        overrides: as typed: ``hydra/launcher=NAME`` and ``hydra.launcher.KEY=VALUE``.
        folder: for what is exchanged with the jobs, on a file system that all of them see; gone afterwards.

    Raises:
        KvbenchError: there is no such launcher, or it does not have such a key.
    """

    num_workers = None
    task_s = 5.0

    def __init__(self, overrides: Seq[str], folder: Path) -> None:
        self.overrides = list(overrides)
        self.folder = folder
        self._in_hydra(lambda config, context: None)

    def run(
        self, function: Callable[[Task], Result], tasks: Seq[Task]
    ) -> Generator[tuple[Task, Result | WorkerLost], None, None]:
        """Results at the end of all."""
        if not tasks:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self.folder)).resolve()
        try:
            for number, task in enumerate(tasks):
                _task(folder, number).write_bytes(pickle.dumps(task))
            everything = list(range(len(tasks)))
            for batch in (everything, everything, *([number] for number in everything)):
                left = [number for number in batch if not _result(folder, number).exists()]
                if left:
                    self._launch(function, folder, left)
            for number, task in enumerate(tasks):
                path = _result(folder, number)
                yield task, pickle.loads(path.read_bytes()) if path.exists() else WorkerLost()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _launch(self, function: Callable[[Task], Result], folder: Path, numbers: list[int]) -> None:
        jobs = [[f"number={number}"] for number in numbers]

        def launch(config: DictConfig, context: HydraContext) -> None:
            job = partial(_job, folder, function, list(sys.path))
            launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=job, config=config)
            try:
                returned = launcher.launch(jobs, initial_job_idx=0)
            except Exception as error:  # whatever a plug-in raises where a worker died
                if not any(folder.glob("*.begun")):  # there never was one
                    words = (str(error).strip() or type(error).__name__).splitlines()[-1]
                    raise KvbenchError(f"{' '.join(self.overrides)}: the launcher failed: {words}") from error
                return
            for each in returned:
                _ = each.return_value  # raises what the function did

        self._in_hydra(launch, folder)

    def _in_hydra(self, action: Callable[[DictConfig, HydraContext], None], folder: Path | None = None) -> None:
        """Compose the launcher's configuration and do something with it."""
        ConfigStore.instance().store("kvbench_task", {"number": None})
        settings = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"]
        settings += [f"hydra.sweep.dir='{folder}'", "hydra.sweep.subdir=jobs"] if folder else []
        here = GlobalHydra.instance()
        outer = here.hydra
        here.clear()
        try:
            initialize(config_path=None, version_base="1.3", job_name="kvbench")
            hydra: Any = here.hydra
            try:
                config = hydra.compose_config("kvbench_task", [*self.overrides, *settings], RunMode.MULTIRUN)
            except HydraException as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                raise KvbenchError(f"{' '.join(self.overrides)}: {'; '.join(lines[:3])}") from None
            action(config, HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks()))
        finally:
            here.hydra = outer


def _job(folder: Path, function: Callable[[Any], Any], path: list[str], config: DictConfig) -> None:
    """What a job does."""
    (folder / f"{config.number}.begun").touch()
    sys.path += [each for each in path if each not in sys.path]  # for parts of one's own
    task = pickle.loads(_task(folder, config.number).read_bytes())
    content = pickle.dumps(function(task))
    result = _result(folder, config.number)
    part = result.with_suffix(".part")
    part.write_bytes(content)
    part.replace(result)


def _task(folder: Path, number: int) -> Path:
    return folder / f"{number}.task"


def _result(folder: Path, number: int) -> Path:
    return folder / f"{number}.result"
