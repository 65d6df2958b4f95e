"""What a sweep asks of an executor."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from typing import Protocol, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerLost:
    """Stands for a result that never came: the process that ran the task died, also at the second try."""


class Executor(Protocol):
    """Runs tasks somewhere; knows nothing of what they are."""

    @property
    def num_workers(self) -> int | None:
        """Tasks that run at once; None where only the executor's surroundings know."""
        ...

    @property
    def task_s(self) -> float:
        """Seconds of work that are worth a task of their own here: what is shorter is put together."""
        ...

    def run(
        self, function: Callable[[Task], Result], tasks: Seq[Task]
    ) -> Generator[tuple[Task, Result | WorkerLost], None, None]:
        """Apply ``function`` to every task; yields each with its result as soon as there is one, in any order.

        Closing the iterator stops the work. What ``function`` raises is raised here: it is expected not to.
        """
        ...
