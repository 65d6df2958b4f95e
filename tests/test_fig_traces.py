"""The figure of recorded and bursty arrivals, on a few rows made by hand."""

from __future__ import annotations

from pathlib import Path

from matplotlib.text import Text

from kvbench.figures import fig_traces
from kvbench.results import COLUMNS, Results, write_csv
from tests.drawn import assert_nothing_is_cut


def results(folder: Path, letters: str = "abcdef") -> Results:
    """Two systems, two rates, in some panels: vLLM crosses 0.5 s/token half way, Orca (Max) rejects everything."""
    shared = {
        "costs": "paper_engine", "runner": "simulated", "workload_source": "a trace, time scaled", "num_requests": 3000,
        "num_dropped": 12, "model": "opt_13b", "device": "simulated",
    }  # fmt: skip
    rows = [
        shared
        | {"panel": letter, "system": system, "request_rate": rate, "normalized_latency_mean_s": latency}
        | {"num_clipped": 7 * rate, "num_rejected": rejected, "point": f"{system}-{rate}-{letter}"}
        for letter in letters
        for system, rejected in (("vllm", 0), ("orca_max", 3000))
        for rate, latency in ((1, 0.25 if system == "vllm" else None), (2, 0.75 if system == "vllm" else None))
    ]
    write_csv(folder / "summary.csv", COLUMNS, rows)
    return Results(folder)


def test_every_panel_is_drawn(tmp_path: Path) -> None:
    (figure,) = fig_traces.draw(results(tmp_path)).values()
    assert_nothing_is_cut(figure)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [f"({letter}) {title}" for letter, title in fig_traces.TITLES.items()]
    assert any("imulated" in text.get_text() for text in figure.findobj(Text))


def test_part_of_it_is_drawn_alone(tmp_path: Path) -> None:
    (figure,) = fig_traces.draw(results(tmp_path, "c")).values()
    assert_nothing_is_cut(figure)
    assert len(figure.axes) == 1
    assert fig_traces.draw(results(tmp_path, "")) == {}
    assert fig_traces.table(results(tmp_path, "")) is None


def test_what_was_not_served_is_counted(tmp_path: Path) -> None:
    found = results(tmp_path, "b")
    text = fig_traces.table(found)
    assert text is not None
    orca, vllm = text.splitlines()[1:3]
    assert orca.split()[-6:] == ["(Max)", "-", "3,000", "12", "7-14", "3,000"]
    assert vllm.split()[-6:] == ["vLLM", "1.5", "3,000", "12", "7-14", "0"]
    assert fig_traces.claims(found) == []
