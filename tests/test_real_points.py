"""Real runs through the command line: what a user types, what comes back, what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from tests.extras import NEEDS_MODELS

pytest.importorskip("torch", reason=NEEDS_MODELS)

from kvbench.app import main
from kvbench.capacity import memory_bytes, model_of
from kvbench.core import KvbenchError
from kvbench.parts import _sized
from kvbench.runners.cpu import measure
from kvbench.runners.footprint import peak_bytes
from kvbench.sampling import SamplingParams
from tests.choices import load as load_content

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
        (["+runner.sampling.n=2"], "runner.sampling.n does not exist"),
        (["model=opt_13b"], "opt_13b"),
        (["model.dtype=float8"], "float8"),
        (["kv_cache_seqs=0"], "kv_cache_seqs=0"),
        (["kv_cache_bytes=1e6"], "give one of them"),
        (["runner.threads=2"], "runner.threads"),
        (["runner.num_threads=0"], "runner.num_threads=0"),
        (["runner.stops=maybe"], "runner.stops='maybe'"),
        (["runner=gpu"], "runner is one of cpu, cuda, kernels, simulated"),
        (["+runner.sampling.num_samples=2"], "num_samples does not exist"),
        (["workload.num_samples=2", "workload.beam_width=2"], "leave one at 1"),
        (["+runner.sampling.stop_token_ids=5"], "stop_token_ids=5 is no list"),
        (["runner.sampling.top_k=0"], "top_k=0"),
        (["runner.sampling.top_p=1.5"], "top_p=1.5"),
        (["decoding=beam"], "unknown key decoding"),
        (["model.dtype=int8"], "model.dtype='int8'"),
        (["model.dtype=float16", "runner.attention=cpu"], "it supports float32 and bfloat16"),
        (["model.family=gpt2"], "supported are opt, llama, qwen2, qwen3"),
        (["model.num_kv_heads=3"], "num_kv_heads=3"),
        (["model.weights=./nowhere"], "neither a folder"),
        (["hardware.gpu_memory_bytes=100000000"], "too much for hardware=local"),
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


@pytest.fixture
def unsized() -> Iterator[list[str]]:
    """A command whose pool is what the machine leaves; what was measured before is forgotten."""
    yield [*TINY[:-1], "scheduler.max_num_batched_tokens=256"]
    _sized.cache_clear()


def test_an_unsized_pool_is_measured(
    unsized: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = memory_bytes() // 2
    monkeypatch.setattr("kvbench.parts.usable_bytes", lambda: free)
    assert main([*unsized, f"results_dir={tmp_path}"]) == 0
    before, after = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Memory: ")]
    assert "(estimated; " in before
    assert "(measured)" in after
    with (tmp_path / "adhoc" / "summary.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    manifest = json.loads((tmp_path / "adhoc" / "points" / row["point"] / "manifest.json").read_text(encoding="utf-8"))
    capacity = manifest["capacity"]
    assert capacity["source"] == "measured"
    assert capacity["total_bytes"] == free  # not all of the machine's
    parts = ("weights_bytes", "activation_bytes", "reserve_bytes", "kv_cache_bytes")
    assert sum(capacity[part] for part in parts) == free
    assert {part: int(row[part]) for part in parts} == {part: capacity[part] for part in parts}
    assert 256 * 512 * 4 <= capacity["activation_bytes"] < 2**28  # the logits at least
    assert int(row["num_slots"]) == capacity["num_slots"] == capacity["kv_cache_bytes"] // 1024

    assert main([*unsized, f"results_dir={tmp_path}"]) == 0  # finished before, and still told
    assert after in capsys.readouterr().out


def test_activations_grow_with_the_largest_iteration(tmp_path: Path) -> None:
    tiny = model_of({"model": load_content("model", "tiny_llama")})

    def activations(num_tokens: int) -> float:
        seen = measure(tiny, num_tokens, num_tokens // 8, 0, "cpu", "cpu", SamplingParams())
        assert seen.weights_bytes == 623_232 * 4
        return seen.token_bytes * num_tokens

    assert 2 < activations(2048) / activations(512) < 8
    assert activations(20_480) == pytest.approx(10 * activations(2048), rel=0.3)  # profiled as 2560


@pytest.mark.parametrize("sized", [True, False])
def test_too_little_memory_is_refused_before_a_model_is_loaded(
    sized: bool, unsized: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("kvbench.runners.cpu._load", load)
    monkeypatch.setattr("kvbench.parts.usable_bytes", lambda: 10**9)
    assert main([*unsized, *(["kv_cache_seqs=2"] if sized else []), f"results_dir={tmp_path}"]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if "it/s" not in line and "point/s" not in line]
    assert len(error) == 2
    for word in ("tiny_llama needs", "weights 2.38 MiB", "reserve", "KV cache", "0.93 GiB", "free now", "model="):
        assert word in " ".join(error)
    assert ("lower kv_cache_bytes=" in error[1]) is sized


def test_swap_space_that_is_not_there_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.parts.usable_bytes", lambda: 10 * 2**30)
    assert main([*TINY, "swap_space_bytes=2e10", f"results_dir={tmp_path}"]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if "point/s" not in line and "it/s" not in line]
    assert len(error) == 1
    assert "swap_space_bytes=20000000000: 18.63 GiB of the host's memory" in error[0]


def test_a_system_that_does_not_tell_asks_for_the_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvbench.runners.footprint._STATUS", tmp_path / "none")
    with pytest.raises(KvbenchError, match="give the size of the KV pool"):
        peak_bytes(lambda: None)


def test_the_peak_is_what_was_touched_at_once() -> None:
    def work() -> None:
        for _ in range(3):
            np.ones(2**23)

    assert 2**26 - 2**20 < peak_bytes(work) < 2**26 + 2**24  # Linux adds up what each CPU counted some time later


def test_a_manifest_says_what_computed(tmp_path: Path) -> None:
    assert main([*TINY, "runner.num_threads=1", f"results_dir={tmp_path}"]) == 0
    (path,) = tmp_path.glob("adhoc/points/*/manifest.json")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    assert {name: manifest["versions"][name] for name in ("torch", "transformers", "numba")} == {
        name: version(name) for name in ("torch", "transformers", "numba")
    }
    assert manifest["cpu"]["num_threads"] == 1
    assert manifest["cpu"]["name"]
    assert all(isinstance(name, str) for name in manifest["cpu"]["capabilities"])


def test_costs_are_refused_where_a_clock_measures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*TINY, "costs=fastertransformer", f"results_dir={tmp_path}"]) == 2
    assert "costs=fastertransformer prices simulated runs" in capsys.readouterr().err
