"""What the engine asks of a runner."""

from __future__ import annotations

from typing import Protocol

from kvbench.core import Batch, StepResult


class Runner(Protocol):
    """Executes one batch at a time, for real or on paper."""

    def execute(self, batch: Batch) -> StepResult:
        """Compute the batch; returns the seconds it took and the sequences that produced their last token in it."""
        ...
