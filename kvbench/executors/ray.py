"""Workers of a Ray cluster: one that exists, or one on this machine for the time of a run."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from kvbench.core import KvbenchError
from kvbench.executors.base import Result, Task, WorkerLost
from kvbench.executors.local import num_cores

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # tell nobody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default; else Ray warns
    "RAY_task_oom_retries": "1",  # as after any other death; the default is to try for ever
    # A machine that is busy with other things for a minute is not dead. By default its node is given up after half of
    # that, and a process that asks it for a connection in the meantime, as this one may, is ended by Ray's C++.
    "RAY_health_check_failure_threshold": "20",
    "RAY_raylet_client_num_connect_attempts": "60",
}
"""Ray's own settings, of a cluster that is started here, and of this process."""


class Ray:
    """One core of the cluster for each task; all nodes see the same files under the same paths.

    Ray tells which task a dead worker had, and tries it once more itself.

    Args:
        address: of an existing cluster (``auto``: that of this node); None starts one on this machine and ends it.
        num_workers: cores of the cluster that is started; None: those this process may use.

    Raises:
        KvbenchError: fewer than one worker, a number of workers for a cluster that exists, or ray is not installed.
    """

    task_s = 5.0

    def __init__(self, address: str | None = None, num_workers: int | None = None) -> None:
        if num_workers is not None and num_workers < 1:
            raise KvbenchError(f"executor.num_workers={num_workers} is below 1; give 1 or more, or null for all cores")
        if num_workers is not None and address is not None:
            raise KvbenchError(
                f"executor.num_workers={num_workers} is for a cluster that is started here, and "
                f"executor.address={address} names one that exists; give one of them"
            )
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            import ray  # noqa: F401 - before anything is planned, and after the settings, which it reads but once
        except ModuleNotFoundError:
            raise KvbenchError("executor=ray needs ray: make install EXTRAS=dev,ray") from None
        self.address = address
        self.num_workers = (num_workers or num_cores()) if address is None else None

    def run(
        self, function: Callable[[Task], Result], tasks: Seq[Task]
    ) -> Generator[tuple[Task, Result | WorkerLost], None, None]:
        """Results as they come.

        Raises:
            KvbenchError: no cluster answers at the address.
        """
        if not tasks:
            return
        import ray
        from ray.exceptions import RayError, RayTaskError

        self._connect()
        running: dict[Any, Task] = {}
        try:
            remote: Any = ray.remote(_apply)
            remote = remote.options(num_cpus=1, max_retries=1)
            running = {remote.remote(Path.cwd(), function, task): task for task in tasks}
            while running:
                (ready,), _ = ray.wait(list(running))
                try:
                    result = ray.get(ready)
                except RayTaskError:  # the function raised, which is not expected of it
                    raise
                except RayError:
                    result = WorkerLost()
                yield running.pop(ready), result
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            ray.shutdown()

    def _connect(self) -> None:
        import ray

        try:
            if self.address is not None and self.address != "auto":
                _knock(self.address)
            ray.init(
                address=self.address or "local",
                num_cpus=self.num_workers,
                include_dashboard=None if self.address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Parts of one's own are imported from where this process finds them.
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
            )
        except (OSError, ValueError):
            raise KvbenchError(
                f"executor.address={self.address}: no Ray cluster answers there; give auto or host:port of one (`ray "
                "start --head` starts one), or null"
            ) from None


def _knock(address: str) -> None:
    """Raise OSError where nobody listens: Ray itself would wait for very long."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()


def _apply(folder: Path, function: Callable[[Task], Result], task: Task) -> Result:
    os.chdir(folder)  # paths on the command line are relative to it
    return function(task)
