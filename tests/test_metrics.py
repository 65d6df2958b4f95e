"""Metrics against hand-made records."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.metrics import METRICS, summarize
from kvbench.partition import CLASSES
from kvbench.records import Record

NUM_SLOTS = 100

# Three iterations: [0, 1), [1, 3), idle until 5, [5, 6). Slots of each class; the rest of the pool is free.
STEPS: dict[str, list[float]] = {
    "end_s": [1.0, 3.0, 6.0],
    "seconds": [1.0, 2.0, 1.0],
    "num_running": [1, 2, 1],
    "num_waiting": [3, 0, 0],
    "token_states": [10, 40, 20],
    "reserved": [5, 10, 0],
    "overreserved": [2, 4, 6],
    "padding": [1, 2, 3],
    "cached": [0, 0, 4],
    "pinned": [0, 1, 0],
    "free": [82, 43, 67],
    "largest_free": [82, 20, 30],
    "num_seqs": [1, 4, 1],
    "shared": [0, 56, 0],
    "copied": [0, 3, 0],
    "swapped_out": [0, 0, 16],
    "swapped_in": [0, 0, 0],
    "recompute_s": [0.0, 0.25, 0.0],
    "swap_s": [0.0, 0.5, 0.125],
}
# A (2 tokens), B (5 tokens, preempted once), C (1 token), and D, which was rejected.
REQUESTS: dict[str, list[float]] = {
    "id": [0, 1, 2, 3],
    "arrival_s": [0.0, 0.5, 5.0, 5.5],
    "prompt_len": [8, 30, 19, 3000],
    "output_len": [2, 5, 1, 7],
    "first_token_s": [1.0, 1.0, 6.0, math.nan],
    "finish_s": [3.0, 3.0, 6.0, math.nan],
    "num_seqs": [1, 3, 1, 1],
    "num_preemptions": [0, 1, 0, 0],
    "recomputed_tokens": [0, 31, 0, 0],
    "preempted_s": [0.0, 1.5, 0.25, 0.0],
    "rejected": [False, False, False, True],
}


def record(steps: dict[str, list[float]] = STEPS, requests: dict[str, list[float]] = REQUESTS) -> Record:
    def columns(table: dict[str, list[float]]) -> dict[str, Any]:
        reals = {name for name in table if name.endswith("_s") or name == "seconds"}
        return {
            name: np.array(values, np.float64 if name in reals else bool if name == "rejected" else np.int32)
            for name, values in table.items()
        }

    return Record(steps=columns(steps), requests=columns(requests))


def rows_of(table: dict[str, list[float]], count: int) -> dict[str, list[float]]:
    return {name: values[:count] for name, values in table.items()}


def test_one_table_says_everything_of_every_column() -> None:
    assert list(summarize(record(), NUM_SLOTS)) == list(METRICS)
    assert all(metric.description for metric in METRICS.values())
    assert all(METRICS[name].unit for name in METRICS if name.endswith(("_s", "_pct", "_bytes")))


def test_counts() -> None:
    found = summarize(record(), NUM_SLOTS)
    assert found["num_requests"] == 4
    assert found["num_rejected"] == 1
    assert found["num_iterations"] == 3
    assert found["num_preemptions"] == 1
    assert found["recomputed_tokens"] == 31
    assert found["simulated_s"] == 6.0
    assert all(isinstance(found[name], int) for name in ("num_requests", "num_preemptions", "recomputed_tokens"))


def test_seconds_lost_to_preemption() -> None:
    found = summarize(record(), NUM_SLOTS)
    assert (found["recompute_s"], found["swap_s"], found["lost_s"]) == (0.25, 0.625, 0.875)
    assert found["preempted_s"] == 1.75


def test_latencies_are_of_all_finished_requests_whatever_the_window() -> None:
    # A waits and runs 3 s for 2 tokens, B 2.5 s for 5, C 1 s for 1.
    for window in ((0.0, None), (4.0, 5.0)):
        found = summarize(record(), NUM_SLOTS, *window)
        assert found["normalized_latency_mean_s"] == pytest.approx((1.5 + 0.5 + 1.0) / 3)
        assert found["normalized_latency_p90_s"] == pytest.approx(1.4)  # between 1.0 and 1.5, at 0.8 of the way
        assert found["ttft_p50_s"] == pytest.approx(1.0)
        assert found["ttft_p99_s"] == pytest.approx(1.0)
        assert found["tpot_p50_s"] == pytest.approx((2.0 / 1 + 2.0 / 4) / 2)  # C has no second token


def test_averages_over_time_count_seconds_and_idle_as_free() -> None:
    found = summarize(record(), NUM_SLOTS)
    assert found["num_running_mean"] == pytest.approx((1 * 1 + 2 * 2 + 1 * 1) / 6)
    assert found["num_waiting_mean"] == pytest.approx(3 * 1 / 6)
    assert found["token_states_pct"] == pytest.approx((10 * 1 + 40 * 2 + 20 * 1) / 6)
    assert found["pinned_pct"] == pytest.approx(1 * 2 / 6)
    assert found["cached_pct"] == pytest.approx(4 * 1 / 6)
    assert found["free_pct"] == pytest.approx((82 * 1 + 43 * 2 + 67 * 1 + 100 * 2) / 6)
    assert found["internal_fragmentation_pct"] == pytest.approx(((2 + 1) * 1 + (4 + 2) * 2 + (6 + 3) * 1) / 6)


def test_what_streams_share_copy_and_swap() -> None:
    found = summarize(record(), NUM_SLOTS, bytes_per_slot=10)
    # 18, 56 and 29 slots are held; without sharing the second would need 112.
    assert found["sharing_saved_pct"] == pytest.approx(100 * (1 - 1 / ((1 + 2 + 1) / 3)))
    assert found["num_seqs_mean"] == pytest.approx((1 * 1 + 4 * 2 + 1 * 1) / 6)
    assert (found["swapped_out_bytes"], found["swapped_in_bytes"], found["copied_bytes"]) == (160, 0, 30)
    assert summarize(record(), NUM_SLOTS, 5.0)["sharing_saved_pct"] == 0.0


def test_averages_over_iterations_weigh_them_alike() -> None:
    found = summarize(record(), NUM_SLOTS)
    assert found["num_running_iteration_mean"] == pytest.approx(4 / 3)
    assert found["num_waiting_iteration_mean"] == pytest.approx(1.0)
    assert found["token_states_iteration_pct"] == pytest.approx(70 / 3)
    assert found["free_iteration_pct"] == pytest.approx((82 + 43 + 67) / 3)


def test_external_fragmentation_is_of_the_time_in_which_something_runs_and_is_free() -> None:
    found = summarize(record(), NUM_SLOTS)
    expected = (0.0 * 1 + (1 - 20 / 43) * 2 + (1 - 30 / 67) * 1) / 4
    assert found["external_fragmentation_index"] == pytest.approx(expected)
    full = STEPS | {"free": [0, 0, 0], "largest_free": [0, 0, 0]}
    assert math.isnan(summarize(record(full), NUM_SLOTS)["external_fragmentation_index"])


def test_window_takes_the_part_of_an_iteration_that_lies_in_it() -> None:
    found = summarize(record(), NUM_SLOTS, 2.0, 5.5)  # 1 s of the second, 2 s idle, half of the third
    assert found["num_running_mean"] == pytest.approx((2 * 1 + 1 * 0.5) / 3.5)
    assert found["free_pct"] == pytest.approx((43 * 1 + 100 * 2 + 67 * 0.5) / 3.5)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0.0, None, 4 / 3), (1.0, 5.0, 2.0), (0.5, 5.5, 1.5), (5.0, None, 1.0), (0.0, 1.0, 1.0)],
)
def test_an_iteration_belongs_to_the_window_it_starts_in(start: float, end: float | None, expected: float) -> None:
    assert summarize(record(), NUM_SLOTS, start, end)["num_running_iteration_mean"] == pytest.approx(expected)


def test_window_ends_with_the_run() -> None:
    assert summarize(record(), NUM_SLOTS, 1.0, 1e9) == summarize(record(), NUM_SLOTS, 1.0, None)


def test_throughput_counts_requests_that_finish_in_the_window() -> None:
    assert summarize(record(), NUM_SLOTS)["throughput_req_per_s"] == pytest.approx(3 / 6)
    assert summarize(record(), NUM_SLOTS, 3.0, 6.0)["throughput_req_per_s"] == pytest.approx(1 / 3)  # (3, 6]
    assert summarize(record(), NUM_SLOTS, 2.0, 5.0)["throughput_req_per_s"] == pytest.approx(2 / 3)


def test_throughput_spreads_tokens_from_the_first_to_the_last() -> None:
    assert summarize(record(), NUM_SLOTS)["throughput_tok_per_s"] == pytest.approx((2 + 3 * 5 + 1) / 6)
    # Half of A's other token and of the other four of each of B's three samples; C's only token comes at 6.
    assert summarize(record(), NUM_SLOTS, 2.0, 5.0)["throughput_tok_per_s"] == pytest.approx((0.5 + 3 * 2.0) / 3)
    assert summarize(record(), NUM_SLOTS, 0.0, 1.0)["throughput_tok_per_s"] == pytest.approx(1.0 + 3.0)


def test_what_does_not_exist_is_nan() -> None:
    rejected = REQUESTS | {
        "first_token_s": [math.nan] * 4,
        "finish_s": [math.nan] * 4,
        "rejected": [True] * 4,
    }
    found = summarize(record(rows_of(STEPS, 0), rejected), NUM_SLOTS)
    assert found["num_rejected"] == 4
    assert found["num_iterations"] == 0
    assert found["simulated_s"] == 0.0
    for name in ("normalized_latency_mean_s", "ttft_p99_s", "tpot_p50_s", "throughput_req_per_s", "num_running_mean"):
        assert math.isnan(found[name])
    assert all(math.isnan(found[f"{name}_iteration_pct"]) for name in CLASSES)


def test_a_window_after_the_run_has_no_averages() -> None:
    found = summarize(record(), NUM_SLOTS, 7.0)
    assert math.isnan(found["free_pct"])
    assert math.isnan(found["num_running_iteration_mean"])
    assert math.isnan(found["throughput_tok_per_s"])
    assert found["normalized_latency_mean_s"] > 0


def test_an_idle_window_is_free() -> None:
    found = summarize(record(), NUM_SLOTS, 3.5, 4.5)
    assert found["free_pct"] == 100.0
    assert found["num_running_mean"] == 0.0
    assert math.isnan(found["num_running_iteration_mean"])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(1, 30))
def test_classes_sum_to_the_pool_in_both_averages(data: st.DataObject, count: int) -> None:
    seconds = data.draw(st.lists(st.floats(0.01, 5.0), min_size=count, max_size=count))
    gaps = data.draw(st.lists(st.sampled_from([0.0, 0.0, 3.0]), min_size=count, max_size=count))
    steps = {name: [0.0] * count for name in STEPS}
    steps["seconds"] = seconds
    steps["end_s"] = np.cumsum(np.array(seconds) + np.array(gaps)).tolist()
    for i in range(count):
        cuts = sorted(data.draw(st.lists(st.integers(0, NUM_SLOTS), min_size=6, max_size=6)))
        for name, low, high in zip(CLASSES, [0, *cuts], [*cuts, NUM_SLOTS], strict=True):
            steps[name][i] = high - low
        steps["largest_free"][i] = steps["free"][i]
    start = data.draw(st.floats(0.0, 0.9 * steps["end_s"][-1]))
    found = summarize(record(steps), NUM_SLOTS, start)
    assert sum(found[f"{name}_pct"] for name in CLASSES) == pytest.approx(100.0)
    over_iterations = [found[f"{name}_iteration_pct"] for name in CLASSES]
    assert math.isnan(over_iterations[0]) or sum(over_iterations) == pytest.approx(100.0)


def served(service_s: float, num: int = 1000) -> dict[str, float | int]:
    """A single server: one request a second arrives, each is served in ``service_s``."""
    arrival = np.arange(num, dtype=np.float64)
    finish = np.maximum.accumulate(arrival - np.arange(num) * service_s) + (np.arange(num) + 1) * service_s
    requests: dict[str, list[float]] = {
        "id": list(range(num)),
        "arrival_s": arrival.tolist(),
        "prompt_len": [1] * num,
        "output_len": [1] * num,
        "first_token_s": finish.tolist(),
        "finish_s": finish.tolist(),
        "num_seqs": [1] * num,
        "num_preemptions": [0] * num,
        "recomputed_tokens": [0] * num,
        "preempted_s": [0.0] * num,
        "rejected": [False] * num,
    }
    steps = {name: [values[0]] for name, values in STEPS.items()} | {"end_s": [finish[-1]], "seconds": [finish[-1]]}
    return summarize(record(steps, requests), NUM_SLOTS)


def test_a_server_that_keeps_up_is_stable_and_its_steady_part_is_between_warm_up_and_last_arrival() -> None:
    found = served(0.9)
    assert found["stable"] is True
    assert found["growth_score"] == pytest.approx(0, abs=0.5)
    assert found["warmup_s"] == pytest.approx(5 * 0.9)  # five times the mean time in the system
    assert found["num_censored"] == 1  # the last one ends after the arrivals
    assert found["steady_ttft_p50_s"] == pytest.approx(0.9)
    assert found["steady_throughput_req_per_s"] == pytest.approx(1.0, rel=0.01)


def test_a_server_that_falls_behind_is_not() -> None:
    found = served(1.1)
    assert found["stable"] is False
    assert found["growth_score"] > 3
    assert found["warmup_s"] == pytest.approx(999 / 2)
    assert found["num_censored"] == pytest.approx(1000 * (1 - 1 / 1.1), abs=2)
    assert found["steady_ttft_p50_s"] > found["ttft_p50_s"]


def test_requests_that_arrive_together_have_no_steady_state() -> None:
    found = summarize(record(requests=REQUESTS | {"arrival_s": [0.0] * 4}), NUM_SLOTS)
    assert all(math.isnan(found[name]) for name in ("stable", "warmup_s", "num_censored", "steady_ttft_p50_s"))
