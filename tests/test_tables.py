"""``kvbench.load``: typed columns with units, of one or many folders, of older and newer results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import kvbench
from kvbench import schema
from kvbench.app import main
from kvbench.core import KvbenchError
from kvbench.results import COLUMNS, write_csv, write_json
from tests.synthetic_results import write_results

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the command leaves it: two systems, a minute of requests."""
    folder = tmp_path_factory.mktemp("results")
    rate = ["workload.request_rate=0.5", "workload.duration_s=60"]
    assert main(["-m", "system=vllm,orca_max", *rate, f"results_dir={folder}", "executor=serial"]) == 0
    return folder / "adhoc"


def test_every_column_has_its_type_unit_and_meaning() -> None:
    assert tuple(schema.SUMMARY) == COLUMNS
    for _, columns in schema.TABLES.values():
        assert all(column.meaning and column.dtype for column in columns.values())


@pytest.mark.parametrize("table", schema.TABLES)
def test_columns_are_as_documented(tiny: Path, table: str) -> None:
    frame = kvbench.load(tiny, table)  # type: ignore[arg-type]
    assert len(frame)
    documented = {name: column.dtype for name, column in schema.TABLES[table][1].items()}
    loaded = {name: str(kind) for name, kind in frame.dtypes.items()}
    assert {name: loaded[name] for name in documented} == documented
    assert set(loaded) - set(documented) == ({"results"} if table == "summary" else {"results", "point"})
    assert frame.attrs["missing"] == frame.attrs["unknown"] == []
    assert frame.attrs["units"] == {name: column.unit for name, column in schema.TABLES[table][1].items()}


def test_requests_find_their_point(tiny: Path) -> None:
    points = kvbench.load(tiny)
    requests = kvbench.load(tiny, "requests").merge(points, on=["results", "point"])
    counted = requests.groupby("system")["id"].count()
    assert counted.to_dict() == points.set_index("system")["num_requests"].to_dict()


def test_what_does_not_exist_is_missing(tmp_path: Path) -> None:
    write_results(tmp_path, [{"block_size": None, "stable": None}, {"stable": False}])
    frame = kvbench.load(tmp_path)
    assert frame["block_size"].isna().tolist() == [True, False]
    assert frame["stable"].tolist() == [pd.NA, False]
    assert frame["ttft_p50_s"].isna().all()


def test_folders_are_told_apart_and_older_ones_lack_columns(tmp_path: Path) -> None:
    write_results(tmp_path / "new", [{"lost_s": 2.5, "request_rate": 1}])
    old = tmp_path / "old"
    old.mkdir()
    write_csv(old / "summary.csv", ("system", "point", "mine"), [{"system": "vllm", "point": "p", "mine": 7}])
    frame = kvbench.load([old, tmp_path / "new"])
    assert frame["results"].astype(str).tolist() == [str(old), str(tmp_path / "new")]
    assert frame["lost_s"].isna().tolist() == [True, False]
    assert "lost_s" in frame.attrs["missing"]
    assert "system" not in frame.attrs["missing"]
    assert frame.attrs["unknown"] == ["mine"]


def test_the_committed_results_load() -> None:
    for path in sorted((ROOT / "results" / "reference").iterdir()):
        frame = kvbench.load(path)
        assert len(frame)
        assert not frame.attrs["unknown"]


def test_results_of_a_newer_kvbench_are_refused(tmp_path: Path) -> None:
    write_results(tmp_path, [{}])
    write_json(tmp_path / "points" / "p0" / "manifest.json", {"schema": schema.VERSION + 1})
    with pytest.raises(KvbenchError, match=rf"version {schema.VERSION + 1}.* up to {schema.VERSION}; update kvbench"):
        kvbench.load(tmp_path)


@pytest.mark.parametrize(
    ("summary", "table", "message"),
    [
        ("system,point\nvllm,p\n", "steps", "only the summary was kept"),
        ("system,point\nvllm,p\n", "iterations", "choose from summary, requests, steps"),
        ("system,point,num_slots\nvllm,p,many\n", "summary", "column num_slots should hold numbers"),
        ("name,value\na,1\n", "summary", "not kvbench's"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path: Path, summary: str, table: str, message: str) -> None:
    (tmp_path / "summary.csv").write_text(summary)
    with pytest.raises(KvbenchError, match=message):
        kvbench.load(tmp_path, table)  # type: ignore[arg-type]


@pytest.mark.parametrize("folders", [5, None, [5], ["results", None], {3: "a"}])
def test_what_is_no_folder_is_refused(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="is no folder of results; give results/NAME, or several"):
        kvbench.load(folders)
    write_results(tmp_path, [{}])
    with pytest.raises(KvbenchError, match="choose from summary, requests, steps"):
        kvbench.load(tmp_path, folders)


def test_nothing_to_load() -> None:
    with pytest.raises(KvbenchError, match="no folder"):
        kvbench.load([])


def test_asking_for_the_version_imports_no_pandas() -> None:
    code = "import kvbench, sys; assert kvbench.__version__; print('pandas' in sys.modules, 'numpy' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False False\n"
    )


def test_the_page_of_columns_is_up_to_date() -> None:
    assert (ROOT / "docs" / "columns.md").read_text(encoding="utf-8") == schema.document()
