"""Figures and claims of results whose numbers are known: the paper's own."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from matplotlib.path import Path as MarkerPath

from kvbench.figures import capacity, fig_throughput, frames, latency, style
from kvbench.figures.experiment import draw
from kvbench.paper.claims import Claim, Verdict
from kvbench.results import Results
from tests.drawn import assert_nothing_is_cut, texts
from tests.synthetic_results import (
    Row,
    batch_rows,
    block_size_rows,
    growth_rows,
    layout_results,
    lengths_results,
    prefix_rows,
    price_rows,
    sharing_rows,
    swap_rows,
    throughput_rows,
    waste_rows,
    write_results,
)


def beam_rows() -> list[Row]:
    """Fig. 14 (d-f), and of (a-c) what the claims need."""
    samples = [row for row in throughput_rows(figure="fig14_parallel") if row["system"] in ("orca_oracle", "vllm")]
    return throughput_rows(figure="fig14_beams") + samples


PUBLISHED: dict[str, Callable[[Path], Results]] = {
    "fig_throughput": lambda folder: write_results(folder, throughput_rows()),
    "fig_parallel_sampling": lambda folder: write_results(folder, throughput_rows(figure="fig14_parallel")),
    "fig_beam_search": lambda folder: write_results(folder, beam_rows()),
    "fig_sharing": lambda folder: write_results(folder, sharing_rows()),
    "fig_block_size": lambda folder: write_results(folder, block_size_rows()),
    "fig_swap_microbenchmark": lambda folder: write_results(folder, price_rows()),
    "fig_swap_vs_recompute": lambda folder: write_results(folder, swap_rows()),
    "fig_shared_prefix": lambda folder: write_results(folder, prefix_rows()),
    "fig_chatbot": lambda folder: write_results(folder, throughput_rows(figure="fig17")),
    "fig_memory_waste": lambda folder: write_results(folder, waste_rows()),
    "fig_batched_requests": lambda folder: write_results(folder, batch_rows()),
    "fig_memory_growth": lambda folder: write_results(folder, growth_rows()),
    "fig_memory_layout": layout_results,
    "fig_lengths": lengths_results,
}
EXPERIMENTS = sorted(PUBLISHED)
NOT_SERVED = {"fig_memory_layout", "fig_swap_microbenchmark"}
"""Figures that show no requests: capacities, prices."""
MEASURED = {
    "fig_fidelity",
    "fig_noise",
    "fig_waterfall",
    "fig_kernel_instructions",
    "fig_kernel_overhead",
    "fig_offline_throughput",
    "fig_online_latency",
    "fig_sharing_measured",
    "fig_traces",
}
"""Figures of kvbench's own experiments, which no paper has numbers for; each has a test file of its own."""


def module(experiment: str) -> ModuleType:
    return importlib.import_module(f"kvbench.figures.{experiment}")


def claims(experiment: str, results: Results) -> list[Claim]:
    found: list[Claim] = module(experiment).claims(results)
    return found


def find(rows: list[Claim], figure: str, start: str) -> Claim:
    (claim,) = (row for row in rows if row.figure == figure and row.claim.startswith(start))
    return claim


def test_there_is_a_figure_for_every_experiment_and_back() -> None:
    root = Path(__file__).parents[1]
    stems = {path.stem for path in (root / "conf" / "experiment").glob("fig_*.yaml")}
    assert stems == {path.stem for path in (root / "kvbench" / "figures").glob("fig_*.py")}
    assert stems == MEASURED.union(EXPERIMENTS)


def test_an_experiment_leaves_its_figures_claims_and_tables(tmp_path: Path) -> None:
    results = write_results(tmp_path, waste_rows())
    before = set(tmp_path.iterdir())
    assert draw(results, "smoke") is None
    assert set(tmp_path.iterdir()) == before
    shown = draw(results, "fig_memory_waste")
    assert shown == module("fig_memory_waste").table(results)
    names = {path.name for path in set(tmp_path.iterdir()) - before}
    assert names == {
        *(f"fig_memory_waste.{each}" for each in ("pdf", "svg", "png")),
        "claims.csv",
        "table.md",
        "table.tex",
    }
    with (tmp_path / "claims.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    claims = module("fig_memory_waste").claims(results)
    assert [row["verdict"] for row in rows] == [claim.verdict for claim in claims]
    assert [float(row["measured"]) for row in rows] == pytest.approx([claim.measured for claim in claims], rel=1e-5)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_published_numbers_reproduce_all_but_the_paper_s_contradictions(experiment: str, tmp_path: Path) -> None:
    rows = claims(experiment, PUBLISHED[experiment](tmp_path))
    failed = [(row.figure, row.claim) for row in rows if row.verdict is not Verdict.REPRODUCED]
    expected = {
        "fig_block_size": [("Fig. 18(b)", "Alpaca: latency with blocks of 8 over that with the best")],
        "fig_swap_microbenchmark": [
            ("Fig. 19(a)", "recompute is never more than 20 % slower than swapping out and in"),
        ],
        "fig_throughput": [
            ("Fig. 12(c)", "ShareGPT, OPT-175B: vLLM sustains 1.7-2.7x the rate of Orca (Oracle)"),
            ("Fig. 12(a-c)", "the gain over Orca (Oracle) is larger with larger models"),
        ],
        "fig_chatbot": [
            ("Fig. 17", f"vLLM sustains 2x the rate of the three Orca systems ({title})")
            for title in ("new conversations 0.5", "new conversations 0.1", "vLLM 0.5, Orca 0.1")
        ],
    }
    assert failed == expected.get(experiment, [])


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_figures_say_what_they_show_and_cut_nothing(experiment: str, tmp_path: Path) -> None:
    results = PUBLISHED[experiment](tmp_path)
    figures = module(experiment).draw(results)
    assert list(figures) == [experiment]
    figure = figures[experiment]
    said = " ".join(text.get_text() for text in texts(figure))
    assert "paper" in said
    if experiment in NOT_SERVED:
        assert "Computed" in said
    else:
        assert all(source in said.replace("\n", " ") for source in results.summary["workload_source"])
    if experiment not in NOT_SERVED | {"fig_lengths"}:
        assert "Simulated (costs: " in said
    assert figure.get_figwidth() in (style.COLUMN_IN, style.PAGE_IN)
    assert_nothing_is_cut(figure)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_tables_name_the_paper_s_numbers(experiment: str, tmp_path: Path) -> None:
    table = module(experiment).table(PUBLISHED[experiment](tmp_path))
    assert "paper" in table
    assert max(map(len, table.splitlines())) <= 100


def test_capacities_stand_beside_the_paper_s(tmp_path: Path) -> None:
    table = module("fig_throughput").table(PUBLISHED["fig_throughput"](tmp_path))
    (line,) = (line for line in table.splitlines() if line.startswith("(a)") and "vLLM" in line)
    assert line.split()[-3:] == ["1.93", "1.93", "1.00"]
    assert len(table.splitlines()) == 2 + 30


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    one_panel = [row for row in throughput_rows() if row["panel"] == "d"]
    for experiment, rows in (("fig_memory_waste", waste_rows()), ("fig_throughput", one_panel)):
        results = write_results(tmp_path / experiment, rows)
        written: list[list[bytes]] = []
        for run in ("first", "second"):
            folder = tmp_path / experiment / run
            folder.mkdir()
            paths = style.save(module(experiment).draw(results)[experiment], folder, experiment)
            assert [path.name for path in paths] == [f"{experiment}.{suffix}" for suffix in ("pdf", "svg", "png")]
            written.append([path.read_bytes() for path in paths])
        assert written[0] == written[1]
        pdf, svg, png = written[0]
        assert b"/FontFile2" in pdf  # TrueType, embedded
        assert b"/Type3" not in pdf
        assert b"CreationDate" not in pdf
        assert b"<dc:date>" not in svg
        assert b"kvbench" in png


@pytest.mark.parametrize("experiment", sorted({*EXPERIMENTS, *MEASURED, "capacity", "memory_map"}))
def test_without_any_row_nothing_was_run(experiment: str, tmp_path: Path) -> None:
    results = write_results(tmp_path, [])
    assert module(experiment).draw(results) == {}
    assert module(experiment).table(results) is None
    rows = claims(experiment, results)
    assert rows or experiment not in EXPERIMENTS
    assert {row.verdict for row in rows} <= {Verdict.NOT_RUN}
    assert all(row.note for row in rows)


def test_claims_are_the_same_rows_whatever_was_run(tmp_path: Path) -> None:
    for experiment in EXPERIMENTS:
        full = claims(experiment, PUBLISHED[experiment](tmp_path / experiment))
        none = claims(experiment, write_results(tmp_path / f"{experiment}-none", []))
        assert [(row.figure, row.claim) for row in full] == [(row.figure, row.claim) for row in none]
        assert len({(row.figure, row.claim) for row in full}) == len(full)


def test_one_panel_alone_is_drawn_and_judged(tmp_path: Path) -> None:
    results = write_results(tmp_path, [row for row in throughput_rows() if row["panel"] == "a"])
    figure = module("fig_throughput").draw(results)["fig_throughput"]
    assert len(figure.axes) == 1
    assert figure.get_figwidth() == style.COLUMN_IN
    assert_nothing_is_cut(figure)
    rows = claims("fig_throughput", results)
    assert all(row.verdict is Verdict.REPRODUCED for row in rows if row.figure == "Fig. 12(a)")
    assert all(row.verdict is Verdict.NOT_RUN for row in rows if row.figure != "Fig. 12(a)")
    assert find(rows, "Fig. 12(a-c)", "ShareGPT, vLLM").note.startswith(
        "needs the rates at the threshold of panel b, c"
    )


def test_one_system_alone_is_judged(tmp_path: Path) -> None:
    results = write_results(tmp_path, [row for row in throughput_rows() if row["system"] == "vllm"])
    rows = claims("fig_throughput", results)
    assert find(rows, "Fig. 12(b)", "vLLM: rate").verdict is Verdict.REPRODUCED
    ratio = find(rows, "Fig. 12(b)", "vLLM over Orca (Max)")
    assert (ratio.verdict, ratio.note) == (Verdict.NOT_RUN, "no result of Orca (Max) in panel b")


def changed(rows: list[Row], **values: object) -> list[Row]:
    return [row | values for row in rows]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"duration_s": 600}, "duration_s is 600, the paper's is 3600"),
        ({"hardware": "h100_80gb"}, "hardware is h100_80gb, the paper's is a100_40gb"),
        ({"block_size": 32}, "block_size is 32, the paper's is 16"),
        ({"num_slots": 8000}, "the pool has 8000 slots, the paper's about 15700"),
        ({"costs": "mine"}, "costs is mine, the paper's is paper_engine"),
    ],
)
def test_other_conditions_are_not_comparable(values: Row, reason: str, tmp_path: Path) -> None:
    mine = [row for row in throughput_rows() if row["panel"] == "a"]
    rows = claims("fig_throughput", write_results(tmp_path, changed(mine, **values)))
    for start in ("vLLM: rms", "vLLM: rate", "vLLM over Orca (Oracle)", "ShareGPT, OPT-13B: vLLM sustains 1.7"):
        claim = find(rows, "Fig. 12(a)", start)
        assert claim.verdict is Verdict.NOT_COMPARABLE
        assert claim.note.startswith(reason)
        assert claim.measured is not None


@pytest.mark.parametrize(
    ("values", "arrivals", "reason"),
    [
        ({"workload_source": "drawn"}, "Paper", "one trace against another: lengths: drawn"),
        ({"seed": 3}, "Paper", "one trace against another: seed is not 0"),
        ({}, "Poisson", "one trace against another: arrivals are kvbench.workloads.arrivals.Poisson"),
    ],
)
def test_another_trace_leaves_rates_comparable_but_not_distances(
    values: Row, arrivals: str, reason: str, tmp_path: Path
) -> None:
    mine = changed([row for row in throughput_rows() if row["panel"] == "a"], **values)
    rows = claims("fig_throughput", write_results(tmp_path, mine, f"kvbench.workloads.arrivals.{arrivals}"))
    distance = find(rows, "Fig. 12(a)", "Orca (Max, Pow2, Oracle) and vLLM together")
    assert distance.verdict is Verdict.NOT_COMPARABLE
    assert distance.note.startswith(reason)
    assert find(rows, "Fig. 12(a)", "vLLM: rate").verdict is Verdict.REPRODUCED


def test_a_failed_point_makes_its_curve_incomplete_only(tmp_path: Path) -> None:
    mine = [
        row
        | {
            "normalized_latency_mean_s": None
            if (row["system"], row["request_rate"]) == ("vllm", 1.9)
            else row["normalized_latency_mean_s"]
        }
        for row in throughput_rows()
        if row["panel"] == "a"
    ]
    results = write_results(tmp_path, mine)
    rows = claims("fig_throughput", results)
    assert find(rows, "Fig. 12(a)", "vLLM: rate").verdict is Verdict.NOT_COMPARABLE
    assert find(rows, "Fig. 12(a)", "vLLM: rate").note == "no result at 1.9 requests/s"
    assert find(rows, "Fig. 12(a)", "Orca (Max): rate").verdict is Verdict.REPRODUCED
    assert_nothing_is_cut(module("fig_throughput").draw(results)["fig_throughput"])


def test_a_curve_that_stays_below_the_threshold_refutes_or_leaves_open(tmp_path: Path) -> None:
    mine = [row for row in throughput_rows(scale=0.1) if row["panel"] == "c"]
    rows = claims("fig_throughput", write_results(tmp_path, mine))
    vllm = find(rows, "Fig. 12(c)", "vLLM: rate")  # beyond 2.6, and the paper's 2.38 is within 15 % of that
    assert vllm.verdict is Verdict.UNDECIDED
    assert vllm.note == "no crossing between the rates that were run: vLLM > 2.6 requests/s"
    assert (vllm.measured, vllm.ci_low) == (None, 2.6)
    baseline = find(rows, "Fig. 12(c)", "FasterTransformer: rate")  # beyond 0.3, the paper's is 0.115
    assert baseline.verdict is Verdict.NOT_REPRODUCED


def test_worse_numbers_are_not_reproduced(tmp_path: Path) -> None:
    rows = claims("fig_throughput", write_results(tmp_path, throughput_rows(scale=1.5)))
    assert find(rows, "Fig. 12(a)", "Orca (Max, Pow2, Oracle) and vLLM together").verdict is Verdict.NOT_REPRODUCED
    assert find(rows, "Fig. 12(a)", "Orca (Max, Pow2").measured == pytest.approx(0.405, abs=0.02)  # about ln 1.5


def test_repeats_are_averaged(tmp_path: Path) -> None:
    mine = [row for row in throughput_rows() if row["panel"] == "a"]
    doubled = [
        row | {"normalized_latency_mean_s": factor * row["normalized_latency_mean_s"]}
        for row in mine
        for factor in (0.5, 1.5)
    ]
    rows = claims("fig_throughput", write_results(tmp_path, doubled))
    assert find(rows, "Fig. 12(a)", "vLLM: rate").measured == pytest.approx(1.9294, abs=1e-3)


def test_systems_beyond_the_paper_are_drawn_and_listed(tmp_path: Path) -> None:
    mine = [row for row in throughput_rows() if row["panel"] in "ab"]
    mine += [row | {"system": "vllm[reservation=max]"} for row in mine if row["system"] == "orca_max"]
    results = write_results(tmp_path, mine)
    figure = module("fig_throughput").draw(results)["fig_throughput"]
    assert "vLLM [reservation=max]" in [text.get_text() for text in texts(figure)]
    assert_nothing_is_cut(figure)
    assert "vLLM [reservation=max]" in module("fig_throughput").table(results)


def test_an_hour_is_another_bar_and_other_claims(tmp_path: Path) -> None:
    rows = claims("fig_batched_requests", write_results(tmp_path, [r for r in batch_rows() if r["duration_s"] == 900]))
    assert find(rows, "Fig. 13(a)", "vLLM: mean number of batched requests (1 h").verdict is Verdict.NOT_RUN
    (claim,) = (
        row for row in rows if row.claim == "vLLM: mean number of batched requests" and row.figure == "Fig. 13(a)"
    )
    assert claim.verdict is Verdict.REPRODUCED


def test_a_shorter_trace_is_shown_but_not_compared(tmp_path: Path) -> None:
    short = changed([row for row in batch_rows() if row["duration_s"] == 900], duration_s=300)
    rows = claims("fig_batched_requests", write_results(tmp_path, short))
    (claim,) = (
        row for row in rows if row.claim == "vLLM: mean number of batched requests" and row.figure == "Fig. 13(a)"
    )
    assert claim.verdict is Verdict.NOT_COMPARABLE
    assert claim.note == "duration_s is 300, the paper's is 900"


def test_segments_follow_the_paper_s_buckets(tmp_path: Path) -> None:
    results = write_results(tmp_path, waste_rows())
    found = module("fig_memory_waste").segments(results.summary[results.summary["system"] == "orca_pow2"])
    assert found["external"] == pytest.approx(100 - 26.8 - 17.9 - 13.6)  # padding and free
    assert found["allocated"] == pytest.approx(26.8 + 17.9 + 13.6 + 2.0)


def test_nothing_that_ran_is_called_not_run(tmp_path: Path) -> None:
    """All curves were run, those of panel f never reach 0.5 s/token: rates, ratios and what panels decide together."""
    rows = [row | {"normalized_latency_mean_s": 0.1} if row["panel"] == "f" else row for row in throughput_rows()]
    claimed = fig_throughput.claims(write_results(tmp_path, rows))
    assert Verdict.NOT_RUN not in {row.verdict for row in claimed}
    undecided = [row for row in claimed if row.verdict is Verdict.UNDECIDED]
    assert all(row.note.startswith("no crossing between the rates that were run") for row in undecided)
    together = {row.figure: row.note for row in undecided if row.figure.startswith("Fig. 12(a-f")}
    assert together["Fig. 12(a-f)"].startswith("no crossing between the rates that were run in panel f")
    without = [row for row in rows if row["panel"] != "e"]
    part = fig_throughput.claims(write_results(tmp_path / "part", without))
    [gain] = [row for row in part if row.figure == "Fig. 12(a-f)"]
    assert gain.verdict is Verdict.NOT_RUN
    assert gain.note.startswith("needs the rates at the threshold of panel e")


def test_a_note_on_one_system_stands_on_its_row_alone(tmp_path: Path) -> None:
    claimed = fig_throughput.claims(write_results(tmp_path, throughput_rows()))
    doubled = [row for row in claimed if "two points at" in row.note]
    assert [(row.figure, row.claim.partition(":")[0]) for row in doubled] == [("Fig. 12(a)", "vLLM")]
    names = {look.label for look in style.SYSTEMS.values()}
    for row in claimed:
        subject, _, rest = row.claim.partition(":")
        if subject in names and rest:
            assert not [name for name in names - {subject} if name in row.note], row


def test_a_curve_that_leaves_the_axes_is_marked_as_no_system_is(tmp_path: Path) -> None:
    figure = fig_throughput.draw(write_results(tmp_path, throughput_rows()))["fig_throughput"]
    [entry] = [text for legend in figure.legends for text in legend.get_texts() if "leaves" in text.get_text()]
    markers = {look.marker for look in style.looks([*style.SYSTEMS, *"abcde"]).values()}
    named = latency.leaves_the_axes().get_marker()
    drawn = [line.get_marker() for axes in figure.axes for line in axes.lines if line.get_clip_on() is False]
    arrows = [marker for marker in drawn if isinstance(marker, MarkerPath)]
    assert entry.get_text() == "leaves the axes"
    assert isinstance(named, MarkerPath)
    assert {str(marker) for marker in drawn if not isinstance(marker, MarkerPath)} <= markers
    assert {np.ptp(marker.vertices, axis=0).tobytes() for marker in arrows} == {
        np.ptp(named.vertices, axis=0).tobytes()
    }


def test_sources_with_commas_can_be_told_apart(tmp_path: Path) -> None:
    """In what every figure says below, in what obstructs a claim, and in the tables of a comparison."""
    sources = ["Alpaca, a sample of its pairs", "ShareGPT, drawn from the paper's histogram"]
    summary = write_results(tmp_path, [{"workload_source": each} for each in sources]).summary
    said = "; ".join(sources)
    assert f"Lengths: {said}." in frames.footnote(summary)
    assert frames.other_lengths(summary, "sharegpt") == f"lengths: {said}"


def test_capacities_stand_above_what_traces_gave_and_speak_in_words(tmp_path: Path) -> None:
    searched = {"metric": "normalized_latency_mean_s", "threshold": 0.5}
    rows = [
        {"system": system, "repeat": repeat, "capacity_req_per_s": rate, "trace_capacity_req_per_s": rate, **searched}
        for system, rate in (("vllm", 2.0), ("orca_max[allocator=mine.BestFit,reservation=oracle]", 1.0))
        for repeat in range(3)
    ]
    figure = capacity.draw(write_results(tmp_path, rows))["capacity"]
    [axes] = figure.axes
    below = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [float(np.asarray(bars[0].get_ydata())[0]) for bars in axes.containers] == [0, 1]
    assert [float(np.asarray(line.get_ydata())[0]) for line in below] == pytest.approx([0.3, 1.3])
    assert all(line.get_markersize() < 4 for line in below)
    assert axes.get_title() == "OPT-13B, A100-40GB, ShareGPT"
    assert "Mean normalized latency at most 0.5 s/token." in figure.texts[0].get_text().replace("\n", " ")
    assert_nothing_is_cut(figure)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("opt_175b", "a100_80gb_x8", "alpaca"), "OPT-175B, 8x A100-80GB, Alpaca"),
        (("llama_13b", "h200", "sharegpt_chat"), "LLaMA-13B, h200, sharegpt chat"),
        (("mine", "local", "fixed"), "mine, local, fixed"),
    ],
)
def test_settings_are_written_as_people_do(names: tuple[str, str, str], said: str) -> None:
    assert frames.setting(*names) == said


def test_looks_differ_in_colour_marker_and_line() -> None:
    found = list(style.SYSTEMS.values())
    for field in ("label", "color", "marker", "linestyle"):
        assert len({getattr(look, field) for look in found}) == len(found)
    others = style.looks(["vllm[reservation=max]", "vllm", "own.package.Class", "orca_max"])
    assert list(others) == ["orca_max", "vllm", "own.package.Class", "vllm[reservation=max]"]
    assert len({(look.color, look.marker) for look in others.values()}) == 4


@pytest.mark.parametrize(("experiment", "of"), [("fig_memory_waste", waste_rows), ("fig_batched_requests", batch_rows)])
def test_memory_under_other_lengths_says_why_it_is_not_comparable(
    experiment: str, of: Callable[[], list[Row]], tmp_path: Path
) -> None:
    rows = claims(experiment, write_results(tmp_path, changed(of(), workload_source="drawn")))
    assert {claim.verdict for claim in rows if claim.figure in ("Fig. 2", "Fig. 13(a)")} == {Verdict.NOT_COMPARABLE}
    assert all("lengths: drawn" in claim.note for claim in rows if claim.verdict is Verdict.NOT_COMPARABLE)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"config": {"runner": {"beams": {"beta": 2.5}}}}, "runner.beams.beta is 2.5, not 20"),
        ({"system": "vllm[allocator.copy_on_write=False]"}, "system is vllm[allocator.copy_on_write=False]"),
        ({"workload_source": "drawn"}, "lengths: drawn"),
    ],
)
def test_sharing_under_other_conditions_is_not_comparable(values: Row, reason: str, tmp_path: Path) -> None:
    claim = find(
        claims("fig_sharing", write_results(tmp_path, changed(sharing_rows(), **values))),
        "Fig. 15(b), text",
        "ShareGPT, 6 beams:",
    )
    assert claim.verdict is Verdict.NOT_COMPARABLE
    assert claim.note.startswith(reason)


def test_the_mean_of_few_seeds_is_not_that_of_the_claim(tmp_path: Path) -> None:
    rows = claims("fig_sharing", write_results(tmp_path, [row for row in sharing_rows() if row["repeat"] < 2]))
    claim = find(rows, "Fig. 15(a), text", "ShareGPT, 2 samples")
    assert (claim.verdict, claim.note.partition(";")[0]) == (Verdict.NOT_COMPARABLE, "the mean of 2 seeds, not of 6")
    assert find(rows, "Fig. 15(a)", "Alpaca, 2 samples").verdict is Verdict.REPRODUCED


def test_beams_are_compared_with_as_many_samples(tmp_path: Path) -> None:
    rows = claims("fig_beam_search", write_results(tmp_path, beam_rows()))
    assert find(rows, "Fig. 14(c, f)", "6 beams gain more").measured == pytest.approx(2.220 / 1.536, abs=2e-3)
    alone = claims("fig_beam_search", write_results(tmp_path / "alone", throughput_rows(figure="fig14_beams")))
    claim = find(alone, "Fig. 14(c, f)", "6 beams gain more")
    assert (claim.verdict, claim.note.partition(";")[0]) == (
        Verdict.NOT_RUN,
        "needs the rates at the threshold of panel c",
    )


def test_as_many_samples_as_in_another_panel_are_not_comparable(tmp_path: Path) -> None:
    mine = changed([row for row in throughput_rows(figure="fig14_parallel") if row["panel"] == "a"], num_samples=4)
    rows = claims("fig_parallel_sampling", write_results(tmp_path, mine))
    claim = find(rows, "Fig. 14(a)", "vLLM: rate")
    assert (claim.verdict, claim.note.partition(";")[0]) == (
        Verdict.NOT_COMPARABLE,
        "num_samples is 4, the paper's is 2",
    )


def test_block_sizes_are_judged_together(tmp_path: Path) -> None:
    without = [row for row in block_size_rows() if (row["panel"], row["block_size"]) != ("sharegpt", 64)]
    rows = claims("fig_block_size", write_results(tmp_path, without))
    claim = find(rows, "Fig. 18(b)", "ShareGPT: the best block size")
    assert (claim.verdict, claim.note.partition(";")[0]) == (
        Verdict.NOT_RUN,
        "needs block size 64 of panel sharegpt",
    )
    slower = [
        row | {"normalized_latency_mean_s": 0.05} if (row["panel"], row["block_size"]) == ("sharegpt", 64) else row
        for row in block_size_rows()
    ]
    claim = find(
        claims("fig_block_size", write_results(tmp_path / "64", slower)), "Fig. 18(b)", "ShareGPT: the best block size"
    )
    assert (claim.verdict, claim.measured) == (Verdict.NOT_REPRODUCED, 64)


def test_recompute_is_priced_alone_and_swap_by_pieces(tmp_path: Path) -> None:
    curves = module("fig_swap_microbenchmark").simulated(write_results(tmp_path, price_rows()))
    expected_ms = 27.6 - 20.7 + 0.24 + 0.1405 * 256 + 8.1e-6 * 256**2
    assert list(curves["recompute"].values()) == pytest.approx([expected_ms] * 9)
    assert curves["swap_out"][1] == pytest.approx(20_480 * 1.9e-3 + 256 * 0.8192 / 13.1)
    assert curves["both"][256] == pytest.approx(curves["swap_in"][256] + curves["swap_out"][256])
