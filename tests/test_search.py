"""The search for a rate: on functions that are known, on a queue with a formula, and as points of an experiment."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvbench.composition import Composer, parse
from kvbench.core import KvbenchError
from kvbench.figures import capacity
from kvbench.metrics import METRICS
from kvbench.plan import plan
from kvbench.results import Results
from kvbench.search import FALLING, RISING, TOLERANCE, Search, of_steady_state
from kvbench.statistics import paired_ratio, t_interval
from kvbench.sweep import execute
from tests.queues import arrivals_s, departures_s

SMALL = ("workload=fixed", "workload/arrivals=poisson", "workload.duration_s=60", "executor=serial", "kv_cache_seqs=2")


def test_criteria_are_metrics() -> None:
    assert set(RISING + FALLING) <= METRICS.keys()


@pytest.mark.parametrize("start", [0.01, 1.0, 3.0, 50.0])
def test_a_rate_is_found_from_either_side(start: float) -> None:
    search = Search("ttft_p50_s", 2.0)
    assert search.rate(lambda rate: rate**2 / 8, start) == pytest.approx(4.0, rel=TOLERANCE / 4)
    assert len(search.tried) < 20
    falling = Search("slo_attainment_pct", 90.0)
    assert falling.rate(lambda rate: 100 - rate, start) == pytest.approx(10.0, rel=TOLERANCE / 4)


def test_a_threshold_out_of_reach_is_an_error() -> None:
    with pytest.raises(KvbenchError, match="is kept up to"):
        Search("ttft_p50_s", 2.0).rate(lambda _: 1.0, 1.0)
    with pytest.raises(KvbenchError, match="is missed down to"):
        Search("ttft_p50_s", 2.0).rate(lambda _: 3.0, 1.0)
    with pytest.raises(KvbenchError, match="nothing finishes there"):
        Search("ttft_p50_s", 2.0).rate(lambda _: math.nan, 1.0)


def test_the_correction_takes_out_the_trace_s_length() -> None:
    """An M/D/1 queue whose requests may stay 20 services on average: the load is 0.974, by the formula."""
    stay_s = 20.0
    load = 2 * (stay_s - 1) / (2 * (stay_s - 1) + 1)

    def read(seed: int, duration_s: float) -> float:
        def mean_stay_s(rate: float) -> float:
            up = arrivals_s(rate, duration_s, seed)
            return float(np.mean(departures_s(up) - up))

        return Search("ttft_p50_s", stay_s).rate(mean_stay_s, 1.0, factor=1.1)

    for duration_s in (500.0, 1000.0):
        whole = np.array([read(seed, duration_s) for seed in range(60)])
        half = np.array([read(seed, duration_s / 2) for seed in range(60)])
        assert whole.mean() - load > 0.015
        corrected = t_interval([of_steady_state(*pair) for pair in zip(whole, half, strict=True)])
        assert abs(corrected.value - load) < (whole.mean() - load) / 2


def test_an_experiment_of_searches(compose: Composer, tmp_path: Path) -> None:
    """Two systems of two repeats; the rate found is confirmed by runs beside it, and compared by the figure."""
    typed = ("system=orca_max,vllm", "metric=ttft_p50_s", "threshold=2", "repeats=2", f"results_dir={tmp_path}")
    done = plan(compose, parse([*SMALL, *typed, "workload.request_rate=4"], sweep=True))
    report = execute(done, shows_progress=False)
    assert not report.failures
    results = Results(done.folder)
    rows = results.summary
    assert len(rows) == 4
    for _, row in rows.iterrows():
        tried = json.loads((results.folder(row) / "manifest.json").read_text())["searched"]
        (below, kept), (above, missed) = (
            max((rate, value) for rate, value in tried["whole"] if rate <= row["request_rate"]),
            min((rate, value) for rate, value in tried["whole"] if rate > row["request_rate"]),
        )
        assert kept <= 2 < missed
        assert above / below <= 1 + TOLERANCE
        assert row["trace_capacity_req_per_s"] == row["request_rate"]
        assert row["capacity_req_per_s"] != row["trace_capacity_req_per_s"]
        assert row["point"].startswith(f"{row['system']}-opt_13b-fixed-ttft_p50_s-2-")
    vllm, other = (rows[rows["system"] == name]["capacity_req_per_s"].tolist() for name in ("vllm", "orca_max"))
    table = capacity.table(results)
    assert table is not None
    assert str(t_interval(vllm)) in table
    assert str(paired_ratio(vllm, other)) in table
    assert capacity.draw(results).keys() == {"capacity"}
    again = execute(plan(compose, parse([*SMALL, *typed, "workload.request_rate=4"], sweep=True)), shows_progress=False)
    assert again.num_reused == 4


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("metric=ttft_p50_s", "repeats=2"), "give both, or none"),
        (("threshold=1", "repeats=2"), "give both, or none"),
        (("metric=foo",), "metric=foo has no threshold to search"),
        (("threshold=1",), "give both, or none"),
        (("metric=ttft_p50_s", "threshold=1"), "one run is no capacity"),
        (("metric=ttft_p50", "threshold=1", "repeats=2"), "did you mean ttft_p50_s"),
        (("metric=slo_attainment_pct", "threshold=90", "repeats=2"), "needs an objective"),
        (("metric=ttft_p50_s", "threshold=-1", "repeats=2"), "can never be kept"),
        (("metric=ttft_p50_s", "threshold=1", "repeats=2", "workload/arrivals=all_at_once"), "has one trace"),
        (("metric=ttft_p50_s", "threshold=1", "repeats=2", "workload=trace"), "has no arrivals to choose"),
    ],
)
def test_what_cannot_be_searched_is_refused(compose: Composer, typed: tuple[str, ...], words: str) -> None:
    with pytest.raises(KvbenchError, match=words):
        plan(compose, parse([*SMALL, *typed], sweep=False))


def test_the_objective_is_counted(compose: Composer, tmp_path: Path) -> None:
    typed = ("slo_ttft_s=0.1", "slo_tpot_s=0.05", "workload.request_rate=12", f"results_dir={tmp_path}")
    done = plan(compose, parse([*SMALL, *typed], sweep=False))
    execute(done, shows_progress=False)
    results = Results(done.folder)
    row = results.summary.iloc[0]
    requests = pd.DataFrame(results.requests(row))
    tpot_s = (requests["finish_s"] - requests["first_token_s"]) / (requests["output_len"] - 1)
    kept = (requests["first_token_s"] - requests["arrival_s"] <= 0.1) & (tpot_s <= 0.05)
    assert 0 < kept.mean() < 1
    assert row["slo_attainment_pct"] == pytest.approx(100 * kept.mean())
    assert row["goodput_req_per_s"] == pytest.approx(kept.sum() / row["simulated_s"])
