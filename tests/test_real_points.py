"""Real runs through the command line: what a user types, what comes back, what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="real runs need make install EXTRAS=dev,models")

from kvbench.app import main

TINY = [
    "runner=cpu",
    "model=tiny_llama",
    "workload=fixed",
    "workload/arrivals=all_at_once",
    "workload.num_requests=6",
    "workload.lengths.prompt_len=9",
    "workload.lengths.output_len=7",
    "runner.attention=reference",
    "kv_cache_seqs=2",
]


@pytest.mark.parametrize("system", ["vllm", "orca_max", "fastertransformer"])
def test_a_real_point_leaves_the_same_files_as_a_simulated_one(system: str, tmp_path: Path) -> None:
    assert main([*TINY, f"system={system}", f"results_dir={tmp_path}"]) == 0
    with (tmp_path / "adhoc" / "summary.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row["device"].startswith("cpu, ")
    assert (row["runner"], row["hardware"], row["costs"], row["num_slots"]) == ("cpu", "local", "", "2048")
    assert float(row["throughput_tok_per_s"]) > 0
    folder = tmp_path / "adhoc" / "points" / row["point"]
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["device"] == row["device"]
    assert manifest["capacity"]["weights_bytes"] == 623_232 * 4
    assert (folder / "steps.parquet").is_file()


def test_nothing_in_the_terminal_calls_a_measured_point_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "runner.num_threads=1", f"results_dir={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "cpu, 1 thread." in shown
    assert "measured_s" in shown
    assert "simulated" not in shown


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["runner.device=cuda"], "runner.device=cuda"),
        (["runner.attention=flash"], "runner.attention=flash"),
        (["runner.sampling.temperature=-1"], "temperature=-1"),
        (["+runner.sampling.n=2"], "n=2"),
        (["model=opt_13b"], "opt_13b"),
        (["model.dtype=float8"], "float8"),
        (["kv_cache_seqs=0"], "kv_cache_seqs=0"),
        (["kv_cache_bytes=1e6"], "give one of them"),
        (["runner.threads=2"], "runner.threads"),
    ],
)
def test_bad_options_are_told_in_two_lines(
    overrides: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *overrides, f"results_dir={tmp_path}"]) != 0
    error = capsys.readouterr().err.strip().splitlines()
    assert named in " ".join(error)
    assert len([line for line in error if "it/s" not in line and "point" not in line]) <= 2
    assert "Traceback" not in " ".join(error)


def test_costs_are_refused_where_a_clock_measures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*TINY, "costs=fastertransformer", f"results_dir={tmp_path}"]) == 2
    assert "costs=fastertransformer prices simulated runs" in capsys.readouterr().err
