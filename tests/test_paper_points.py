"""The paper's plotted points: complete, of the right kind, and with the rates that a second reading of them gave."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.figures.fig_sharing import SERIES
from kvbench.paper.curves import crossing
from kvbench.paper.points import Kind, latency_panels, published

CONF = Path(__file__).parents[1] / "conf"
SYSTEMS = ("fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "vllm")

# Rates at 0.5 s/token, computed independently from the vector paths, in the order of SYSTEMS.
RATES = {
    "a": (0.2308, 0.5248, 0.7736, 1.0995, 1.9294),
    "b": (0.0998, 0.2031, 0.2687, 0.4029, 0.9392),
    "c": (0.115, 0.9176, 1.2766, 1.6216, 2.3775),
    "d": (2.5275, 3.8522, 16.1085, 21.0769, 28.0548),
    "e": (1.2641, 1.2517, 6.2927, 10.4972, 18.7147),
    "f": (0.8718, 5.1055, 17.1094, 19.1682, 20.1707),
}
NUM_MEASUREMENTS = {"a": 29, "b": 18, "c": 26, "d": 28, "e": 22, "f": 21}


# Of Fig. 14, in the order of SYSTEMS, which FasterTransformer is not among there.
RATES_OF_GROUPS = {
    "a": (1.5239, 9.0256, 12.6621, 18.1095),
    "b": (0.5054, 4.7021, 7.0122, 10.3282),
    "c": (0.5034, 3.0334, 4.6311, 7.1116),
    "d": (1.2744, 7.0158, 9.3959, 17.0051),
    "e": (0.3615, 3.2458, 5.0057, 9.5901),
    "f": (0.2921, 1.9099, 3.1622, 7.0208),
}
NUM_MEASUREMENTS_OF_GROUPS = {"a": 15, "b": 18, "c": 17, "d": 21, "e": 15, "f": 15}
GROUPS = {"fig14_parallel": "abc", "fig14_beams": "def"}

PANELS = [("fig12", letter, SYSTEMS, RATES[letter], NUM_MEASUREMENTS[letter]) for letter in RATES] + [
    (figure, letter, SYSTEMS[1:], RATES_OF_GROUPS[letter], NUM_MEASUREMENTS_OF_GROUPS[letter])
    for figure, letters in GROUPS.items()
    for letter in letters
]


@pytest.mark.parametrize(("figure", "letter", "systems", "rates", "num_measurements"), PANELS)
def test_a_panel_has_all_its_curves_with_known_crossings(
    figure: str, letter: str, systems: tuple[str, ...], rates: tuple[float, ...], num_measurements: int
) -> None:
    curves = latency_panels(figure)[letter].curves
    assert tuple(curves) == systems
    for system, rate in zip(systems, rates, strict=True):
        found = crossing((point.x, point.y) for point in curves[system].points).rate
        assert found == pytest.approx(rate, abs=6e-5), system
    points = [point for curve in curves.values() for point in curve.points]
    assert sum(point.kind is not Kind.LEAVES_PLOT for point in points) == num_measurements
    for point in points:
        assert (point.y > 1.0) == (point.kind is not Kind.PLOTTED)


def test_the_second_vllm_point_at_a_rate_is_kept() -> None:
    points = latency_panels()["a"].curves["vllm"].measurements
    assert [point.y for point in points if point.x == 1.5] == [0.0424, 0.0487]


@pytest.mark.parametrize("figure", ["fig12", *GROUPS])
def test_a_next_rate_continues_a_curve_that_leaves_the_plot_in_the_axes(figure: str) -> None:
    for panel in latency_panels(figure).values():
        for curve in panel.curves.values():
            last, leaves = curve.measurements[-1], curve.points[-1]
            assert (curve.next_rate is not None) == (leaves.kind is Kind.LEAVES_PLOT and last.y < 1.1)
            if curve.next_rate is not None:
                assert curve.next_rate > leaves.x
            assert curve.rates == tuple(sorted(set(curve.rates)))


def test_the_experiment_runs_exactly_these_rates_under_these_conditions() -> None:
    content = yaml.safe_load((CONF / "experiment" / "fig_throughput.yaml").read_text())
    models = published()["table1"]["models"]
    listed: dict[tuple[str, str], dict[str, Any]] = {(p["panel"], p["system"]): p for p in content["points"]}
    assert len(listed) == len(content["points"]) == 30
    for letter, panel in latency_panels().items():
        for system, curve in panel.curves.items():
            point = listed[letter, system]
            assert tuple(point["workload.request_rate"]) == curve.rates
            assert point["workload.duration_s"] == panel.duration_s
            assert (point["model"], point["workload"]) == (panel.model, panel.workload)
            assert point["hardware"] == models[panel.model]["hardware"]


@pytest.mark.parametrize(
    ("figure", "experiment"), [("fig14_parallel", "fig_parallel_sampling"), ("fig14_beams", "fig_beam_search")]
)
def test_experiments_of_groups_run_these_rates_and_more_where_a_curve_bends(figure: str, experiment: str) -> None:
    content = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text())
    common = content["common"]
    listed: dict[tuple[str, str], dict[str, Any]] = {(p["panel"], p["system"]): p for p in content["points"]}
    assert len(listed) == len(content["points"])
    for letter, panel in latency_panels(figure).items():
        assert common["workload.duration_s"] == panel.duration_s
        assert (common["model"], common["workload"]) == (panel.model, panel.workload)
        assert common["hardware"] == published()["table1"]["models"][panel.model]["hardware"]
        for system, curve in panel.curves.items():
            point = listed[letter, system]
            assert set(point["workload.request_rate"]) >= set(curve.rates)
            assert point.get("workload.num_samples", 1) == panel.num_samples
            assert point.get("workload.beam_width", 1) == panel.beam_width


def test_the_experiment_of_sharing_runs_the_paper_s_widths() -> None:
    content = yaml.safe_load((CONF / "experiment" / "fig_sharing.yaml").read_text())
    paper = published()["fig15"]
    for name in ("workload.request_rate", "workload.duration_s", "measure_from_s", "measure_to_s"):
        assert content["common"][name] == paper[name.removeprefix("workload.")]
    recorded = yaml.safe_load((CONF / "runner" / "beams" / "recorded.yaml").read_text())
    assert {point["panel"] for point in content["points"]} == set(SERIES)
    for point in content["points"]:
        series = SERIES[point["panel"]]
        assert tuple(point[f"workload.{series.column}"]) == tuple(series.papers)
        assert point["workload"] == series.workload
        beta = ("beta", point["runner.beams.beta"]) if "runner.beams.beta" in point else None
        assert series.beams == (("model", recorded["model"]) if point.get("runner/beams") == "recorded" else beta)
        assert point.get("repeats", 1) >= series.num_seeds


def test_experiments_over_block_sizes_run_the_paper_s_conditions() -> None:
    experiments = {
        stem: yaml.safe_load((CONF / "experiment" / f"{stem}.yaml").read_text())
        for stem in ("fig_block_size", "fig_swap_vs_recompute", "fig_swap_microbenchmark")
    }
    sizes = [size for size, _ in published()["fig18b"]["panels"]["alpaca"]["latency_s"]]
    block_size, swap, prices = experiments.values()
    assert block_size["common"]["allocator.block_size"] == sizes
    assert block_size["common"]["workload.duration_s"] == published()["fig18b"]["duration_s"]
    for point in block_size["points"]:
        name, _, flat = point["panel"].partition("_")
        assert point["workload"] == name
        assert point["workload.request_rate"] == published()["fig18b"]["panels"][name]["request_rate"]
        assert point.get("runner.kernel_factor", True) == (not flat)
    for name in ("request_rate", "duration_s"):
        assert swap["common"][f"workload.{name}"] == published()["fig19b"][name]
    for points in published()["fig19b"]["latency_s"].values():
        assert swap["common"]["allocator.block_size"] == [size for size, _ in points]
    assert {(point["panel"], point["scheduler.restore"]) for point in swap["points"]} == {
        (kind, kind) for kind in published()["fig19b"]["latency_s"]
    }
    assert prices["common"]["allocator.block_size"] == sizes
    assert prices["common"]["workload.lengths.prompt_len"] == published()["fig19a"]["prompt_len"]


def test_segments_of_a_bar_fill_the_pool() -> None:
    for system, shares in published()["fig2"]["pct"].items():
        if system != "vllm":
            assert math.isclose(sum(shares.values()), 100.0, abs_tol=0.11)
    vllm = published()["fig2"]["pct"]["vllm"]
    assert vllm["allocated"] - vllm["token_states"] == pytest.approx(vllm["unfilled"], abs=0.05)


def test_published_slots_are_the_printed_ones_of_the_models() -> None:
    for model, memory in published()["table1"]["models"].items():
        blocks = yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text())["published_blocks"]
        assert 16 * blocks[memory["hardware"]] == pytest.approx(memory["num_slots"], abs=50)
