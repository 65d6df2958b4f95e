"""What repeats add to figures of rates: intervals, bands where a system is stable, shades where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pandas as pd
import pytest
from matplotlib.collections import PolyCollection

from kvbench.figures import fig_throughput, rates, replications
from kvbench.figures.rates import Reading
from kvbench.paper.claims import Verdict, stated
from kvbench.results import Results
from kvbench.statistics import intervals_by, paired_ratio, t_interval
from tests.synthetic_results import Row, throughput_rows, write_results

Value = TypeVar("Value")

FACTORS = (1.0, 0.8, 1.3, 1.1)
"""Of latencies, for each repeat: common to all systems."""


def repeated_rows(letters: str = "a", unstable_from: float = 0.3) -> list[Row]:
    """Panels as published, then on slower and faster traces; a queue grows where latency is above a bound."""
    rows = []
    for row in throughput_rows():
        for repeat, factor in enumerate(FACTORS):
            if row["panel"] in letters:
                latency = factor * row["normalized_latency_mean_s"]
                grows = row["normalized_latency_mean_s"] > unstable_from
                rows.append(
                    row
                    | {
                        "repeat": repeat,
                        "seed": repeat,
                        "normalized_latency_mean_s": latency,
                        "steady_normalized_latency_mean_s": latency,
                        "stable": not grows,
                        "growth_score": 4.0 if grows else 0.1,
                    }
                )
    return rows


def panel(results: Results) -> rates.PanelRates:
    return rates.panels(results)["a"]


def known(value: Value | None) -> Value:
    assert value is not None
    return value


def test_rates_are_read_from_every_repeat(tmp_path: Path) -> None:
    results = write_results(tmp_path, repeated_rows())
    found = panel(results)
    alone = []
    for repeat in range(len(FACTORS)):
        rows = [row for row in repeated_rows() if row["repeat"] == repeat]
        alone.append(panel(write_results(tmp_path / f"{repeat}", [row | {"repeat": 0} for row in rows])))
    ours, others = ([known(known(each.rate(name)).value) for each in alone] for name in ("vllm", "orca_oracle"))
    assert found.rate("vllm") == pytest.approx((t_interval(ours).low, t_interval(ours).high, t_interval(ours).value))
    ratio = paired_ratio(ours, others)
    assert found.gain("orca_oracle") == pytest.approx((ratio.low, ratio.high, ratio.value))
    assert found.curves == alone[0].curves  # the first repeat's
    table = known(fig_throughput.table(results))
    assert f"{found.rate('vllm')}" in table
    assert f"{found.gain('orca_oracle')}" in table
    assert "stable up to" in table


def test_bootstrap_intervals_reach_curves_rates_gains_tables_and_claims(tmp_path: Path) -> None:
    rows = [row | {"repeat": 4 * more + row["repeat"]} for row in repeated_rows() for more in range(3)]
    results = write_results(tmp_path, rows)

    def shown() -> tuple[Reading, Reading, object, str, list[float | None]]:
        found = panel(results)
        claims = [row.ci_low for row in fig_throughput.claims(results)]
        table = known(fig_throughput.table(results))
        return known(found.rate("vllm")), known(found.gain("orca_oracle")), found.bands, table, claims

    students = shown()
    with intervals_by("bootstrap"):
        resampled = shown()
    assert all(one != other for one, other in zip(students, resampled, strict=True))
    assert [each.value for each in students[:2]] == [each.value for each in resampled[:2]]
    assert "95 % bootstrap intervals over repeats" in resampled[3]


def test_claims_have_intervals_and_the_replay_is_judged_alone(tmp_path: Path) -> None:
    rows = fig_throughput.claims(write_results(tmp_path, repeated_rows()))
    rate = next(row for row in rows if row.claim == "vLLM: rate at 0.5 s/token" and row.figure == "Fig. 12(a)")
    assert known(rate.ci_low) < known(rate.measured) < known(rate.ci_high)
    assert rate.verdict is Verdict.REPRODUCED
    distance = next(row for row in rows if row.claim == "vLLM: rms of ln(measured / published)")
    assert distance.measured == pytest.approx(0, abs=0.06)
    assert distance.verdict is Verdict.REPRODUCED


def test_what_several_panels_decide_has_an_interval_too(tmp_path: Path) -> None:
    found = rates.panels(write_results(tmp_path, repeated_rows("ad")))
    statement = stated("gain_with_length")
    claim = rates.over_panels(
        found, statement, "ad", ("orca_oracle",), lambda gains: gains["a", "orca_oracle"] / gains["d", "orca_oracle"]
    )
    ratios = [
        known(found["a"].gains("orca_oracle")[repeat].value) / known(found["d"].gains("orca_oracle")[repeat].value)
        for repeat in range(len(FACTORS))
    ]
    expected = t_interval(ratios)
    assert (claim.measured, claim.ci_low, claim.ci_high) == pytest.approx((expected.value, expected.low, expected.high))


def test_a_repeat_without_crossing_leaves_bounds(tmp_path: Path) -> None:
    rows = [
        row for row in repeated_rows() if row["repeat"] != 2 or row["system"] != "vllm" or row["request_rate"] < 1.9
    ]
    found = panel(write_results(tmp_path, rows))
    reading = known(found.rate("vllm"))
    assert reading.value is None
    assert reading.high == float("inf")
    claims = fig_throughput.claims(found.results)
    rate = next(row for row in claims if row.claim == "vLLM: rate at 0.5 s/token" and row.figure == "Fig. 12(a)")
    assert rate.verdict is Verdict.UNDECIDED
    assert "vLLM > 1.8" in rate.note


def test_bands_end_where_the_queue_grows(tmp_path: Path) -> None:
    results = write_results(tmp_path, repeated_rows())
    found = panel(results)
    rate, low, high = found.bands["vllm"][0]
    expected = t_interval([0.0375 * factor for factor in FACTORS])
    assert rate == 1
    assert (high - low) / (high + low) == pytest.approx((expected.high - expected.low) / (2 * expected.value), rel=1e-6)
    assert found.unstable["vllm"] == pytest.approx((1.95, 2))
    assert max(rate for rate, _, _ in found.bands["vllm"]) == 1.9
    figure = fig_throughput.draw(results)["fig_throughput"]
    assert len(figure.findobj(PolyCollection)) == len(found.bands) == 5
    assert len(figure.axes[0].patches) == len(found.unstable) == 5
    one = write_results(tmp_path / "one", [row for row in repeated_rows() if row["repeat"] == 0])
    figure = fig_throughput.draw(one)["fig_throughput"]
    assert not figure.findobj(PolyCollection)
    assert not figure.axes[0].patches


def test_a_point_is_judged_by_its_repeats_together() -> None:
    def stable(scores: list[float], verdicts: list[bool | None]) -> bool:
        return replications.is_stable(pd.DataFrame({"repeat": range(4), "growth_score": scores, "stable": verdicts}))

    assert stable([0.1, -0.2, 1.8, 0.0], [True, True, False, True])
    assert not stable([1.0, 1.2, 0.9, 1.1], [True] * 4)  # no single run would be flagged
    assert not stable([0.0, 0.1, 0.0, 0.2], [False, False, False, True])
    assert not stable([float("nan")] * 4, [None] * 4)


def test_ratios_pair_what_both_have() -> None:
    first = pd.DataFrame({"repeat": [0, 1, 2], "x": [2.0, 4.0, 8.0]})
    second = pd.DataFrame({"repeat": [2, 1, 3], "x": [4.0, 2.0, 1.0]})
    assert known(replications.ratio(first, second, "x")).value == pytest.approx(2.0)
    assert replications.ratio(first, second[second["repeat"] == 3], "x") is None
    assert known(replications.interval(first, "x")).num == 3


def test_a_table_has_means_where_they_exist_and_paired_ratios() -> None:
    rows = [
        {
            "system": system,
            "request_rate": rate,
            "repeat": repeat,
            "x": scale * (1 + repeat / 10) * rate,
            "stable": rate < 3,
        }
        | {"growth_score": 0.1 if rate < 3 else 5.0, "num_censored": 2, "num_rejected": 0}
        for system, scale in (("vllm", 1.0), ("orca_max", 2.0))
        for rate in (1.0, 2.0, 3.0)
        for repeat in range(3)
    ]
    table = replications.table(pd.DataFrame(rows), ["system", "request_rate"], {"x": "latency s"})
    lines = table.splitlines()
    assert "latency over vllm's" in lines[0]
    assert str(t_interval([1.0, 1.1, 1.2])) in lines[1]
    assert "2 [2, 2]" in lines[4]
    assert all("yes" in line for line in (*lines[1:3], *lines[4:6]))
    assert all(" no " in line and "[" not in line for line in (lines[3], lines[6]))
