"""The figure of noise on results whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.composition import composer, parse
from kvbench.figures import fig_noise
from kvbench.plan import plan
from kvbench.results import Results
from kvbench.statistics import paired_ratio, t_interval
from tests.synthetic_results import write_results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Four seeds at a point of the paper's, of which the first is its own; two lengths and two thresholds."""
    seeds = [
        {"panel": "seeds", "request_rate": 1.9, "repeat": repeat, "normalized_latency_mean_s": latency}
        for repeat, latency in enumerate((0.2, 0.1, 0.3, 0.8))
    ]
    readings = [
        {
            "panel": "readings",
            "system": system,
            "duration_s": duration_s,
            "threshold": threshold,
            "repeat": repeat,
            "trace_capacity_req_per_s": rate * (1 + repeat / 10),
            "capacity_req_per_s": rate,
        }
        for system, rate in (("orca_oracle", 1.0), ("vllm", 1.8))
        for duration_s in (900, 3600)
        for threshold in (0.1, 0.5)
        for repeat in range(3)
    ]
    return write_results(tmp_path_factory.mktemp("noise"), seeds + readings)


def test_seeds_beside_the_paper_s_own(results: Results) -> None:
    (point,) = fig_noise.seeds(results.summary)
    assert point.name == "vLLM, 13B, 1.9/s"
    assert (point.replay, point.latencies) == (0.2, [0.1, 0.3, 0.8])
    assert point.papers == pytest.approx(0.24, abs=0.01)
    assert point.variation == pytest.approx(0.3606 / 0.4, rel=1e-3)


def test_readings_are_paired(results: Results) -> None:
    found = fig_noise.readings(results.summary)
    assert [(each.threshold, each.duration_s) for each in found] == [(0.1, 900), (0.1, 3600), (0.5, 900), (0.5, 3600)]
    rates = [1.8, 1.98, 2.16]
    for each in found:
        assert each.rate == pytest.approx(t_interval(rates))
        assert each.steady.value == pytest.approx(1.8)
        assert each.gain == pytest.approx(paired_ratio(rates, [1.0, 1.1, 1.2]))
        assert each.gains == pytest.approx([1.8] * 3)
        assert (each.papers is None) == (each.duration_s == 900)
    assert found[3].papers == pytest.approx(1.8, abs=0.1)


def test_figure_and_table(results: Results, tmp_path: Path) -> None:
    assert fig_noise.draw(results).keys() == {"fig_noise"}
    table = fig_noise.table(results)
    assert table is not None
    assert "vLLM, 13B, 1.9/s" in table
    assert "15 min" in table
    assert fig_noise.claims(results) == []
    nothing = write_results(tmp_path / "nothing", [{"panel": "other"}])
    assert fig_noise.draw(nothing) == {}
    assert fig_noise.table(nothing) is None


def test_the_experiment_has_the_paper_s_trace_and_its_points() -> None:
    with composer() as compose:
        planned = plan(compose, parse(["+experiment=fig_noise", "panel=seeds"], sweep=False))
    arrivals = [row.point.config["choices"]["workload/arrivals"] for row in planned.rows]
    assert [each for each in arrivals if each == "paper"] == ["paper"] * 3
    assert len(arrivals) == 75
