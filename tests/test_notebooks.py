"""Notebooks run from a fresh clone, end with figures and without a warning, and are kept as pairs without outputs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import jupytext  # type: ignore[import-untyped]
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REFERENCE = ROOT / "results" / "reference"
FIGURES = {"own_allocator": 3, "own_trace": 4, "waterfall": 2}
"""How many each draws; of the paper's story it depends on what results/reference holds."""


def test_each_is_a_pair() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"paper", *FIGURES}
    assert [path.with_suffix(".py") for path in NOTEBOOKS] == sorted((ROOT / "notebooks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_ends_with_a_figure(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "results").mkdir()
    shutil.copytree(REFERENCE, tmp_path / "results" / "reference")
    monkeypatch.setenv("KVBENCH_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    resources = {"metadata": {"path": tmp_path / "notebooks"}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not [output for output in outputs if "Warning" in output.get("text", "")]
    num_figures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert num_figures == FIGURES.get(path.stem, _num_committed_figures(path) + 2)
    assert any("image/png" in output.get("data", {}) for output in cells[-1].outputs)


def _num_committed_figures(path: Path) -> int:
    """Of each experiment that a notebook shows, once, whether it was run on the paper's own requests or not."""
    experiments = re.findall(r'show\("(fig_\w+)"', path.with_suffix(".py").read_text(encoding="utf-8"))
    folders = (REFERENCE / f"{each}{of_pairs}" for each in experiments for of_pairs in ("", "_pairs"))
    return len({picture.name for folder in folders for picture in folder.glob("*.png")})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_both_of_a_pair_say_the_same(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    script = jupytext.read(path.with_suffix(".py"))
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ], f"jupytext --sync notebooks/{path.stem}.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None and not cell.metadata for cell in code)
