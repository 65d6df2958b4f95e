"""Jobs of a Slurm cluster, by submitit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import Any

from kvbench.core import KvbenchError
from kvbench.executors.base import Result, Task, WorkerLost

ARRAY = 1000
"""Tasks in one job array: Slurm's default limit is 1001."""
POLL_S = 1.0


class Slurm:
    """Job arrays, one element a task; all nodes see the same files under the same paths.

    A job that has left the queue without a result is submitted once more. Accounting is not needed: results are files,
    and the queue says who is left.

    Args:
        folder: for what submitit exchanges with the jobs and for their logs; kept where a job was lost.
        num_workers: elements that run at once; None: as many as the cluster lets.
        timeout_min: time limit of a job, in minutes.
        partition: None for the cluster's default.
        cpus_per_task: cores of each job.
        mem_gb: memory of each job; None for the cluster's default.
        options: further options of ``sbatch`` by their long names, as ``{account: me}``.
        task_s: seconds of work that are worth a job.
        patience_s: for how long a result may be missing after its job left the queue, as a shared file system may lag.

    Raises:
        KvbenchError: a number below its limit, no submitit, or no Slurm on this machine.
    """

    def __init__(
        self,
        folder: str,
        num_workers: int | None = None,
        timeout_min: int = 60,
        partition: str | None = None,
        cpus_per_task: int = 1,
        mem_gb: float | None = None,
        options: Mapping[str, Any] | None = None,
        task_s: float = 60.0,
        patience_s: float = 30.0,
    ) -> None:
        for name, value in (
            ("num_workers", num_workers),
            ("timeout_min", timeout_min),
            ("cpus_per_task", cpus_per_task),
        ):
            if value is not None and value < 1:
                raise KvbenchError(f"executor.{name}={value} is below 1; give 1 or more")
        try:
            import submitit  # noqa: F401 - before anything is planned
        except ModuleNotFoundError:
            raise KvbenchError("executor=slurm needs submitit: make install EXTRAS=dev,slurm") from None
        if shutil.which("sbatch") is None:
            raise KvbenchError("executor=slurm: there is no sbatch here; run this on a login node of the cluster")
        self.folder = Path(folder)
        self.num_workers = num_workers
        self.task_s = task_s
        self.patience_s = patience_s
        given = {"slurm_partition": partition, "mem_gb": mem_gb}
        self._parameters = {
            "name": "kvbench",
            "timeout_min": timeout_min,
            "cpus_per_task": cpus_per_task,
            "slurm_array_parallelism": num_workers or ARRAY,
            "slurm_additional_parameters": dict(options or {}),
            # Parts of one's own are imported from where this process finds them.
            "slurm_setup": [f"export PYTHONPATH={quote(os.pathsep.join(filter(None, sys.path)))}"],
            **{name: value for name, value in given.items() if value is not None},
        }

    def run(
        self, function: Callable[[Task], Result], tasks: Seq[Task]
    ) -> Generator[tuple[Task, Result | WorkerLost], None, None]:
        """Results as they come.

        Raises:
            KvbenchError: Slurm refuses the jobs.
        """
        if not tasks:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=self.folder)).resolve()
        lost: list[Task] = []
        with closing(self._try(function, tasks, folder / "first")) as results:
            for task, result in results:
                if isinstance(result, WorkerLost):
                    lost.append(task)
                else:
                    yield task, result
        with closing(self._try(function, lost, folder / "second")) as results:
            yield from results
        if not lost:
            shutil.rmtree(folder, ignore_errors=True)

    def _try(
        self, function: Callable[[Task], Result], tasks: Seq[Task], folder: Path
    ) -> Generator[tuple[Task, Result | WorkerLost], None, None]:
        """Submit every task once."""
        import submitit

        executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
        executor.update_parameters(**self._parameters)
        jobs: dict[str, tuple[submitit.Job[Any], Task]] = {}
        gone_at: dict[str, float] = {}
        try:
            for start in range(0, len(tasks), ARRAY):
                part = tasks[start : start + ARRAY]
                try:
                    submitted = executor.map_array(function, part)
                except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
                    raise KvbenchError(f"Slurm refuses the jobs: {str(error).strip().splitlines()[-1]}") from None
                jobs |= {job.job_id: (job, task) for job, task in zip(submitted, part, strict=True)}
            while jobs:
                queued = _queued()
                ended = [name for name, (job, _) in jobs.items() if job.paths.result_pickle.exists()]
                for name in ended:
                    job, task = jobs.pop(name)
                    yield task, job.result()
                now = time.monotonic()
                for name in (jobs.keys() - queued) if queued is not None else ():
                    if now - gone_at.setdefault(name, now) >= self.patience_s:
                        yield jobs.pop(name)[1], WorkerLost()
                if not ended:
                    time.sleep(POLL_S)
        finally:
            for job, _ in jobs.values():
                job.cancel()


def _queued() -> set[str] | None:
    """The user's jobs that wait or run, as ``<array>_<element>``; None where Slurm does not answer now."""
    try:
        answer = subprocess.run(
            ["squeue", "--me", "--array", "--noheader", "--format=%i"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return set(answer.stdout.split())
