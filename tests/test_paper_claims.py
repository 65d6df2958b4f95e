"""Verdicts."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from importlib.resources import files

import pytest
import yaml

from kvbench.paper.claims import Claim, Statement, Verdict, stated


def statement(low: float | None, high: float | None, tolerance: str) -> Statement:
    return Statement("claim", "Fig. 0", low, high, "x", tolerance, "a note")


@pytest.mark.parametrize(
    ("low", "high", "tolerance", "measured", "met"),
    [
        (1.7, 2.7, "10 %", 1.53, True),  # 1.7 - 10 % of 1.7
        (1.7, 2.7, "10 %", 1.52, False),
        (1.7, 2.7, "10 %", 2.97, True),
        (1.7, 2.7, "10 %", 2.98, False),
        (20.4, 20.4, "1.0", 21.4, True),
        (20.4, 20.4, "1.0", 21.5, False),
        (20.4, 20.4, "1.0", 19.3, False),
        (0.0, 0.0, "0.08", 0.08, True),
        (0.0, 0.0, "0.08", 0.081, False),
        (1.0, None, "0", 1e9, True),  # a lower bound alone
        (1.0, None, "0", 0.99, False),
        (None, 1.0, "0", -5.0, True),  # an upper bound alone
        (None, 1.0, "0", 1.01, False),
    ],
)
def test_a_value_is_held_against_the_widened_range(
    low: float | None, high: float | None, tolerance: str, measured: float, met: bool
) -> None:
    claim = statement(low, high, tolerance).judge(measured)
    assert claim.verdict is (Verdict.REPRODUCED if met else Verdict.NOT_REPRODUCED)
    assert claim.note == "a note"
    assert (claim.measured, claim.ci_low, claim.ci_high) == (measured, None, None)


def test_an_interval_needs_to_meet_the_range_only() -> None:
    assert statement(1.0, 2.0, "0").judge(2.5, interval=(1.9, 3.1)).verdict is Verdict.REPRODUCED
    assert statement(1.0, 2.0, "0").judge(2.5, interval=(2.1, 2.9)).verdict is Verdict.NOT_REPRODUCED


def test_an_interval_alone_refutes_but_does_not_confirm() -> None:
    refuted = statement(1.0, 2.0, "0").judge(None, interval=(3.0, math.inf), missing="no crossing")
    assert refuted.verdict is Verdict.NOT_REPRODUCED
    assert refuted.note == "no crossing; a note"
    assert (refuted.measured, refuted.ci_low, refuted.ci_high) == (None, 3.0, math.inf)
    assert statement(1.0, 2.0, "0").judge(None, interval=(1.5, math.inf)).verdict is Verdict.UNDECIDED


def test_what_was_run_and_decides_nothing_is_undecided_with_the_reason() -> None:
    claim = statement(1.0, 2.0, "0").judge(None, missing="no repeat in common", ran=True, obstacle="seed is 1")
    assert (f"{claim.verdict}", claim.note) == ("undecided", "no repeat in common; a note")
    assert Verdict("undecided") is Verdict.UNDECIDED


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_nothing_measured_is_not_run(nothing: float | None) -> None:
    claim = statement(1.0, 2.0, "0").judge(nothing, missing="panel b was not run", obstacle="duration_s is 60")
    assert claim.verdict is Verdict.NOT_RUN
    assert claim.note == "panel b was not run; a note"
    assert claim.measured is None


def test_other_conditions_are_not_comparable_and_say_why() -> None:
    claim = statement(1.0, 2.0, "0").judge(1.5, obstacle="duration_s is 60, the paper's is 3600")
    assert claim.verdict is Verdict.NOT_COMPARABLE
    assert claim.note == "duration_s is 60, the paper's is 3600; a note"
    assert claim.measured == 1.5


def test_columns_are_those_of_claims_csv() -> None:
    columns = "claim figure paper_low paper_high measured ci_low ci_high unit tolerance verdict note"
    assert [field.name for field in fields(Claim)] == columns.split()
    assert f"{Verdict.NOT_RUN}" == "not run"


def test_a_statement_takes_its_panel_s_fields_its_number_and_its_words() -> None:
    found = stated("curve_rms", "b", panel="b", system="vLLM")
    assert (found.figure, found.tolerance, found.low, found.high) == ("Fig. 12(b)", "0.2", 0, 0)
    assert found.claim.startswith("vLLM: ")
    assert stated("rate_at_threshold", value=0.123456789, panel="a", system="vLLM").high == 0.12346


def test_every_entry_is_complete_and_its_tolerance_readable() -> None:
    text = files("kvbench.paper").joinpath("claims.yaml").read_text(encoding="utf-8")
    for name, entry in yaml.safe_load(text).items():
        needed = {"figure", "claim", "unit", "tolerance"}
        assert needed <= set(entry) <= needed | {"low", "high", "note"}, name
        words = dict.fromkeys(re.findall(r"{(\w+)}", entry["claim"] + entry["figure"]), "?")
        tolerance = entry["tolerance"]
        for variant in tolerance if isinstance(tolerance, dict) else ("a",):
            assert stated(name, variant, value=1.0, **words).meets(1.0, 1.0), name
