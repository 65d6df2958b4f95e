"""Numbers from records: one table that says of every measured column of ``summary.csv`` how it is computed and in what unit.

Pure functions of a finished run's records; pandas is not needed here.

Two kinds of average over the iterations are kept (DESIGN.md section 5). *Over time* (``..._mean``, ``..._pct``) is an integral: every
iteration counts with its share of the averaging window, and time without any iteration counts as an empty batch and a
free pool. *Over iterations* (``..._iteration_...``) gives every iteration that starts in the window the same weight, as the
PagedAttention authors' scripts do (their timestamp is taken when the scheduler starts an iteration).

The window ``[measure_from_s, measure_to_s)`` applies to these averages and to the throughputs. Latencies are of all requests,
whenever they ran: runs drain, and the paper's normalized latency knows no warm-up.

A value that does not exist (the latency of a run that finished nothing, an average over a window in which nothing happened) is
NaN, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbench.records import Record

Floats = npt.NDArray[np.float64]

CLASSES = ("token_states", "reserved", "overreserved", "padding", "cached", "pinned", "free")
"""The ledger's classes, in the order in which figures stack them; in slots they sum to the pool at every iteration."""


@dataclass(frozen=True, slots=True)
class Run:
    """A record with what most metrics need of it.

    Attributes:
        record: the columns of iterations and requests.
        num_slots: the pool, in slots.
        window_s: length of the averaging window; it ends with the run at the latest, so it may be empty (0).
        overlap_s: per iteration, the seconds of it that lie in the window.
        inside: per iteration, whether it starts in the window.
        finished: per request, whether it ran to its end.
        finished_inside: per request, whether its end lies in the window.
    """

    record: Record
    num_slots: int
    window_s: float
    overlap_s: Floats
    inside: npt.NDArray[np.bool_]
    finished: npt.NDArray[np.bool_]
    finished_inside: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, record: Record, num_slots: int, measure_from_s: float, measure_to_s: float | None) -> Run:
        """Prepare ``record``; ``measure_to_s`` None is the end of the run."""
        steps, requests = record.steps, record.requests
        end_s = steps["end_s"]
        start_s = end_s - steps["seconds"]
        run_end_s = float(end_s[-1]) if len(end_s) else 0.0
        to_s = run_end_s if measure_to_s is None else min(measure_to_s, run_end_s)
        overlap_s = np.clip(np.minimum(end_s, to_s) - np.maximum(start_s, measure_from_s), 0.0, None)
        finish_s = requests["finish_s"]
        return cls(
            record=record,
            num_slots=num_slots,
            window_s=max(to_s - measure_from_s, 0.0),
            overlap_s=overlap_s,
            inside=(start_s >= measure_from_s) & (start_s < to_s),
            finished=np.isfinite(finish_s),
            finished_inside=(finish_s > measure_from_s) & (finish_s <= to_s),
        )

    def over_time(self, column: str) -> float:
        """Integral of a column of ``steps`` over the window, divided by the window; idle time adds nothing."""
        if self.window_s == 0.0:
            return math.nan
        return float(np.sum(self.record.steps[column] * self.overlap_s)) / self.window_s

    def over_iterations(self, column: str) -> float:
        """Mean of a column of ``steps`` over the iterations that start in the window."""
        return float(np.mean(self.record.steps[column][self.inside])) if self.inside.any() else math.nan

    def normalized_latencies_s(self) -> Floats:
        """End-to-end seconds per output token of every finished request (PagedAttention paper, section 6.1)."""
        requests = self.record.requests
        return _of(self.finished, (requests["finish_s"] - requests["arrival_s"]) / requests["output_len"])

    def ttfts_s(self) -> Floats:
        """Seconds from arrival to the first output token of every finished request, preempted later or not."""
        requests = self.record.requests
        return _of(self.finished, requests["first_token_s"] - requests["arrival_s"])

    def tpots_s(self) -> Floats:
        """Seconds per output token after the first, of every finished request with two or more."""
        requests = self.record.requests
        gaps = requests["output_len"] - 1
        has_gap = self.finished & (gaps > 0)
        return _of(has_gap, requests["finish_s"] - requests["first_token_s"]) / _of(has_gap, gaps)


def _of(rows: npt.NDArray[np.bool_], values: npt.NDArray[np.generic]) -> Floats:
    return np.asarray(values[rows], dtype=np.float64)


def _mean(values: Floats) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _percentile(values: Floats, percent: float) -> float:
    """Linear interpolation between order statistics (numpy's default, type 7)."""
    return float(np.percentile(values, percent)) if len(values) else math.nan


def _per_second(run: Run, amount: float) -> float:
    return amount / run.window_s if run.window_s > 0.0 else math.nan


def _share_of_time(run: Run, name: str) -> float:
    share_pct = 100.0 * run.over_time(name) / run.num_slots
    if name == "free" and run.window_s > 0.0:
        share_pct += 100.0 * max(1.0 - float(np.sum(run.overlap_s)) / run.window_s, 0.0)
    return share_pct


def _external_fragmentation(run: Run) -> float:
    steps = run.record.steps
    weights = np.where(steps["free"] > 0, run.overlap_s, 0.0)
    total = float(np.sum(weights))
    if total == 0.0:
        return math.nan
    return float(np.sum(weights * (1.0 - steps["largest_free"] / np.maximum(steps["free"], 1)))) / total


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


def _class_metrics() -> dict[str, Metric]:
    over_time = {
        f"{name}_pct": Metric(
            lambda run, name=name: _share_of_time(run, name),
            "% of the pool",
            f"slots that {_CLASS_TEXT[name]}, over time" + (" (all of them while idle)" if name == "free" else ""),
        )
        for name in CLASSES
    }
    over_iterations = {
        f"{name}_iteration_pct": Metric(
            lambda run, name=name: 100.0 * run.over_iterations(name) / run.num_slots,
            "% of the pool",
            f"slots that {_CLASS_TEXT[name]}, over iterations",
        )
        for name in CLASSES
    }
    return over_time | over_iterations


METRICS: dict[str, Metric] = {
    "num_requests": Metric(lambda run: len(run.record.requests["id"]), "", "requests of the workload"),
    "num_rejected": Metric(
        lambda run: int(np.sum(run.record.requests["rejected"])), "", "requests that can never be served"
    ),
    "num_iterations": Metric(lambda run: len(run.record.steps["end_s"]), "", "iterations of the whole run"),
    "simulated_s": Metric(
        lambda run: float(run.record.steps["end_s"][-1]) if len(run.record.steps["end_s"]) else 0.0,
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
    "throughput_req_per_s": Metric(
        lambda run: _per_second(run, int(np.sum(run.finished_inside))),
        "requests/s",
        "requests that finish in the window, per second of it",
    ),
    "throughput_tok_per_s": Metric(
        lambda run: _per_second(run, int(np.sum(run.record.requests["output_len"][run.finished_inside]))),
        "tokens/s",
        "output tokens of the requests that finish in the window, per second of it; recomputed tokens do not count",
    ),
    "num_running_mean": Metric(lambda run: run.over_time("num_running"), "", "requests in the batch, over time"),
    "num_running_iteration_mean": Metric(
        lambda run: run.over_iterations("num_running"), "", "requests in the batch, over iterations"
    ),
    "num_waiting_mean": Metric(lambda run: run.over_time("num_waiting"), "", "requests in the queue, over time"),
    "num_waiting_iteration_mean": Metric(
        lambda run: run.over_iterations("num_waiting"), "", "requests in the queue, over iterations"
    ),
    **_class_metrics(),
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
        lambda run: 0.0, "% of the unshared need", "slots saved by sharing; 0 while requests have one sequence each"
    ),
    "num_preemptions": Metric(
        lambda run: int(np.sum(run.record.requests["num_preemptions"])), "", "times a sequence lost its memory"
    ),
    "recomputed_tokens": Metric(
        lambda run: int(np.sum(run.record.requests["recomputed_tokens"])), "tokens", "tokens computed once more"
    ),
    "swapped_out_bytes": Metric(lambda run: 0, "bytes", "bytes swapped out; 0 while preemption recomputes"),
    "swapped_in_bytes": Metric(lambda run: 0, "bytes", "bytes swapped in; 0 while preemption recomputes"),
}
"""Every measured column: name -> (function, unit, description)."""


def summarize(
    record: Record, num_slots: int, measure_from_s: float = 0.0, measure_to_s: float | None = None
) -> dict[str, float | int]:
    """Every metric of a finished run.

    Args:
        record: the run's columns, one row per iteration and one per request.
        num_slots: the pool, in slots; what percentages refer to.
        measure_from_s: start of the averaging window, in seconds of the run's clock.
        measure_to_s: its end, not included; None is the end of the run, which also cuts a later end.

    Returns:
        Name -> value, in the order of ``METRICS``; NaN where the run has no such value.
    """
    run = Run.of(record, num_slots, measure_from_s, measure_to_s)
    return {name: metric.function(run) for name, metric in METRICS.items()}
