"""``python -m kvbench.compare``: what is put side by side, what is refused, and what figure and table show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvbench import compare
from kvbench.core import KvbenchError
from kvbench.figures import comparison, conditions, replications, style
from kvbench.figures.typeset import Table
from kvbench.results import write_json
from tests.drawn import assert_nothing_is_cut
from tests.synthetic_results import Row, write_results

RATES = (1, 2)


def rows(scale: float = 1.0, **columns: object) -> list[Row]:
    """Two systems at two rates; Orca's latency is three times vLLM's."""
    return [
        {"system": system, "request_rate": rate, "normalized_latency_mean_s": scale * rate * factor, **columns}
        for system, factor in (("vllm", 0.1), ("orca_max", 0.3))
        for rate in RATES
    ]


def run(tmp_path: Path, *words: str) -> int:
    return compare.main([*words, "--to", str(tmp_path / "compared")])


def test_runs_of_different_experiments_are_one_figure_and_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / "mine", rows())
    write_results(tmp_path / "theirs", rows(scale=2, experiment="other", hardware="h100_80gb"))
    assert run(tmp_path, str(tmp_path / "mine"), str(tmp_path / "theirs"), "system=vllm") == 0
    printed = capsys.readouterr().out
    names = {f"compare.{suffix}" for suffix in ("pdf", "svg", "png", "md", "tex")}
    assert {path.name for path in (tmp_path / "compared").iterdir()} == names
    lines = [line.split() for line in printed.splitlines() if line.startswith(("mine", "theirs"))]
    assert [(line[0], line[1], line[-1]) for line in lines] == [
        ("mine", "vLLM", "1"), ("mine", "vLLM", "1"), ("mine", "Orca", "3"), ("mine", "Orca", "3"),
        ("theirs", "vLLM", "2"), ("theirs", "vLLM", "2"),
    ]  # fmt: skip
    assert "Simulated (costs: paper_engine)" in printed


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"model": "opt_66b"}, "model is opt_13b / opt_66b"),
        ({"workload": "alpaca", "workload_source": "Alpaca"}, "workload is sharegpt / alpaca; lengths is"),
        ({"kv_cache_bytes": 10**9}, "pool (bytes) is"),
        ({"runner": "cpu", "device": "cpu, 2 threads", "costs": None}, "simulated beside measured (cpu)"),
        ({"costs": "local"}, "costs are paper_engine / local"),
        ({"num_samples": 2}, "num_samples is 1 / 2"),
        ({"options": {"arrivals": {"_target_": "kvbench.workloads.arrivals.Gamma"}}}, "workload.arrivals._target_ is"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: Row, message: str
) -> None:
    for folder, more in (("a", {}), ("b", columns)):
        write_results(tmp_path / folder, rows(**more))
    assert run(tmp_path, str(tmp_path / "a"), str(tmp_path / "b")) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("kvbench.compare: not comparable: ")
    assert message in refused
    assert len(refused.splitlines()) == 2
    assert not (tmp_path / "compared").exists()


def test_what_is_mixed_says_why_it_should_not_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path / "a", rows())
    write_results(tmp_path / "b", rows(runner="cpu", device="cpu, 2 threads", costs=None))
    assert run(tmp_path, str(tmp_path / "a"), str(tmp_path / "b"), "--mix") == 0
    printed = capsys.readouterr().out
    assert "over the first" not in printed
    shown = [path.read_text() for path in (tmp_path / "compared").iterdir() if path.suffix in (".md", ".tex")]
    assert all("Not comparable: simulated beside measured (cpu)" in text for text in (printed, *shown))
    frame = compare.select([str(tmp_path / "a"), str(tmp_path / "b")])
    labels = [each.label for each in comparison.series(frame, "request_rate")]
    assert labels[:2] == ["vLLM, a, simulated", "Orca (Max), a, simulated"]
    assert labels[2:] == ["vLLM, b, cpu, 2 threads", "Orca (Max), b, cpu, 2 threads"]


def test_other_files_behind_the_same_name_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, digest in (("a", "sha256:1234567"), ("b", "sha256:89abcde")):
        results = write_results(tmp_path / folder, rows())
        for _, row in results.summary.iterrows():
            write_json(results.folder(row) / "manifest.json", {"inputs": {"lengths.csv": digest}})
    assert run(tmp_path, str(tmp_path / "a"), str(tmp_path / "b")) == 2
    assert "workload.files is sha256:1234567 / sha256:89abcde" in capsys.readouterr().err


def test_an_engine_of_its_own_has_costs_of_its_own(tmp_path: Path) -> None:
    slabs = [row | {"system": "fastertransformer", "costs": "fastertransformer"} for row in rows()[:2]]
    write_results(tmp_path, rows() + slabs)
    frame = compare.select([str(tmp_path)])
    assert not list(conditions.differences(frame, "request_rate", "normalized_latency_mean_s"))


def test_objectives_matter_to_what_depends_on_them(tmp_path: Path) -> None:
    write_results(tmp_path, [{"slo_ttft_s": 1, "system": "vllm"}, {"slo_ttft_s": 2, "system": "orca_max"}])
    frame = compare.select([str(tmp_path)])
    assert not list(conditions.differences(frame, None, "throughput_req_per_s"))
    assert list(conditions.differences(frame, None, "goodput_req_per_s")) == ["slo_ttft_s is 1 / 2"]


def test_what_is_not_kept_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path / "a", rows())
    results = write_results(tmp_path / "b", rows())
    for path in results.path.glob("points/*/config.yaml"):
        path.unlink()
    assert run(tmp_path, str(tmp_path / "a"), str(tmp_path / "b")) == 0
    assert "Options of the workload are not kept in b, so not compared" in capsys.readouterr().out


def test_points_are_selected_by_column(tmp_path: Path) -> None:
    write_results(tmp_path, rows(panel="a") + rows(panel="b"))
    frame = compare.select([str(tmp_path), "panel=b", "request_rate=1,2", "system=vllm"])
    assert set(zip(frame["panel"], frame["system"], frame["request_rate"], strict=True)) == {
        ("b", "vllm", 1.0),
        ("b", "vllm", 2.0),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["FOLDER", "FOLDER"], "is given twice"),
        (["panel=a", "FOLDER"], "give results/NAME first"),
        (["FOLDER", "panel=z"], "no such point with panel=z; there is a"),
        (["FOLDER", "colour=red"], "there is no column colour"),
        (["FOLDER", "-y", "latency"], "there is no column latency"),
        (["FOLDER", "-y", "ttft_p50_s"], "no point has a number in ttft_p50_s"),
        (["FOLDER", "-x", "measure_to_s"], "no point has a number in measure_to_s; choose another column with -x"),
        (["FOLDER", "--metrics", "free_pct"], "no point has a number in free_pct"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    write_results(tmp_path, rows(panel="a"))
    assert run(tmp_path, *(str(tmp_path) if word == "FOLDER" else word for word in words)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["x", "y", "metrics"])
def test_whatever_column_is_named_is_drawn_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Every column there is; those of words and of yes or no are no axis and no metric."""
    monkeypatch.setattr(style, "save", lambda *_: [])
    write_results(tmp_path, [row | {"free_pct": float(place)} for place, row in enumerate(rows(panel="a")[1:3])])
    frame = compare.select([str(tmp_path)])
    for column in frame:
        given: dict[str, Any] = {option: [column] if option == "metrics" else column}
        if frame[column].dtype.kind in "iuf" and frame[column].notna().any():
            compare.compare(frame, tmp_path, **given)
        else:
            with pytest.raises(KvbenchError, match=f"(and|in) {column}( is |; choose)") as caught:
                compare.compare(frame, tmp_path, **given)
            assert len(str(caught.value).splitlines()) == 1


def test_numbers_that_no_point_has_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path, [{"free_pct": 5.0}, {"system": "orca_max", "ttft_p50_s": 1.0}])
    assert run(tmp_path, str(tmp_path), "-x", "free_pct", "-y", "ttft_p50_s") == 2
    assert "no point has a number in both free_pct and ttft_p50_s" in capsys.readouterr().err


def _drawn(tmp_path: Path, y: str = "normalized_latency_mean_s") -> tuple[Figure, list[comparison.Series]]:
    frame = compare.select([str(tmp_path)])
    x = comparison.axis(frame)
    return comparison.draw(frame, x, y), comparison.series(frame, x)


def test_curves_are_drawn_as_measured_with_bands_for_repeats(tmp_path: Path) -> None:
    repeated = [row for repeat in range(3) for row in rows(scale=1 + 0.1 * repeat, repeat=repeat)]
    repeated[-1]["stable"] = False  # Orca's queue grows at the higher rate: no interval there
    write_results(tmp_path, repeated)
    figure, found = _drawn(tmp_path)
    (axes,) = figure.axes
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines] == [
        pytest.approx([0.11, 0.22]),
        pytest.approx([0.33, 0.66]),
    ]
    xs = [np.unique(np.asarray(band.get_paths()[0].vertices)[:, 0]).tolist() for band in axes.collections]
    assert xs == [[1.0, 2.0], [1.0]]
    assert [each.label for each in found] == ["vLLM", "Orca (Max)"]
    assert axes.get_xlabel() == "Request rate (requests/s)"


def test_no_mean_is_made_over_repeats_of_a_growing_queue(tmp_path: Path) -> None:
    """Of three repeats: vLLM's is stable though one is flagged, Orca's grows at the higher rate in two."""
    repeated = [row | {"growth_score": 0.1} for repeat in range(3) for row in rows(repeat=repeat)]
    repeated[0]["stable"] = False
    for row in (repeated[-1], repeated[-5]):
        row |= {"growth_score": 9.0, "stable": False}
    write_results(tmp_path, repeated)
    frame = compare.select([str(tmp_path)])
    table = comparison.table(frame, comparison.axis(frame), over="normalized_latency_mean_s")
    assert table.header[-2:] == ["over the first", "stable"]
    assert [row[-1] for row in table.rows] == ["yes", "yes", "yes", "no"]
    assert set(table.rows[-1][-3:-1]) == {"-"}
    assert all("[" in cell for row in table.rows[:-1] for cell in row[-3:-1])


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ((True, True), None),
        ((True, None), ["yes", "undecided"]),
        ((None, None), ["undecided", "undecided"]),
        ((None, False), ["undecided", "no"]),
        ((True, False), ["yes", "no"]),
    ],
)
def test_what_cannot_be_judged_is_neither_stable_nor_not(
    tmp_path: Path, flags: tuple[bool | None, bool | None], shown: list[str] | None, repeats: int
) -> None:
    """One flag for each system, empty where a trace is too short; alike in the command's own table of repeats."""
    points = [
        {"system": system, "request_rate": 1, "normalized_latency_mean_s": 0.1, "stable": flag, "repeat": repeat}
        for system, flag in zip(("vllm", "orca_max"), flags, strict=True)
        for repeat in range(repeats)
    ]
    write_results(tmp_path, points)
    frame = compare.select([str(tmp_path)])
    table = comparison.table(frame, None)
    assert ([row[-1] for row in table.rows] if table.header[-1] == "stable" else None) == shown
    lines = replications.table(frame, ["system"], {"normalized_latency_mean_s": "s"}).splitlines()[1:3]
    assert [line.split()[-3] for line in lines] == (shown or ["yes", "yes"])


def test_rates_that_searches_found_tell_no_points_apart(tmp_path: Path) -> None:
    found = [
        {"system": system, "repeat": repeat, "request_rate": 1 + 0.1 * repeat, "metric": "ttft_p99_s", "threshold": 2.0}
        for system in ("vllm", "orca_max")
        for repeat in range(3)
    ]
    write_results(tmp_path, found)
    frame = compare.select([str(tmp_path)])
    assert comparison.axis(frame) is None
    assert len(comparison.table(frame, None).rows) == len(comparison.series(frame, None)) == 2


def test_what_goes_along_nothing_is_a_line_for_each(tmp_path: Path) -> None:
    write_results(tmp_path, [{"system": name, "free_pct": 5.0} for name in ("vllm", "orca_max")])
    figure, _ = _drawn(tmp_path, "free_pct")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["vLLM", "Orca (Max)"]
    assert axes.get_xlabel() == "Free (% of the pool)"


def test_paired_ratios_have_intervals_and_strangers_have_none(tmp_path: Path) -> None:
    both = [row for repeat in range(3) for row in rows(scale=1 + 0.1 * repeat, repeat=repeat)]
    write_results(tmp_path / "paired", both)
    write_results(tmp_path / "strangers", [row | {"seed": 7 if row["system"] == "vllm" else 8} for row in both])
    for folder, expected in (("paired", "3 [3, 3]"), ("strangers", "3")):
        frame = compare.select([str(tmp_path / folder)])
        table = comparison.table(frame, "request_rate", over="normalized_latency_mean_s")
        assert [row[-1] for row in table.rows if row[0] == "Orca (Max)"] == [expected] * 2


def test_looks_tell_series_apart() -> None:
    for runs, systems in (
        (["a"] * 3, ["vllm", "orca_max", "mine"]),
        (["a", "a", "b", "b"], ["vllm", "orca_max"] * 2),
        (list("abcdefgh"), ["vllm"] * 8),
    ):
        looks = style.looks_of_runs(runs, systems)
        assert (
            len({look[1:] for look in looks})
            == len({(look.marker, str(look.linestyle)) for look in looks})
            == len(runs)
        )
        assert [look.label for look in looks] == [style.looks(systems)[system].label for system in systems]
    with pytest.raises(KvbenchError, match="11 curves are too many"):
        style.looks_of_runs(list("abcdefghijk"), ["vllm"] * 11)


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        write_results(tmp_path / parent / "mine", rows()[:2])
    labels = [
        each.label
        for each in comparison.series(compare.select([str(path) for path in tmp_path.glob("*/mine")]), "request_rate")
    ]
    assert sorted(labels) == [f"vLLM, {tmp_path / parent / 'mine'}" for parent in ("a", "b")]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("y", ["normalized_latency_mean_s", "free_pct"])
def test_long_names_are_neither_cut_nor_confused(tmp_path: Path, y: str, wide: bool) -> None:
    names = ["orca_max[reservation=oracle,allocator=myalloc.bestfit.BestFit]"]
    names += [f"vllm[allocator={module}.F]" for module in "ab"]
    rates = RATES if y == "normalized_latency_mean_s" else RATES[:1]
    write_results(
        tmp_path,
        [
            {"system": name, "request_rate": rate, "normalized_latency_mean_s": 0.1 * rate, "free_pct": 5.0}
            for name in names
            for rate in rates
        ],
    )
    frame = compare.select([str(tmp_path)])
    x = comparison.axis(frame)
    assert_nothing_is_cut(comparison.draw(frame, x, y, width_in=style.PAGE_IN if wide else style.COLUMN_IN))
    labels = {row[0] for row in comparison.table(frame, x).rows}
    assert labels == {
        "Orca (Max) [reservation=oracle,allocator=BestFit]",
        "vLLM [allocator=a.F]",
        "vLLM [allocator=b.F]",
    }


def test_tables_are_escaped() -> None:
    table = Table(["a_b", "50 %"], [["x|y", "1"]], 1, "by_hand & more")
    assert table.markdown() == "| a_b | 50 % |\n| :-- | --: |\n| x&#124;y | 1 |\n\nby_hand & more\n"
    latex = table.latex()
    assert r"a\_b & 50 \% \\" in latex
    assert r"\begin{tabular}{lr}" in latex
    assert r"by\_hand \& more" in latex


def test_every_experiment_has_a_table_of_its_points() -> None:
    for folder in sorted((Path(__file__).resolve().parent.parent / "results" / "reference").iterdir()):
        frame = compare.select([str(folder)])
        table = comparison.table(frame, comparison.axis(frame))
        firsts = int((frame["repeat"] == frame["repeat"].min()).sum())  # repeats share a row, unless options differ too
        told = [*comparison.KEYS, *comparison.AXES]  # so do runs that differ in what is no column, as a beams' seed
        apart = (
            frame.fillna({"request_rate": 0}).groupby(list(dict.fromkeys(told)), dropna=False, observed=True).ngroups
        )
        assert len(table.rows) in (len(frame), firsts, apart), folder.name
        assert {len(row) for row in table.rows} == {len(table.header)}


def test_the_committed_panels_are_refused_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = Path(__file__).resolve().parent.parent / "results" / "reference"
    assert run(tmp_path, str(kept / "fig_throughput")) == 2
    assert "Select with column=value after a folder (panel=a" in capsys.readouterr().err
    assert run(tmp_path, str(kept / "fig_throughput"), "panel=a", str(kept / "smoke"), "request_rate=0.2", "--mix") == 0
