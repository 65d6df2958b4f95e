"""Figs. 16 and 17: what their claims take for comparable, and what they make of seeds and of missing curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.figures import fig_chatbot, fig_shared_prefix
from kvbench.paper.claims import Claim, Verdict
from kvbench.paper.curves import crossing
from kvbench.paper.points import Kind, latency_panels, published
from tests.synthetic_results import Row, prefix_rows, throughput_rows, write_results

CONF = Path(__file__).parents[1] / "conf"
VLLM = "vllm[system.max_num_seqs=256]"

# Rates at 0.5 s/token, computed independently from the vector paths, and how many measurements a curve has.
RATES = {
    ("fig16", "a", "orca_oracle"): (30.1185, 7),
    ("fig16", "a", "vllm"): (50.9006, 9),
    ("fig16", "b", "orca_oracle"): (12.0519, 7),
    ("fig16", "b", "vllm"): (42.6707, 9),
    ("fig17", "a", "orca_max"): (0.5524, 7),
    ("fig17", "a", "orca_pow2"): (0.5664, 8),
    ("fig17", "a", "orca_oracle"): (0.5717, 9),
    ("fig17", "a", "vllm"): (0.8529, 9),
}


@pytest.mark.parametrize(("figure", "letter", "system"), RATES)
def test_curves_cross_where_a_second_reading_of_them_does(figure: str, letter: str, system: str) -> None:
    curve = latency_panels(figure)[letter].curves[system]
    rate, num_measurements = RATES[figure, letter, system]
    assert crossing((point.x, point.y) for point in curve.points).rate == pytest.approx(rate, abs=6e-5)
    assert len(curve.measurements) == num_measurements
    for point in curve.points:
        assert (point.y > 1.0) == (point.kind is not Kind.PLOTTED)


def test_the_chatbot_s_panels_are_one_panel_under_three_settings() -> None:
    panels = latency_panels("fig17")
    assert panels["a"].curves == panels["b"].curves == panels["c"].curves


@pytest.mark.parametrize(("figure", "experiment"), [("fig16", "fig_shared_prefix"), ("fig17", "fig_chatbot")])
def test_the_experiment_runs_the_paper_s_rates_and_more(figure: str, experiment: str) -> None:
    content = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text())
    common, points = content["common"], content["points"]
    listed: dict[tuple[str, str], dict[str, Any]] = {}
    for point in points:
        systems = [point["system"]] if isinstance(point["system"], str) else point["system"]
        listed |= {(point["panel"], system): point for system in systems}
    for letter, panel in latency_panels(figure).items():
        assert (common["model"], common["workload"]) == (panel.model, panel.workload)
        assert common["workload.duration_s"] == panel.duration_s
        for system, curve in panel.curves.items():
            point = listed.pop((letter, system))
            rates = point["workload.request_rate"]
            assert set(curve.rates) <= set(rates)
            crosses_at = crossing((each.x, each.y) for each in curve.points).rate
            assert crosses_at is not None
            assert max(rates) >= 1.1 * crosses_at
            assert rates == sorted(set(rates))
            for option, value in panel.options.items():
                assert point[f"workload.{option}"] == (value[system] if isinstance(value, dict) else value)
    assert not listed


def test_both_systems_run_with_the_sequence_limit_of_the_authors_branch() -> None:
    content = yaml.safe_load((CONF / "experiment" / "fig_shared_prefix.yaml").read_text())
    assert content["common"]["system.max_num_seqs"] == 256


def test_vllm_is_called_so_under_that_limit_only(tmp_path: Path) -> None:
    results = write_results(tmp_path, prefix_rows())
    (legend,) = fig_shared_prefix.draw(results)["fig_shared_prefix"].legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["Orca (Oracle)", "vLLM"]
    unlimited = write_results(tmp_path / "unlimited", throughput_rows(figure="fig16"))
    assert "vLLM [system.max_num_seqs=2048]" in str(fig_shared_prefix.table(unlimited))
    claim = find(fig_shared_prefix.claims(unlimited), "vLLM: rate", figure="Fig. 16(a)")
    assert claim.verdict is Verdict.NOT_RUN


def test_the_options_stand_beside_the_published_pool() -> None:
    assert published()["table1"]["models"]["opt_13b"]["num_slots"] == 15700  # LLaMA-13B's too


def find(claims: list[Claim], start: str, end: str = "", figure: str = "Fig. 17") -> Claim:
    (claim,) = (
        claim
        for claim in claims
        if claim.figure == figure and claim.claim.startswith(start) and claim.claim.endswith(end)
    )
    return claim


def changed(rows: list[Row], *systems: str, **values: object) -> list[Row]:
    return [row | values if row["system"] in systems else row for row in rows]


def test_another_prefix_is_not_comparable(tmp_path: Path) -> None:
    rows = changed(prefix_rows(), VLLM, options={"prefix_len": 160})
    claims = fig_shared_prefix.claims(write_results(tmp_path, rows))
    for claim in claims:
        if claim.claim.startswith("Orca"):
            assert claim.verdict is Verdict.REPRODUCED
        else:
            assert claim.verdict is Verdict.NOT_COMPARABLE
            assert claim.note.startswith("prefix_len is 160, the paper's is ")


def test_a_prefix_in_another_pool_is_not_comparable(tmp_path: Path) -> None:
    rows = changed(prefix_rows(), VLLM, num_slots=8000)
    claim = find(fig_shared_prefix.claims(write_results(tmp_path, rows)), "vLLM: rate", figure="Fig. 16(a)")
    assert claim.verdict is Verdict.NOT_COMPARABLE
    assert claim.note.startswith("the pool has 8000 slots, the paper's about 15700")


def test_sentences_that_a_fit_stands_in_for_are_noted(tmp_path: Path) -> None:
    rows = changed(prefix_rows(), VLLM, "orca_oracle", workload_source="drawn")
    claim = find(fig_shared_prefix.claims(write_results(tmp_path, rows)), "vLLM: rate", figure="Fig. 16(a)")
    assert claim.verdict is Verdict.REPRODUCED
    assert claim.note.endswith("lengths: drawn")


def test_the_gain_over_both_prefixes(tmp_path: Path) -> None:
    claims = fig_shared_prefix.claims(write_results(tmp_path, prefix_rows()))
    claim = find(claims, "the gain over Orca (Oracle) is larger", figure="Fig. 16(a, b)")
    assert claim.measured == pytest.approx(3.541 / 1.69, abs=0.01)


def test_another_order_of_the_rounds_is_not_comparable(tmp_path: Path) -> None:
    rows = changed(throughput_rows(figure="fig17"), "vllm", options={"new_conversation_prob": 0.5})
    claims = fig_chatbot.claims(write_results(tmp_path, rows))
    ratios = {
        title: find(claims, "vLLM over Orca (Max)", f"({title})")
        for title in ("new conversations 0.5", "new conversations 0.1", "vLLM 0.5, Orca 0.1")
    }
    assert [claim.verdict for claim in ratios.values()] == [
        Verdict.REPRODUCED,
        Verdict.NOT_COMPARABLE,
        Verdict.REPRODUCED,
    ]
    assert ratios["new conversations 0.1"].note.startswith("new_conversation_prob is 0.5, the paper's is 0.1")


def test_a_gain_is_the_mean_over_repeats_with_an_interval(tmp_path: Path) -> None:
    one = throughput_rows(figure="fig17")
    slower = [row | {"seed": 1, "repeat": 1} for row in one]
    for row in slower:
        row["normalized_latency_mean_s"] *= 2 if row["system"] == "vllm" else 1
    claims = fig_chatbot.claims(write_results(tmp_path, [*one, *slower]))
    claim = find(claims, "vLLM over Orca (Max)", "(new conversations 0.5)")
    assert claim.measured == pytest.approx((1.47 * 1.54) ** 0.5, abs=0.01)
    assert claim.ci_low is not None
    assert claim.ci_high is not None
    assert claim.ci_low < 1.47
    assert claim.ci_high > 1.54
    alone = find(fig_chatbot.claims(write_results(tmp_path / "one", one)), claim.claim)
    assert alone.ci_low is None


def test_how_alike_the_orca_systems_are(tmp_path: Path) -> None:
    rows = throughput_rows(figure="fig17")
    alike = find(fig_chatbot.claims(write_results(tmp_path, rows)), "the three Orca systems behave alike")
    assert alike.measured == pytest.approx(0.5717 / 0.5524, abs=1e-3)
    assert alike.verdict is Verdict.REPRODUCED
    for factor, low in ((10, 1.425), (20, 5.717)):  # at 20 times its latency it is beyond the threshold at every rate
        worse = [row.copy() for row in rows]
        for row in worse:
            row["normalized_latency_mean_s"] *= factor if row["system"] == "orca_max" else 1
        results = write_results(tmp_path / f"{factor}", worse)
        alike = find(fig_chatbot.claims(results), "the three Orca systems behave alike")
        assert alike.verdict is Verdict.NOT_REPRODUCED
        assert (alike.measured or alike.ci_low) == pytest.approx(low, abs=2e-3)


def test_without_a_system_the_claims_on_all_are_open(tmp_path: Path) -> None:
    rows = [row for row in throughput_rows(figure="fig17") if row["system"] != "orca_pow2"]
    claims = fig_chatbot.claims(write_results(tmp_path, rows))
    for start in ("the three Orca systems behave alike", "vLLM sustains 2x"):
        claim = find(claims, start, "(new conversations 0.5)")
        assert claim.verdict is Verdict.NOT_RUN
        assert claim.note.startswith("no result of Orca (Pow2) in panel a")
    assert find(claims, "vLLM over Orca (Max)", "(new conversations 0.5)").verdict is Verdict.REPRODUCED


def test_a_curve_that_never_crosses_is_known_by_its_side(tmp_path: Path) -> None:
    rows = [row for row in throughput_rows(figure="fig17") if row["system"] != "vllm" or row["request_rate"] < 0.75]
    claims = fig_chatbot.claims(write_results(tmp_path, rows))
    claim = find(claims, "vLLM over Orca (Max)", "(new conversations 0.5)")
    assert claim.measured is None
    assert claim.ci_low == pytest.approx(0.7 / 0.5524, abs=1e-3)
