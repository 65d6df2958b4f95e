"""Worker processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for

from kvbench.core import KvbenchError
from kvbench.executors.base import Result, Task, WorkerLost


class Local:
    """Processes on all cores, fed one task at a time.

    When a worker is killed its pool is lost, and it cannot be told which of the running tasks took it down. So each
    of them is tried once more, alone in a fresh process; only one that dies again is given up.

    Args:
        num_workers: processes; None: one for each core this process may use.

    Raises:
        KvbenchError: fewer than one worker.
    """

    task_s = 0.5

    def __init__(self, num_workers: int | None = None) -> None:
        if num_workers is not None and num_workers < 1:
            raise KvbenchError(f"executor.num_workers={num_workers} is below 1; give 1 or more, or null for all cores")
        self.num_workers = num_workers or num_cores()

    def run(
        self, function: Callable[[Task], Result], tasks: Seq[Task]
    ) -> Generator[tuple[Task, Result | WorkerLost], None, None]:
        """Results as they come. A single task runs in this process."""
        if len(tasks) == 1:
            yield tasks[0], function(tasks[0])
            return
        left = deque(tasks)
        while left:
            suspects: list[Task] = []
            yield from _drain(function, left, min(self.num_workers, len(left)), suspects)
            for task in suspects:
                again: list[Task] = []
                yield from _drain(function, deque([task]), 1, again)
                if again:
                    yield task, WorkerLost()


def _drain(
    function: Callable[[Task], Result], left: deque[Task], num_workers: int, suspects: list[Task]
) -> Generator[tuple[Task, Result], None, None]:
    """Run what is ``left`` in a pool; when it breaks, stop, with the tasks that were running in ``suspects``."""
    strangers = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _start_worker)
    running: dict[Future[Result], Task] = {}
    broken = done = False
    try:
        while running or (left and not broken):
            while left and not broken and len(running) < num_workers:
                try:
                    running[pool.submit(function, left[0])] = left[0]
                    left.popleft()
                except BrokenProcessPool:
                    broken = True
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    broken = True
                    suspects.append(task)
                else:
                    yield task, result
        done = True
    finally:
        if not done:  # interrupted or closed: nobody waits for the results
            for process in set(multiprocessing.active_children()) - strangers:
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it (a killed parent cannot stop its workers)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel

        def watch() -> None:
            wait_for([sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
