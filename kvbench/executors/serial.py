"""One task after another, in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq

from kvbench.executors.base import Result, Task, WorkerLost


class Serial:
    """Nothing runs beside a task; what a real clock needs."""

    num_workers = 1
    task_s = 0.0

    def run(
        self, function: Callable[[Task], Result], tasks: Seq[Task]
    ) -> Generator[tuple[Task, Result | WorkerLost], None, None]:
        """Results in the order of the tasks."""
        for task in tasks:
            yield task, function(task)
