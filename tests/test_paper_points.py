"""The paper's plotted points: complete, of the right kind, and with the rates that a second reading of them gave."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

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


@pytest.mark.parametrize("letter", RATES)
def test_a_panel_has_five_curves_with_known_crossings(letter: str) -> None:
    curves = latency_panels()[letter].curves
    assert tuple(curves) == SYSTEMS
    for system, rate in zip(SYSTEMS, RATES[letter], strict=True):
        found = crossing((point.x, point.y) for point in curves[system].points).rate
        assert found == pytest.approx(rate, abs=6e-5), system


@pytest.mark.parametrize("letter", NUM_MEASUREMENTS)
def test_every_measurement_is_there_and_of_its_kind(letter: str) -> None:
    points = [point for curve in latency_panels()[letter].curves.values() for point in curve.points]
    measurements = [point for point in points if point.kind is not Kind.LEAVES_PLOT]
    assert len(measurements) == NUM_MEASUREMENTS[letter]
    for point in points:
        assert (point.y > 1.0) == (point.kind is not Kind.PLOTTED)


def test_the_second_vllm_point_at_a_rate_is_kept() -> None:
    points = latency_panels()["a"].curves["vllm"].measurements
    assert [point.y for point in points if point.x == 1.5] == [0.0424, 0.0487]


def test_a_next_rate_continues_a_curve_that_leaves_the_plot_in_the_axes() -> None:
    for panel in latency_panels().values():
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
