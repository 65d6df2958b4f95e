"""Real savings beside simulated ones: the experiment's points, and the figure of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.composition import composer, parse
from kvbench.figures import fig_sharing_measured as figure
from kvbench.figures.savings import COLUMNS
from kvbench.paper.claims import Verdict
from kvbench.plan import plan
from kvbench.results import Results
from tests.drawn import assert_nothing_is_cut, texts
from tests.extras import NEEDS_MODELS
from tests.synthetic_results import Row, write_results

LENGTHS = "Alpaca, a sample of its pairs"


def results(folder: Path, real: float = 0.0, **values: Any) -> Results:
    """Ten percent for every sample or beam; where it was measured ``real`` points more, and these values."""
    rows: list[Row] = []
    for panel, bars in figure.BARS.items():
        is_real = not panel.startswith("simulated")
        way = {"runner": "cpu", "device": "cpu, 2 threads", "costs": None} if is_real else {"costs": "constant"}
        for width in figure.WIDTHS:
            found = {"panel": panel, COLUMNS[bars.decoding]: width, "sharing_saved_pct": 10.0 * width + real * is_real}
            same = {"model": figure.MODEL, "workload_source": LENGTHS, "num_requests": 16}
            rows.append({**same, **found, **way, **(values if is_real else {})})
    return write_results(folder, rows)


def test_real_and_simulated_points_differ_in_the_runner_alone() -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    with composer() as compose:
        rows = plan(compose, parse(["+experiment=fig_sharing_measured"], sweep=False)).rows
    counts = {"samples": 3, "beams": 3, "simulated_samples": 3, "simulated_beams": 3 * 8}
    assert [row.panel for row in rows] == [panel for panel, count in counts.items() for _ in range(count)]
    for real, simulated in zip(rows[:6], rows[6:9] + rows[9::8], strict=True):
        assert (real.point.config["choices"]["runner"], simulated.point.config["choices"]["runner"]) == (
            "cpu", "simulated",
        )  # fmt: skip
        for part in ("workload", "allocator", "reservation", "scheduler", "kv_cache_seqs", "seed"):
            assert real.point.config[part] == simulated.point.config[part]
    assert {row.point.config["runner"]["beams"]["model"] for row in rows[9:]} == {figure.MODEL}


def test_measured_savings_are_held_against_simulated_ones(tmp_path: Path) -> None:
    claims = figure.claims(results(tmp_path / "near", 4.0))
    assert [claim.measured for claim in claims] == pytest.approx([4.0] * 6)
    assert [claim.verdict for claim in claims] == [Verdict.NOT_REPRODUCED] * 3 + [Verdict.REPRODUCED] * 3
    assert {claim.verdict for claim in figure.claims(results(tmp_path / "same"))} == {Verdict.REPRODUCED}
    others: list[Row] = [{"model": "tiny_llama"}, {"workload_source": "drawn"}, {"num_requests": 8}]
    for i, other in enumerate(others):
        found = figure.claims(results(tmp_path / str(i), **other))
        assert {claim.verdict for claim in found} == {Verdict.NOT_COMPARABLE}
    alone = figure.claims(write_results(tmp_path / "none", []))
    assert {claim.verdict for claim in alone} == {Verdict.NOT_RUN}


def test_the_figure_tells_real_from_simulated(tmp_path: Path) -> None:
    found = results(tmp_path, 1.0)
    drawn = figure.draw(found)["fig_sharing_measured"]
    assert_nothing_is_cut(drawn)
    said = " ".join(text.get_text() for text in texts(drawn)).replace("\n", " ")
    assert "smollm2_135m, measured on cpu, 2 threads" in said
    assert "Simulated: the same requests" in said
    assert LENGTHS in said
    assert "paper" not in said
    table = (figure.table(found) or "").splitlines()
    assert table[1].split()[:4] == ["measured", "2", "samples", "21.00"]
    assert figure.draw(write_results(tmp_path / "none", [])) == {}
