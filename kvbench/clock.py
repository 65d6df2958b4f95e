"""Where time comes from. Nothing else reads a clock, so a simulated and a real run are the same program."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the start of a run."""

    def now(self) -> float:
        """The current time, in seconds."""
        ...

    def advance(self, seconds: float) -> float:
        """An iteration took ``seconds``; returns the time after it."""
        ...

    def wait_until(self, when_s: float) -> float:
        """Nothing to do before ``when_s``; returns the time then."""
        ...


class VirtualClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """The current time, in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Add ``seconds``: exactly one addition per iteration, so that two runs agree to the last bit."""
        self._now += seconds
        return self._now

    def wait_until(self, when_s: float) -> float:
        """Jump to ``when_s``; never backwards."""
        self._now = max(self._now, when_s)
        return self._now


class WallClock:
    """The machine's monotonic clock, from the moment of construction."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since construction."""
        return time.perf_counter() - self._start

    def advance(self, seconds: float) -> float:
        """The work itself took the time; ``seconds`` is only what the runner measured."""
        del seconds
        return self.now()

    def wait_until(self, when_s: float) -> float:
        """Sleep until ``when_s``."""
        while (left := when_s - self.now()) > 0:
            time.sleep(left)
        return self.now()
