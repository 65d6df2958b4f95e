"""The files of a results folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import yaml

import kvbench
from kvbench import app
from kvbench.compare import compare, select
from kvbench.core import KvbenchError
from kvbench.export import export
from kvbench.metrics import METRICS
from kvbench.paper.claims import Claim
from kvbench.records import write_parquet
from kvbench.report import write as report
from kvbench.results import COLUMNS, POINT_COLUMNS, TOGETHER, Results, leaves, write_csv, write_json, write_text

CONTRACT = """
experiment panel system allocator reservation scheduler copy_on_write block_size runner device hardware costs model
workload workload_source decoding num_samples beam_width request_rate repeat seed uses_true_lengths kv_cache_bytes
num_slots num_requests num_rejected simulated_s wall_s normalized_latency_mean_s normalized_latency_p90_s ttft_p50_s
ttft_p99_s tpot_p50_s tpot_p99_s throughput_req_per_s throughput_tok_per_s num_running_mean num_running_iteration_mean
num_waiting_mean num_iterations token_states_pct reserved_pct overreserved_pct padding_pct cached_pct pinned_pct
free_pct token_states_iteration_pct reserved_iteration_pct overreserved_iteration_pct padding_iteration_pct
free_iteration_pct
internal_fragmentation_pct external_fragmentation_index sharing_saved_pct num_preemptions recomputed_tokens
swapped_out_bytes swapped_in_bytes point num_clipped num_dropped weights_bytes activation_bytes reserve_bytes
measure_from_s measure_to_s duration_s
"""


def test_columns_of_the_contract() -> None:
    assert set(CONTRACT.split()) <= set(COLUMNS)
    assert len(set(COLUMNS)) == len(COLUMNS)
    assert set(METRICS) <= set(POINT_COLUMNS) <= set(COLUMNS)


def test_csv_is_exact_and_leaves_nothing_empty(tmp_path: Path) -> None:
    write_csv(
        tmp_path / "a.csv",
        ("x", "y", "z"),
        [{"x": 0.1 + 0.2, "y": math.nan, "z": None}, {"x": 1, "y": "a,b", "z": True}],
    )
    assert (tmp_path / "a.csv").read_text() == 'x,y,z\n0.30000000000000004,,\n1,"a,b",True\n'


def test_an_unknown_column_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fieldnames"):
        write_csv(tmp_path / "a.csv", ("x",), [{"x": 1, "other": 2}])


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": math.nan, "y": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": 1.5}


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_results_of_a_point(tmp_path: Path) -> None:
    folder = tmp_path / "points" / "p-12345678"
    folder.mkdir(parents=True)
    write_csv(
        tmp_path / "summary.csv",
        ("panel", "point", "request_rate"),
        [{"panel": 1, "point": folder.name, "request_rate": 2.0}],
    )
    write_parquet(folder / "requests.parquet", {"id": np.arange(3, dtype=np.int32)})
    write_json(folder / "manifest.json", {"key": "k"})
    write_text(folder / "config.yaml", "seed: 3\n")
    results = Results(tmp_path)
    row = results.summary.iloc[0]
    assert row["panel"] == "1"
    assert row["request_rate"] == 2.0
    assert results.requests(row)["id"].tolist() == [0, 1, 2]
    assert results.manifest(row) == {"key": "k"}
    assert results.config(row) == {"seed": 3}
    with pytest.raises(KvbenchError, match="records=summary"):
        results.steps(row)
    write_parquet(folder / "steps.parquet", {"end_s": np.array([1.5])})
    assert results.steps(row)["end_s"].tolist() == [1.5]


def test_a_point_s_own_manifest_comes_first_and_none_is_empty(tmp_path: Path) -> None:
    write_csv(tmp_path / "summary.csv", ("panel", "point"), [{"point": "p-1"}, {"point": "q-2"}, {"point": "r-3"}])
    (tmp_path / "points" / "p-1").mkdir(parents=True)
    write_json(tmp_path / "points" / "p-1" / "manifest.json", {"key": "own"})
    write_json(tmp_path / TOGETHER, {"p-1": {"key": "old"}, "q-2": {"key": "kept"}})
    results = Results(tmp_path)
    found = [results.manifest(row) for _, row in results.summary.iterrows()]
    assert found == [{"key": "own"}, {"key": "kept"}, {}]
    assert not results.has_config(results.summary.iloc[0])


def test_the_leaves_of_a_tree_have_dotted_keys() -> None:
    tree = {"a": {"b": 1, "c": {"d": [2]}, "e": {}}, "f": None}
    assert dict(leaves(tree)) == {"a.b": 1, "a.c.d": [2], "f": None}


def test_a_summary_is_read_once(tmp_path: Path) -> None:
    write_csv(tmp_path / "summary.csv", ("panel", "point"), [{"point": "p-1"}])
    results = Results(tmp_path)
    assert results.summary is results.summary


def test_the_requests_of_all_points_are_one_dataset(tmp_path: Path) -> None:
    for number, point in enumerate(("p-1", "q-2", "old-3")):
        folder = tmp_path / "points" / point
        folder.mkdir(parents=True)
        write_parquet(folder / "requests.parquet", {"id": np.arange(number + 1, dtype=np.int32)})
    write_csv(tmp_path / "summary.csv", ("panel", "point"), [{"point": "p-1"}, {"point": "q-2"}, {"point": "p-1"}])
    found = Results(tmp_path).dataset("requests").to_table(columns=["point", "id"])
    assert found.to_pydict() == {"point": ["p-1", "q-2", "q-2"], "id": [0, 0, 1]}


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"holds no summary\.csv"):
        Results(tmp_path)


def _cut(path: Path) -> None:
    half = path.read_bytes()[: path.stat().st_size // 2]
    while path.suffix == ".yaml" and _is_yaml(half):  # as YAML is that ends after a key
        half = half[:-1]
    path.write_bytes(half)


def _is_yaml(content: bytes) -> bool:
    try:
        yaml.safe_load(content)
    except yaml.YAMLError:
        return False
    return True


def _garble(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "garbled": _garble,
    "another": lambda path: path.write_text("[1, 2]\n"),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished command of one point."""
    folder = tmp_path_factory.mktemp("kept")
    words = ["workload=fixed", "workload.num_requests=20", "executor=serial", "name=mine"]
    assert app.main([*words, f"results_dir={folder}", f"data_dir={folder}"]) == 0
    return folder / "mine"


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "name", ["summary.csv", "manifest.json", "config.yaml", "requests.parquet", "steps.parquet", "claims.csv"]
)
def test_a_damaged_file_is_named_with_the_remedy(kept: Path, name: str, damage: str, tmp_path: Path) -> None:
    """By whatever reads it: the report reads all of them."""
    folder = tmp_path / "mine"
    shutil.copytree(kept, folder)
    write_csv(folder / "claims.csv", [each.name for each in fields(Claim)], [])
    [point] = (folder / "points").iterdir()
    path = folder / name if name.endswith("csv") else point / name
    DAMAGE[damage](path)
    readers: dict[str, Callable[[], object]] = {"report": lambda: report(folder)}
    if name != "claims.csv":
        readers["export"] = lambda: export(Results(folder), tmp_path)
    if name == "summary.csv":
        readers["load"] = lambda: kvbench.load(folder)
    if name == "manifest.json":
        readers["load"] = lambda: kvbench.load(folder)
    if name.endswith("parquet"):
        readers["load"] = lambda: kvbench.load(folder, name.removesuffix(".parquet"))  # type: ignore[arg-type]
    if name in ("summary.csv", "manifest.json", "config.yaml"):
        readers["compare"] = lambda: compare(select([str(folder)]), tmp_path, y="free_pct")
    for reader in readers.values():
        with pytest.raises(KvbenchError) as caught:
            reader()
        said = str(caught.value)
        assert said.startswith(str(path))
        assert "run the same command again" in said or "is not kvbench's: it has no column" in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["config.yaml", "requests.parquet"])
def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    write_csv(tmp_path / "summary.csv", ("panel", "point"), [{"point": "p"}])
    results = Results(tmp_path)
    row = results.summary.iloc[0]
    read = results.config if name == "config.yaml" else results.requests
    with pytest.raises(KvbenchError, match=f"{name} does not exist: only the summary was kept; run the experiment"):
        read(row)
    (tmp_path / "points" / "p").mkdir(parents=True)
    with pytest.raises(KvbenchError, match=f"{name} does not exist; delete .*/p and run the same command again"):
        read(row)
