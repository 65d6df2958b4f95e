"""Numbers from records: one table says of every measured column of ``summary.csv`` how it is computed and in what unit.

Pure functions of a finished run's records; pandas is not needed here.

Averages over the iterations are of two kinds. *Over time* (``..._mean``, ``..._pct``) is an integral: an iteration
counts with the part of the averaging window that it covers, and time without any iteration counts as an empty batch and
a free pool. *Over iterations* (``..._iteration_...``) gives every iteration that starts in the window the same weight,
as the scripts of the PagedAttention authors do (they stamp an iteration when it is scheduled).

The window ``[measure_from_s, measure_to_s)`` applies to these averages and to the throughputs. Latencies are those of
all requests, whenever they ran: runs drain, and the paper's normalized latency knows no warm-up.

Columns ``steady_...`` are the same of the part in which a run may be stationary: from the end of the warm-up
(``kvbench.statistics.warm_up``) to the last arrival, latencies of the requests that arrive there. ``stable`` says
whether it was: the warm-up has an end, after which the number of requests in the system did not grow
(``kvbench.statistics.growth_score``).

A value that does not exist (the latency of a run that finished nothing, an average over a window in which nothing
happened) is NaN, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbench.partition import CLASSES
from kvbench.records import Record
from kvbench.statistics import growth_score, has_grown, warm_up

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Slo(NamedTuple):
    """A service level objective: what a request must keep; None asks for nothing.

    Attributes:
        ttft_s: time to first token.
        tpot_s: time per output token after the first; a request with one output token keeps it.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A record with what most metrics need of it.

    Attributes:
        steps: columns with one row per iteration, as float64.
        requests: columns with one row per request, as float64.
        num_slots: the pool, in slots.
        bytes_per_slot: K and V of one token in all layers.
        from_s: start of the averaging window.
        to_s: its end; the end of the run at the latest, so the window may be empty.
        overlap_s: per iteration, the seconds of it that lie in the window.
        inside: per iteration, whether it starts in the window.
        finished: per request, whether it ran to its end.
        slo: what requests must keep.
        arrives: per request, whether it is one of those whose latencies count.
        steady: the same run between warm-up and last arrival; None of that itself, and where arrivals take no time.
        is_stable: whether it was stationary there; None where it cannot be told.
        score: growth of the number of requests in the system, see ``kvbench.statistics.growth_score``.
    """

    steps: dict[str, Floats]
    requests: dict[str, Floats]
    num_slots: int
    bytes_per_slot: int
    from_s: float
    to_s: float
    overlap_s: Floats
    inside: Mask
    finished: Mask
    slo: Slo
    arrives: Mask
    steady: Run | None = None
    is_stable: bool | None = None
    score: float = math.nan

    @classmethod
    def of(
        cls,
        record: Record,
        num_slots: int,
        bytes_per_slot: int,
        measure_from_s: float,
        measure_to_s: float | None,
        slo: Slo = Slo(),  # noqa: B008 - immutable
    ) -> Run:
        """Prepare ``record``; ``measure_to_s`` None is the end of the run."""
        steps = {name: np.asarray(column, np.float64) for name, column in record.steps.items()}
        requests = {name: np.asarray(column, np.float64) for name, column in record.requests.items()}
        end_s = steps["end_s"]
        run_end_s = float(end_s[-1]) if len(end_s) else 0.0
        to_s = run_end_s if measure_to_s is None else min(measure_to_s, run_end_s)
        whole = cls(
            steps=steps,
            requests=requests,
            num_slots=num_slots,
            bytes_per_slot=bytes_per_slot,
            **_windowed(steps, measure_from_s, to_s),
            finished=np.isfinite(requests["finish_s"]),
            slo=slo,
            arrives=np.ones(len(requests["id"]), np.bool_),
        )
        return whole._judged()

    def _judged(self) -> Run:
        """With its steady part, and the verdict on that."""
        up_s, down_s = self.of_finished("arrival_s"), self.of_finished("finish_s")
        last_s = float(up_s[-1]) if len(up_s) else 0.0
        if last_s <= 0.0:
            return self
        warm = warm_up(up_s, down_s, last_s)
        from_s, to_s = max(warm.end_s, self.from_s), min(last_s, self.to_s)
        arrival_s = self.requests["arrival_s"]
        arrives = (arrival_s >= from_s) & (arrival_s <= to_s)
        steady = replace(self, **_windowed(self.steps, from_s, to_s), arrives=arrives)
        score = growth_score(up_s, down_s, warm.end_s, last_s)
        unstable = has_grown([score]) or not warm.is_found
        return replace(self, steady=steady, score=score, is_stable=not unstable if warm.is_long or unstable else None)

    @property
    def window_s(self) -> float:
        """Length of the averaging window; 0 if the run ended before it began."""
        return max(self.to_s - self.from_s, 0.0)

    def over_time(self, column: str) -> float:
        """Integral of a column of ``steps`` over the window, divided by the window; idle time adds nothing."""
        return self.per_second(float(np.sum(self.steps[column] * self.overlap_s)))

    def over_iterations(self, column: str) -> float:
        """Mean of a column of ``steps`` over the iterations that start in the window."""
        return _mean(self.steps[column][self.inside])

    def per_second(self, amount: float) -> float:
        """``amount`` divided by the length of the window."""
        return amount / self.window_s if self.window_s > 0.0 else math.nan

    def of_finished(self, column: str) -> Floats:
        """A column of ``requests``, without those that never finished."""
        return self.requests[column][self.finished]

    def of_counted(self, column: str) -> Floats:
        """A column of ``requests``, of those that finished and whose latencies count."""
        return self.requests[column][self.finished & self.arrives]

    def normalized_latencies_s(self) -> Floats:
        """End-to-end seconds per output token of every finished request (PagedAttention paper, section 6.1)."""
        return (self.of_counted("finish_s") - self.of_counted("arrival_s")) / self.of_counted("output_len")

    def ttfts_s(self) -> Floats:
        """Seconds from arrival to the first output token of every finished request, preempted later or not."""
        return self.of_counted("first_token_s") - self.of_counted("arrival_s")

    def tpots_s(self) -> Floats:
        """Seconds per output token after the first, of every finished request with two or more."""
        gaps = self.of_counted("output_len") - 1.0
        seconds = self.of_counted("finish_s") - self.of_counted("first_token_s")
        return seconds[gaps > 0] / gaps[gaps > 0]

    def meets_slo(self) -> Mask:
        """Per request, whether it kept the objective; one that never finished did not."""
        arrival_s, first_s, finish_s, output_len = (
            self.requests[name] for name in ("arrival_s", "first_token_s", "finish_s", "output_len")
        )
        kept: Mask = self.finished.copy()
        if self.slo.ttft_s is not None:
            kept &= first_s - arrival_s <= self.slo.ttft_s
        if self.slo.tpot_s is not None:
            kept &= finish_s - first_s <= self.slo.tpot_s * (output_len - 1.0)
        return kept

    def slo_attainment_pct(self) -> float:
        """Requests that kept the objective, rejected ones among all; NaN where there is none."""
        return math.nan if self.slo == Slo() else 100.0 * _mean(self.meets_slo()[self.arrives].astype(np.float64))

    def goodput_req_per_s(self) -> float:
        """Requests that finish in the window and kept the objective, per second of it; NaN where there is none."""
        if self.slo == Slo():
            return math.nan
        finish_s = self.requests["finish_s"]
        return self.per_second(int(np.sum(self.meets_slo() & (finish_s > self.from_s) & (finish_s <= self.to_s))))

    def num_censored(self) -> float:
        """Requests that count and were still in the system at the end of the window."""
        return int(np.sum(self.of_counted("finish_s") > self.to_s))

    def num_finished_inside(self) -> int:
        """Requests that finish in the window."""
        finish_s = self.of_finished("finish_s")
        return int(np.sum((finish_s > self.from_s) & (finish_s <= self.to_s)))

    def tokens_inside(self) -> float:
        """Output tokens of finished requests in the window: the first when it came, the others evenly until the end.

        Those of all samples and beams.
        """
        first_s, finish_s = self.of_finished("first_token_s"), self.of_finished("finish_s")
        others = self.of_finished("output_len") - 1.0
        share = _overlap(first_s, finish_s, self.from_s, self.to_s) / np.maximum(
            finish_s - first_s, np.finfo(float).tiny
        )
        first = (first_s > self.from_s) & (first_s <= self.to_s)
        return float(np.sum(self.of_finished("num_seqs") * (first + others * share)))


def _windowed(steps: dict[str, Floats], from_s: float, to_s: float) -> dict[str, Any]:
    """The fields of a run that depend on its window."""
    end_s = steps["end_s"]
    start_s = end_s - steps["seconds"]
    return {
        "from_s": from_s,
        "to_s": to_s,
        "overlap_s": _overlap(start_s, end_s, from_s, to_s),
        "inside": (start_s >= from_s) & (start_s < to_s),
    }


def _overlap(start: Floats, end: Floats, from_s: float, to_s: float) -> Floats:
    overlap: Floats = np.maximum(np.minimum(end, to_s) - np.maximum(start, from_s), 0.0)
    return overlap


def _mean(values: Floats) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _percentile(values: Floats, percent: float) -> float:
    """Linear interpolation between order statistics (numpy's default, type 7)."""
    return float(np.percentile(values, percent)) if len(values) else math.nan


def _share_of_time(run: Run, name: str) -> float:
    share_pct = 100.0 * run.over_time(name) / run.num_slots
    if name == "free":
        share_pct += 100.0 * max(1.0 - run.per_second(float(np.sum(run.overlap_s))), 0.0)
    return share_pct


def _external_fragmentation(run: Run) -> float:
    free, largest_free = run.steps["free"], run.steps["largest_free"]
    weights = np.where(free > 0, run.overlap_s, 0.0)
    total = float(np.sum(weights))
    if total == 0.0:
        return math.nan
    return float(np.sum(weights * (1.0 - largest_free / np.maximum(free, 1.0)))) / total


def _sharing_saved(run: Run) -> float:
    """``1 - 1 / mean(logical / physical)`` over iterations, as the scripts of the PagedAttention authors (Fig. 15)."""
    held = run.num_slots - run.steps["free"] - run.steps["cached"] - run.steps["pinned"]
    ratio = _mean(((held + run.steps["shared"]) / np.maximum(held, 1.0))[run.inside & (held > 0)])
    return 100.0 * (1.0 - 1.0 / ratio)


class Metric(NamedTuple):
    """One measured column of ``summary.csv``."""

    function: Callable[[Run], float | int]
    unit: str
    description: str


_CLASS_TEXT = {
    "token_states": "hold a token that a running sequence attends to",
    "reserved": "are granted, empty, and will be filled by their sequence",
    "overreserved": "were reserved for a length that never comes, or hold a finished sequence its batch still keeps",
    "padding": "are rounding that is never filled",
    "cached": "are unreferenced but reusable",
    "pinned": "are in flight",
    "free": "are unallocated",
}


def _over_time(name: str) -> Metric:
    idle = " (all of them while idle)" if name == "free" else ""
    text = f"slots that {_CLASS_TEXT[name]}, over time{idle}"
    return Metric(lambda run: _share_of_time(run, name), "% of the pool", text)


def _over_iterations(name: str) -> Metric:
    text = f"slots that {_CLASS_TEXT[name]}, over iterations"
    return Metric(lambda run: 100.0 * run.over_iterations(name) / run.num_slots, "% of the pool", text)


METRICS: dict[str, Metric] = {
    "num_requests": Metric(lambda run: len(run.requests["id"]), "", "requests of the workload"),
    "num_rejected": Metric(lambda run: int(np.sum(run.requests["rejected"])), "", "requests that can never be served"),
    "num_iterations": Metric(lambda run: len(run.steps["end_s"]), "", "iterations of the whole run"),
    "simulated_s": Metric(
        lambda run: float(run.steps["end_s"][-1]) if len(run.steps["end_s"]) else 0.0,
        "s",
        "end of the last iteration: the run's length on its own clock, drain included",
    ),
    "normalized_latency_mean_s": Metric(
        lambda run: _mean(run.normalized_latencies_s()),
        "s/token",
        "mean over finished requests of (finish - arrival) / output length",
    ),
    "normalized_latency_p90_s": Metric(
        lambda run: _percentile(run.normalized_latencies_s(), 90), "s/token", "90th percentile of the same"
    ),
    "ttft_p50_s": Metric(lambda run: _percentile(run.ttfts_s(), 50), "s", "time to first token, median"),
    "ttft_p99_s": Metric(lambda run: _percentile(run.ttfts_s(), 99), "s", "time to first token, 99th percentile"),
    "tpot_p50_s": Metric(
        lambda run: _percentile(run.tpots_s(), 50), "s/token", "time per output token after the first, median"
    ),
    "tpot_p99_s": Metric(
        lambda run: _percentile(run.tpots_s(), 99), "s/token", "time per output token after the first, 99th percentile"
    ),
    "slo_attainment_pct": Metric(
        Run.slo_attainment_pct,
        "%",
        "requests that kept the objective (slo_ttft_s, slo_tpot_s), rejected ones among all",
    ),
    "goodput_req_per_s": Metric(
        Run.goodput_req_per_s, "requests/s", "requests that kept it and finish in the window, per second of it"
    ),
    "throughput_req_per_s": Metric(
        lambda run: run.per_second(run.num_finished_inside()),
        "requests/s",
        "requests that finish in the window, per second of it",
    ),
    "throughput_tok_per_s": Metric(
        lambda run: run.per_second(run.tokens_inside()),
        "tokens/s",
        "output tokens of finished requests in the window, per second of it; recomputed tokens do not count",
    ),
    "num_running_mean": Metric(lambda run: run.over_time("num_running"), "", "requests in the batch, over time"),
    "num_running_iteration_mean": Metric(
        lambda run: run.over_iterations("num_running"), "", "requests in the batch, over iterations"
    ),
    "num_seqs_mean": Metric(
        lambda run: run.over_time("num_seqs"), "", "samples and beams of the requests in the batch, over time"
    ),
    "num_waiting_mean": Metric(lambda run: run.over_time("num_waiting"), "", "requests in the queue, over time"),
    "num_waiting_iteration_mean": Metric(
        lambda run: run.over_iterations("num_waiting"), "", "requests in the queue, over iterations"
    ),
    **{f"{name}_pct": _over_time(name) for name in CLASSES},
    **{f"{name}_iteration_pct": _over_iterations(name) for name in CLASSES},
    "internal_fragmentation_pct": Metric(
        lambda run: _share_of_time(run, "overreserved") + _share_of_time(run, "padding"),
        "% of the pool",
        "granted slots that are never filled: overreserved and padding, over time",
    ),
    "external_fragmentation_index": Metric(
        _external_fragmentation,
        "",
        "1 - largest grantable piece / free slots, over the time of iterations in which slots are free",
    ),
    "sharing_saved_pct": Metric(
        _sharing_saved,
        "% of the unshared need",
        "slots saved by sharing: 1 - 1 / mean of unshared need / slots held, over iterations",
    ),
    "num_preemptions": Metric(
        lambda run: int(np.sum(run.requests["num_preemptions"])), "", "times a sequence lost its memory"
    ),
    "recomputed_tokens": Metric(
        lambda run: int(np.sum(run.requests["recomputed_tokens"])), "tokens", "tokens computed once more"
    ),
    "lost_s": Metric(
        lambda run: float(np.sum(run.steps["recompute_s"]) + np.sum(run.steps["swap_s"])),
        "s",
        "lost to preemption: the next two together",
    ),
    "recompute_s": Metric(
        lambda run: float(np.sum(run.steps["recompute_s"])),
        "s",
        "of iterations, computing tokens again: what it took beyond decoding the same sequences (real runs: the "
        "model's time, shared out by tokens)",
    ),
    "swap_s": Metric(
        lambda run: float(np.sum(run.steps["swap_s"])),
        "s",
        "of iterations, waiting for blocks on their way to the host pool or back",
    ),
    "preempted_s": Metric(
        lambda run: float(np.sum(run.requests["preempted_s"])),
        "request seconds",
        "between losing its memory and regaining its place, of all requests",
    ),
    "swapped_out_bytes": Metric(
        lambda run: int(np.sum(run.steps["swapped_out"])) * run.bytes_per_slot, "bytes", "moved to the host pool"
    ),
    "swapped_in_bytes": Metric(
        lambda run: int(np.sum(run.steps["swapped_in"])) * run.bytes_per_slot, "bytes", "moved back from there"
    ),
    "copied_bytes": Metric(
        lambda run: int(np.sum(run.steps["copied"])) * run.bytes_per_slot, "bytes", "copied where sequences forked"
    ),
}
"""Every measured column: name -> (function, unit, description)."""

STEADY = (
    "normalized_latency_mean_s", "normalized_latency_p90_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s",
    "throughput_req_per_s", "throughput_tok_per_s", "slo_attainment_pct", "goodput_req_per_s",
)  # fmt: skip
"""Metrics that are also computed between warm-up and last arrival."""


def _steady(name: str) -> Metric:
    metric = METRICS[name]
    text = f"{name} between warm-up and last arrival"
    return metric._replace(
        function=lambda run: metric.function(run.steady) if run.steady else math.nan, description=text
    )


METRICS |= {
    "stable": Metric(
        lambda run: math.nan if run.is_stable is None else run.is_stable,
        "",
        "whether the requests in the system did not grow in number between warm-up and last arrival",
    ),
    "growth_score": Metric(lambda run: run.score, "", "how far they grew, in deviations of a queue at its limit"),
    "warmup_s": Metric(
        lambda run: run.steady.from_s if run.steady else math.nan,
        "s",
        "end of the warm-up: MSER-5 on the requests in the system, 5 mean residences at least, half of the run at most",
    ),
    "num_censored": Metric(
        lambda run: run.steady.num_censored() if run.steady else math.nan,
        "",
        "requests after the warm-up that are still in the system at the last arrival: they end with less beside them",
    ),
    **{f"steady_{name}": _steady(name) for name in STEADY},
}


def summarize(
    record: Record,
    num_slots: int,
    measure_from_s: float = 0.0,
    measure_to_s: float | None = None,
    *,
    bytes_per_slot: int = 0,
    slo: Slo = Slo(),  # noqa: B008 - immutable
) -> dict[str, float | int]:
    """Every metric of a finished run.

    Args:
        record: the run's columns, one row per iteration and one per request.
        num_slots: the pool, in slots; what percentages refer to.
        measure_from_s: start of the averaging window, in seconds of the run's clock.
        measure_to_s: its end, not included; None is the end of the run, which also cuts a later end.
        bytes_per_slot: K and V of one token in all layers.
        slo: what requests must keep.

    Returns:
        Name -> value, in the order of ``METRICS``; NaN where the run has no such value.
    """
    run = Run.of(record, num_slots, bytes_per_slot, measure_from_s, measure_to_s, slo)
    return {name: metric.function(run) for name, metric in METRICS.items()}
