"""The script for a few minutes of a GPU, run on a CPU with tiny shapes: every part leaves its results."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.extras import NEEDS_MODELS

pytest.importorskip("torch", reason=NEEDS_MODELS)

from kvbench.calibrate import costs_file
from kvbench.core import KvbenchError

SCRIPT = Path(__file__).resolve().parent.parent / "experiments" / "gpu_check.py"


def run(arguments: list[str], path: Path | None = None, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_dry_run_leaves_the_results_of_every_part(tmp_path: Path) -> None:
    out, archive = tmp_path / "found", tmp_path / "found.tar.gz"
    arguments = ["--device", "cpu", "--tiny", "--minutes", "30", "--out", str(out), "--archive", str(archive)]
    done = run(arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "gpu_check.json").read_text(encoding="utf-8"))
    parts = report["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(
        ("kernels", "engine", "benchmark", "offline", "calibration", "fidelity"), "done"
    )
    assert parts["kernels"]["cases"] == parts["kernels"]["of"] == 8
    assert parts["engine"]["tiny_opt, vllm"] == "4 of 4"
    assert parts["offline"]["overhead"]["step_ms"] > 0
    assert not parts["offline"]["errors"] + parts["benchmark"]["errors"]
    assert report["goals"] == {}  # a CPU's numbers meet no goal of a GPU
    for experiment, count in (("fig_kernel_overhead", 3), ("fig_offline_throughput", 5), ("fig_fidelity", 10)):
        with (out / experiment / "summary.csv").open(encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) == count
        assert (out / experiment / f"{experiment}.pdf").is_file()
        assert (out / experiment / "claims.csv").is_file()
    with tarfile.open(archive) as packed:
        assert "found/gpu_check.json" in packed.getnames()


@pytest.mark.gpu
def test_kernels_and_engine_on_this_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_MODELS)
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    done = run(["--tiny", "--minutes", "10", "--out", str(tmp_path), "--parts", "kernels", "engine"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_is_cut_says_what_it_skipped(tmp_path: Path) -> None:
    done = run(
        ["--device", "cpu", "--tiny", "--minutes", "0", "--out", str(tmp_path), "--parts", "offline", "fidelity"]
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert {part["status"] for part in report["parts"].values()} == {"skipped: no time left"}


PARTS_THAT_END_BADLY = """
import ctypes, os, subprocess, sys, threading, time
from pathlib import Path
sys.path.insert(0, {folder!r})
import gpu_check

HELPER = Path({helper!r})

def crash(report):
    report.note("kernels", {{"so far": 3}})
    ctypes.string_at(0)  # what an illegal access does to a process

def hang(report):
    report.note("engine", {{"so far": 4}})
    helper = subprocess.Popen(["sleep", "600"])
    HELPER.write_text(str(helper.pid))
    time.sleep(600)

def work(report):
    report.goal("a goal", 1.0, least=0.5)
    return {{"process": os.getpid()}}

gpu_check.PARTS |= {{"kernels": crash, "engine": hang, "benchmark": work, "offline": work}}

def time_passes():
    while not HELPER.exists():
        time.sleep(0.1)
    gpu_check.SHARES["engine"] = 0.0

if __name__ == "__main__":
    threading.Thread(target=time_passes, daemon=True).start()
    sys.exit(gpu_check.main())
"""


def test_a_part_that_dies_or_hangs_takes_no_other_with_it(tmp_path: Path) -> None:
    script, out, helper = tmp_path / "script.py", tmp_path / "out", tmp_path / "helper"
    script.write_text(PARTS_THAT_END_BADLY.format(folder=str(SCRIPT.parent), helper=str(helper)))
    arguments = ["--device", "cpu", "--tiny", "--minutes", "30", "--out", str(out), "--parts"]
    done = run([*arguments, "kernels", "engine", "benchmark", "offline", "fidelity"], script=script)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((out / "gpu_check.json").read_text(encoding="utf-8"))
    kernels, engine, *worked = (report["parts"][name] for name in ("kernels", "engine", "benchmark", "offline"))
    assert kernels.items() >= {"so far": 3, "status": "failed", "error": "its process ended by SIGSEGV"}.items()
    late = "killed at the end of its share of the time"
    assert engine.items() >= {"so far": 4, "status": "failed", "error": late}.items()
    assert [part["status"] for part in worked] == ["done", "done"]
    assert worked[0]["process"] != worked[1]["process"]
    assert report["parts"]["fidelity"]["status"] == "skipped: there are no costs without calibration"
    assert report["goals"]["a goal"]["met"]
    assert report["environment"]["torch"]
    assert "failed: kernels, engine" in done.stdout
    with pytest.raises(ProcessLookupError):  # what a part has started ends with it
        os.kill(int(helper.read_text()), 0)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """Without Hydra, and without a GPU."""
    (tmp_path / "hydra").mkdir()
    (tmp_path / "hydra" / "__init__.py").write_text("raise ModuleNotFoundError('no', name='hydra')")
    done = run(["--device", "cpu", "--out", str(tmp_path / "out")], tmp_path)
    assert (done.returncode, done.stderr) == (2, "hydra is missing: see --help for what to bring\n")
    said = run(["--help"], tmp_path).stdout
    assert "pip wheel --no-deps -w wheels hydra-core==" in said
    import torch

    if not torch.cuda.is_available():
        done = run(["--out", str(tmp_path / "out")])
        assert done.returncode == 2
        assert "needs 1 GPU" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_kernels_are_held_against_the_bars_where_these_are_about_them(tmp_path: Path) -> None:
    """Of GQA the largest launch of the sweep over blocks reads less than 1 GB: its goals are the largest batch's."""
    from tests.test_kernel_overhead import synthetic

    folder = tmp_path / "fig_kernel_overhead"
    synthetic(folder)
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    gpu_check: Any = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = gpu_check
    spec.loader.exec_module(gpu_check)
    report = gpu_check.Report(gpu_check.Options("cuda", False, tmp_path, 8.0, [], None))
    gpu_check.kernel_goals(report)
    assert report.goals.keys() == {
        f"{what}, {kind}" for what in ("paged over contiguous", "bandwidth over a copy's") for kind in ("MHA", "GQA")
    }
    assert report.goals["paged over contiguous, GQA"]["measured"] == pytest.approx(1.03 + 0.3 / 16, rel=0.01)
    assert report.goals["bandwidth over a copy's, MHA"]["met"]
    with (folder / "summary.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with (folder / "summary.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row for row in rows if row["panel"] != "batch")
    report.goals.clear()
    gpu_check.kernel_goals(report)
    assert report.goals.keys() == {"paged over contiguous, MHA", "bandwidth over a copy's, MHA"}


def test_costs_of_a_gpu_bring_its_hardware(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    costs = {"a_ms": 6.0, "b_ms": 1e-4, "c_ms": 0.0, "p_ms": 0.05, "q_ms": 0.0}
    costs_file.store(path, "opt_13b", costs, "a test", {}, "local_gpu")
    assert costs_file.load(path)["opt_13b"]["hardware"] == "local_gpu"
    assert "override /hardware@_global_.hardware: local_gpu" in path.read_text(encoding="utf-8")
    with pytest.raises(KvbenchError, match="has costs of hardware=local_gpu; choose another --name"):
        costs_file.store(path, "opt_125m", costs, "a test", {})
