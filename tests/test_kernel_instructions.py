"""The experiment of the compiled kernels: its figure, its table and its bar, for the points that were run."""

from __future__ import annotations

from pathlib import Path

import yaml

from kvbench.figures import fig_kernel_instructions as figure
from kvbench.paper.claims import Verdict
from kvbench.results import Results
from tests.drawn import assert_nothing_is_cut, texts
from tests.synthetic_results import Row, write_results

CONF = Path(__file__).parents[1] / "conf"
VERSIONS = sorted(path.stem.removeprefix("triton-") for path in figure.TABLES.glob("triton-*.csv"))


def results(folder: Path, sizes: list[int | None]) -> Results:
    """Points of OPT-13B in blocks of these sizes; None: contiguous."""
    names = {True: ("vllm", "paged"), False: ("fastertransformer", "contiguous")}
    rows: list[Row] = [
        dict(zip(("system", "allocator"), names[size is not None], strict=True)) | {"block_size": size}
        for size in sizes
    ]
    found = write_results(folder, rows)
    model = yaml.safe_load((CONF / "model" / "opt_13b.yaml").read_text(encoding="utf-8"))
    for point in (folder / "points").iterdir():
        (point / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    return found


def test_there_are_tables_of_two_versions() -> None:
    assert VERSIONS == ["3.6.0", "3.7.1"]


def test_the_figure_the_table_and_the_bar(tmp_path: Path) -> None:
    found = results(tmp_path, [None, 1, 8, 16, 128])
    (drawn,) = figure.draw(found).values()
    assert_nothing_is_cut(drawn)
    assert {f"triton {version}" for version in VERSIONS} <= {text.get_text() for text in texts(drawn)}
    loops = figure.curves(figure.read(found)[VERSIONS[-1]], "loop")
    assert sorted(loops["paged"]) == [1, 8, 16, 128]
    assert len(set(loops["contiguous"].values())) == 1
    assert sorted(loops["in loop"]) == [1, 16, 128]
    assert [claim.verdict for claim in figure.claims(found)] == [Verdict.REPRODUCED] * len(VERSIONS)
    printed = figure.table(found) or ""
    assert len(printed.splitlines()) == 1 + len(VERSIONS) * 8


def test_only_what_was_run_is_drawn(tmp_path: Path) -> None:
    found = results(tmp_path, [8])
    assert sorted(figure.curves(figure.read(found)[VERSIONS[0]], "loop")) == ["paged"]
    assert [claim.verdict for claim in figure.claims(found)] == [Verdict.NOT_RUN] * len(VERSIONS)
