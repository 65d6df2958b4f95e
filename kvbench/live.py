"""A run as it goes on, in the terminal: batch and queue, what the pool holds, throughput, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel as Frame
from rich.table import Table
from rich.text import Text

from kvbench.core import Batch, StepResult
from kvbench.engine import Engine
from kvbench.partition import CLASSES
from kvbench.runners.simulated import Simulated

REFRESH_S = 0.1
"""Between two pictures, by the wall clock."""
WINDOW_S = 10.0
"""Of the throughput, by the run's clock."""
_LEVELS = " ▁▂▃▄▅▆▇█"
_BAR = 56


class _Sample(NamedTuple):
    """Where the run was at a time by its own clock."""

    now_s: float
    num_finished: int
    num_tokens: int


class Panel:
    """Watches an engine; drawn while it is entered, and once more at the end.

    Where there is no terminal, only the last picture is printed.

    Args:
        engine: becomes watched.
        num_requests: of the whole run.
        headline: which point of how many this is.
        console: where to draw; None: the terminal, on stderr.
        wall_s: the wall clock.
    """

    def __init__(
        self,
        engine: Engine,
        num_requests: int,
        headline: str,
        console: Console | None = None,
        wall_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._num_requests = num_requests
        self._headline = headline
        self._wall_s = wall_s
        self._started_s = self._drawn_s = wall_s()
        self._num_finished = self._num_tokens = self._num_steps = 0
        self._pool = engine.ledger.newest()
        self._samples: deque[_Sample] = deque([_Sample(engine.clock.now(), 0, 0)])
        self._batch_sizes: deque[int] = deque([0], maxlen=_BAR)
        self._queue_lens: deque[int] = deque([0], maxlen=_BAR)
        self._live = Live(console=console or Console(stderr=True), auto_refresh=False)
        engine.watchers = [*engine.watchers, self]

    def __enter__(self) -> Panel:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Draw for the last time, and leave it standing."""
        self._draw()
        self._live.stop()

    def watch(self, batch: Batch, result: StepResult) -> None:
        """Count, and draw if it is time."""
        self._num_steps += 1
        self._num_finished += len(result.finished)
        self._num_tokens += len(batch.running) + batch.num_siblings
        is_last = self._num_finished + len(self._engine.rejected) == self._num_requests
        if is_last or self._wall_s() - self._drawn_s >= REFRESH_S:
            self._pool = self._engine.ledger.newest()
            self._draw()

    def _draw(self) -> None:
        engine = self._engine
        now_s = engine.clock.now()
        self._batch_sizes.append(len(engine.scheduler.running))
        self._queue_lens.append(len(engine.scheduler.waiting) + len(engine.scheduler.swapped))
        self._samples.append(_Sample(now_s, self._num_finished, self._num_tokens))
        while len(self._samples) > 2 and now_s - self._samples[1].now_s >= WINDOW_S:
            self._samples.popleft()
        self._live.update(self.picture(), refresh=True)
        self._drawn_s = self._wall_s()

    def picture(self) -> Frame:
        """The panel as it stands."""
        engine, scheduler = self._engine, self._engine.scheduler
        done = self._num_finished + len(engine.rejected)
        passed_s = self._wall_s() - self._started_s
        left = f"{_clock(passed_s / done * (self._num_requests - done))} left" if done else "?"
        rejected = f", {len(engine.rejected)} rejected" if engine.rejected else ""
        now_s = engine.clock.now()
        speed = f", {now_s / passed_s:,.0f} times real time" if passed_s > 0 and now_s > 2 * passed_s else ""
        swapped = f", {len(scheduler.swapped)} swapped out" if scheduler.swapped else ""
        first, last = self._samples[0], self._samples[-1]
        span_s = last.now_s - first.now_s
        rates = [(last[i] - first[i]) / span_s if span_s > 0 else 0.0 for i in (1, 2)]
        table = Table.grid(padding=(0, 2))
        table.add_row("requests", _bar([(done, "green"), (self._num_requests - done, "bright_black")]))
        table.add_row("", f"{done:,} of {self._num_requests:,} done{rejected}; {_clock(passed_s)} passed, {left}")
        table.add_row("batch", Text(_sparks(self._batch_sizes), "green"))
        table.add_row("queue", Text(_sparks(self._queue_lens), "red"))
        table.add_row("", f"{self._batch_sizes[-1]:,} run, {len(scheduler.waiting):,} wait{swapped}")
        pool = [(part.label, self._pool[name], part.color) for name, part in CLASSES.items() if self._pool[name]]
        num_slots = sum(amount for _, amount, _ in pool)
        table.add_row("pool", _bar([(amount, color) for _, amount, color in pool]))
        shares = [(f"{label} {100 * amount / num_slots:.0f} %  ", color) for label, amount, color in pool]
        table.add_row("", Text.assemble(*shares))
        table.add_row("throughput", f"{rates[0]:.2f} requests/s, {rates[1]:,.0f} tokens/s over the last {WINDOW_S:g} s")
        table.add_row("clock", f"{now_s:,.1f} s, {self._num_steps:,} iterations{speed}")
        device = engine.runner.device_name
        note = device if device == Simulated.device_name else f"measured on {device}"
        return Frame(Group(table), title=self._headline, subtitle=note, title_align="left", subtitle_align="right")


def _bar(parts: list[tuple[float, str]]) -> Text:
    """Parts of a whole as a bar of blocks; the ends are rounded, so that the lengths sum up."""
    whole = sum(amount for amount, _ in parts) or 1
    text, total, drawn = Text(), 0.0, 0
    for amount, color in parts:
        total += amount
        end = round(_BAR * total / whole)
        text.append("█" * (end - drawn), color)
        drawn = end
    return text


def _sparks(values: deque[int]) -> str:
    """A curve of blocks, the newest value last; the highest is full."""
    highest = max(values) or 1
    levels = [_LEVELS[-(-value * (len(_LEVELS) - 1) // highest)] for value in values]
    return "".join(levels).rjust(_BAR)


def _clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
