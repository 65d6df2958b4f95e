"""The figures' common style: sizes, fonts in the files, and looks that a print in grey keeps apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbench.figures import style
from kvbench.figures.style import Look
from tests.drawn import assert_nothing_is_cut

ALL: list[Look] = [*style.SYSTEMS.values(), *style.looks(f"other{number}" for number in range(5)).values()]


def _luminance(color: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_marker_line_and_colour_each_tell_systems_apart() -> None:
    for field in ("color", "marker", "linestyle"):
        values = [str(getattr(look, field)) for look in ALL]
        assert len(set(values)) == len(values), field


@pytest.mark.parametrize("look", ALL, ids=lambda look: look.label)
def test_every_colour_stands_out_from_paper(look: Look) -> None:
    assert 1.05 / (_luminance(look.color) + 0.05) >= 2.0


@pytest.mark.parametrize("width_in", [style.COLUMN_IN, style.PAGE_IN])
def test_files_are_as_wide_as_asked_and_bring_their_fonts(tmp_path: Path, width_in: float) -> None:
    with style.context():
        figure = style.new_figure(width_in, 1.5, "Simulated.")
        axes = figure.subplots()
        style.plot(axes, [(0.0, 1.0), (1.0, 2.0)], style.SYSTEMS["vllm"])
        style.band(axes, [(0.0, 0.9, 1.1), (1.0, 1.8, 2.2)], style.SYSTEMS["vllm"])
        axes.set_xlabel("Request rate (requests/s)")
    paths = {path.suffix: path for path in style.save(figure, tmp_path, "figure")}
    pdf = paths[".pdf"].read_bytes()
    assert b"/FontFile2" in pdf  # TrueType, embedded
    assert b"/Type3" not in pdf  # which publishers refuse
    box = re.search(rb"/MediaBox \[ 0 0 ([0-9.]+) ", pdf)
    assert box is not None
    assert float(box[1]) == pytest.approx(72 * width_in)
    assert b"<text" not in paths[".svg"].read_bytes()  # letters are outlines


def test_no_intervals_are_no_band() -> None:
    with style.context():
        axes = style.new_figure(style.COLUMN_IN, 1.0).subplots()
        style.band(axes, [], style.SYSTEMS["vllm"])
    assert not axes.collections


LONG = "orca_max[reservation=oracle,allocator=myalloc.bestfit.BestFit]"


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("width_in", [style.COLUMN_IN, style.PAGE_IN])
@pytest.mark.parametrize(
    "labels",
    [
        ["vLLM", "Orca (Max)"],
        [style.looks([LONG])[LONG].label, "vLLM", "vLLM, of a folder with a long name, cpu, 2 threads"],
        [f"vLLM [allocator={'A' * 150}]", "x" * 300, *("Orca (Oracle)",) * 7],
    ],
)
def test_no_name_is_wider_than_the_figure(labels: list[str], width_in: float, columns: int) -> None:
    with style.context():
        figure = style.new_figure(width_in, 2.0 + 0.15 * len(labels), "Simulated. " * 20)
        note_in = figure.texts[0].get_text().count("\n")
        axes = figure.subplots()
        style.plot(axes, [(0.0, 1.0), (1.0, 2.0)], style.SYSTEMS["vllm"])
        looks = {str(place): Look(label, "#000000", "o", "-") for place, label in enumerate(labels)}
        style.put_legend(figure, style.legend(looks), columns)
    assert_nothing_is_cut(figure)
    [legend] = figure.legends
    assert [text.get_text().replace("\n", "").replace(" ", "") for text in legend.get_texts()] == [
        label.replace(" ", "") for label in labels
    ]
    assert legend.get_window_extent().width <= figure.bbox.width
    assert axes.get_position().height * figure.get_figheight() > 1.2  # names take nothing from the panel
    assert figure.texts[0].get_text().count("\n") == note_in


def test_names_break_between_words() -> None:
    assert style.wrapped("Orca (Max) [reservation=oracle,allocator=BestFit], mine", 1.2).splitlines() == [
        "Orca (Max)",
        "[reservation=oracle,",
        "allocator=BestFit], mine",
    ]


def test_classes_are_called_without_their_modules_where_that_tells_them_apart() -> None:
    others = ["vllm[allocator=a.b.Mine]", "vllm[allocator=c.Mine]", "vllm[system.max_num_seqs=8,watermark=0.25]"]
    looks = style.looks(["vllm", LONG, *others])
    assert [look.label for look in looks.values()] == [
        "vLLM",
        "Orca (Max) [reservation=oracle,allocator=BestFit]",
        "vLLM [allocator=a.b.Mine]",
        "vLLM [allocator=c.Mine]",
        "vLLM [system.max_num_seqs=8,watermark=0.25]",
    ]
