"""Benchmark reports of llm-d: valid under its own schema, and with kvbench's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from llmd_benchmark_report.schema_v0_2 import BenchmarkReportV02

from kvbench import export
from kvbench.app import main
from kvbench.core import KvbenchError
from kvbench.results import Results

OPTIONS = ["system=vllm", "workload.request_rate=1.9", "workload.duration_s=120", "executor=serial"]


@pytest.fixture(scope="module", params=["full", "summary"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A point with its iterations, and one without."""
    folder = tmp_path_factory.mktemp("results")
    assert main([*OPTIONS, f"records={request.param}", f"results_dir={folder}"]) == 0
    return Results(folder / "adhoc")


@pytest.fixture(scope="module")
def report(results: Results, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (path,) = export.export(results, tmp_path_factory.mktemp("reports"))
    assert path.name.startswith("benchmark_report_v0.2,_vllm-")
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def test_a_report_is_valid_and_loses_nothing(report: dict[str, Any]) -> None:
    valid = BenchmarkReportV02(**report)
    kept = valid.dump()
    assert kept["version"] == export.VERSION
    assert kept["results"]["observability"].keys() == report["results"]["observability"].keys()
    assert kept["results"]["request_performance"] == report["results"]["request_performance"]


def test_it_says_that_it_is_simulated(report: dict[str, Any]) -> None:
    assert report["run"]["description"].endswith(": simulated")
    assert "simulated" in report["run"]["keywords"]
    assert report["scenario"]["stack"][0]["metadata"]["description"].endswith("simulated")


def test_its_numbers_are_those_of_the_summary(results: Results, report: dict[str, Any]) -> None:
    row = results.summary.iloc[0]
    found = report["results"]["request_performance"]["aggregate"]
    latency = found["latency"]
    assert found["requests"]["total"] == row["num_requests"]
    assert latency["normalized_time_per_output_token"]["mean"] == pytest.approx(row["normalized_latency_mean_s"])
    assert latency["time_to_first_token"]["p99"] == pytest.approx(row["ttft_p99_s"])
    assert latency["time_per_output_token"]["p50"] == pytest.approx(row["tpot_p50_s"])
    assert found["throughput"]["output_token_rate"]["mean"] == row["throughput_tok_per_s"]
    (component,) = report["results"]["observability"]["components"]
    assert component["component_label"] == report["scenario"]["stack"][0]["metadata"]["label"]
    used_pct = 100 - row["free_pct"] - row["cached_pct"]
    assert component["aggregate"]["kv_cache_usage"]["mean"] == pytest.approx(used_pct)
    assert component["aggregate"]["running_requests"]["mean"] == pytest.approx(row["num_running_mean"])
    if "time_series" in component:
        for name in ("token_states", "free"):
            share = report["results"]["observability"][f"kvbench_{name}"]["mean"]
            assert share == pytest.approx(row[f"{name}_pct"])
        series = component["time_series"]
        assert series["prompt_tokens"]["series"][-1]["value"] == results.steps(row)["prefill_tokens"].sum()
        assert len(series["kv_cache_usage"]["series"]) <= export.MAX_POINTS


def test_a_long_series_keeps_its_average_and_its_extremes() -> None:
    rng = np.random.default_rng(0)
    seconds = rng.exponential(0.03, 20_000)
    end_s, values = seconds.cumsum(), rng.normal(50, 10, 20_000)
    points = export._series(end_s, values, seconds, "percent")["series"]
    assert len(points) == export.MAX_POINTS
    assert min(point["min"] for point in points) == values.min()
    assert max(point["max"] for point in points) == values.max()
    assert np.mean([point["value"] for point in points]) == pytest.approx(np.average(values, weights=seconds), rel=0.01)
    times = [point["ts"] for point in points]
    assert times == sorted(times)
    assert times[0].startswith("1970-01-01T00:00:0")


def test_statistics_count_every_value_with_the_time_that_it_held() -> None:
    found = export._statistics(np.array([0.0, 10.0]), "count", np.array([3.0, 1.0]))
    assert found is not None
    assert found["mean"] == 2.5
    assert found["p50"] == 0.0
    assert found["p90"] == 10.0
    assert export._statistics(np.array([]), "count") is None


def test_what_keeps_summaries_only_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Path(__file__).resolve().parent.parent / "results" / "reference" / "smoke"
    with pytest.raises(KvbenchError, match="keeps no requests"):
        export.export(Results(kept), Path("nowhere"))
    assert export.main([str(kept)]) == 2
    assert "run the experiment to export it" in capsys.readouterr().err
