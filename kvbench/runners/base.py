"""What the engine asks of a runner."""

from __future__ import annotations

from typing import Protocol

from kvbench.core import Batch, StepResult


class Runner(Protocol):
    """Executes one batch at a time, for real or on paper."""

    device_name: str
    """For tables: ``simulated``, or what computes."""
    may_stop_early: bool
    """Whether an output may end before its recorded length."""
    weights_bytes: int | None
    """What the model takes, where one is loaded."""

    def execute(self, batch: Batch) -> StepResult:
        """Compute the batch; returns the seconds it took and the sequences that produced their last token in it."""
        ...
