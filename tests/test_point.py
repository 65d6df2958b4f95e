"""A point's identity, its parts and its folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import grimp
import pytest

from kvbench.composition import Composer, parse
from kvbench.core import KvbenchError
from kvbench.folder import clean_up, finished_summary, provenance
from kvbench.parts import build
from kvbench.point import NO_INFLUENCE, PACKAGE, Point, identify, sources_digest
from kvbench.records import read_parquet
from kvbench.results import POINT_COLUMNS
from kvbench.run import Outcome, PointRun, run

Config = dict[str, Any]


@pytest.fixture
def config(compose: Composer) -> Callable[..., Config]:
    def resolve(*overrides: str) -> Config:
        (settings,) = parse(["workload=fixed", "workload.num_requests=20", *overrides], sweep=False)
        return deepcopy(compose.resolve(settings).point)

    return resolve


def task(config: Config, folder: Path, *, keeps_steps: bool = True) -> PointRun:
    inputs = build(config).workload.inputs()
    return PointRun(identify(config, inputs), folder, keeps_steps, provenance(None))


def finished(outcome: Outcome) -> dict[str, Any]:
    assert outcome.error is None
    assert outcome.summary is not None
    return outcome.summary


def test_a_key_identifies_what_decides_the_numbers(config: Callable[..., Config]) -> None:
    base = identify(config(), {"file": "sha256:1"})
    assert identify(config(), {"file": "sha256:1"}).key == base.key
    for other in (
        identify(config("seed=1"), {"file": "sha256:1"}),
        identify(config("allocator.block_size=8"), {"file": "sha256:1"}),
        identify(config("system=vllm", "reservation=max"), {"file": "sha256:1"}),
        identify(config("costs.a_ms=1"), {"file": "sha256:1"}),
        identify(config("measure_from_s=1"), {"file": "sha256:1"}),
        identify(config(), {"file": "sha256:2"}),
        identify(config(), {"file": "absent: a histogram"}),
    ):
        assert other.key != base.key


def test_swap_space_becomes_the_host_pool(config: Callable[..., Config]) -> None:
    """A simulated run's is as large as its pool, a real one's no larger than 4 GiB; an allocator may have none."""
    local = ["runner=cpu", "model=opt_13b", "hardware.gpu_memory_bytes=1000000000000"]
    for overrides, host_bytes in (
        ([], 15_728 * 819_200),  # Table 1 of the paper
        (["swap_space_bytes=1e9"], 1220 * 819_200),
        (["swap_space_bytes=0"], 0),
        (["system=orca_max", "swap_space_bytes=1e9"], 0),
        ([*local, "kv_cache_bytes=8e9"], 2**32 // 1_638_400 * 1_638_400),
        ([*local, "kv_cache_bytes=3e9"], 3 * 10**9 // 1_638_400 * 1_638_400),
        ([*local, "kv_cache_bytes=3e9", "swap_space_bytes=9e9"], 9 * 10**9 // 1_638_400 * 1_638_400),
    ):
        parts = build(config(*overrides))
        allocator, capacity = parts.scheduler.allocator, parts.capacity
        assert capacity.swap_space_bytes == host_bytes
        assert allocator.host_slots == host_bytes // capacity.bytes_per_slot
    for overrides, why in (
        (["swap_space_bytes=-1"], "swap_space_bytes=-1"),
        (["swap_space_bytes=100"], r"swap_space_bytes=100 holds no block; give 13107200 \(one block\) or more, or 0"),
        (["swap_space_bytes=0", "scheduler.restore=swap"], "swap_space_bytes= of a block or more"),
        (["+allocator.host_slots=10"], r"allocator\.host_slots is set by kvbench itself"),
    ):
        with pytest.raises(KvbenchError, match=why):
            build(config(*overrides))


def test_what_finds_no_room_in_the_host_pool_is_computed_again(config: Callable[..., Config], tmp_path: Path) -> None:
    overrides = ["workload.request_rate=1000", "kv_cache_bytes=4e8", "scheduler.restore=swap", "repeats=1"]
    overrides += ["workload.lengths.prompt_len=100", "workload.lengths.output_len=100"]
    rows = [
        finished(run(task(config(*overrides, f"swap_space_bytes={size}"), tmp_path))) for size in ("null", 3e8, 1.2e8)
    ]
    assert [row["num_requests"] - row["num_rejected"] for row in rows] == 3 * [20]
    assert rows[0]["recomputed_tokens"] == 0 < rows[0]["swapped_out_bytes"]
    assert 0 < rows[2]["swapped_out_bytes"] < rows[0]["swapped_out_bytes"]
    assert rows[2]["recomputed_tokens"] > 0


def test_a_key_does_not_depend_on_where_things_lie(config: Callable[..., Config]) -> None:
    base = identify(config("workload=sharegpt"), {})
    for overrides in (["records=summary"], ["data_dir=elsewhere"], ["name=x"], ["executor=serial"], ["results_dir=y"]):
        assert identify(config("workload=sharegpt", *overrides), {}).key == base.key


def test_a_folder_says_what_it_is(config: Callable[..., Config]) -> None:
    point = identify(config("system=vllm", "reservation=max", "seed=3"), {})
    assert point.folder == f"vllm_reservation_max-opt_13b-fixed-1-seed3-{point.key[:8]}"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    copy = tmp_path / "kvbench"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def test_changed_sources_change_the_key(package: Path) -> None:
    before = sources_digest(package)
    for changed in ("schedulers/iteration_level.py", "metrics.py", "workloads/histograms.py", "core.py"):
        sources_digest.cache_clear()
        (package / changed).write_text((package / changed).read_text() + "\n")
        after = sources_digest(package)
        assert after != before
        before = after


def test_sources_that_cannot_matter_do_not_change_the_key(package: Path) -> None:
    before = sources_digest(package)
    for changed in ("app.py", "results.py", "figures/style.py", "paper/points.yaml"):
        assert Path(changed).parts[0] in NO_INFLUENCE
        (package / changed).write_text((package / changed).read_text() + "\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "core.cpython-311.pyc").write_text("")
    (package / "__pycache__" / "cpu.attend-1.py311.nbi").write_text("")
    sources_digest.cache_clear()
    assert sources_digest(package) == before


def test_the_sources_of_numbers_are_those_that_a_run_can_reach() -> None:
    graph = grimp.build_graph("kvbench", cache_dir=None)
    targets = {
        match[1]
        for path in (PACKAGE.parent / "conf").rglob("*.yaml")
        for match in re.finditer(r"\b(kvbench(?:\.\w+)+)\.\w+", path.read_text(encoding="utf-8"))
    }
    roots = {"kvbench.run", *(name for name in targets if name in graph.modules)}
    reached = {
        name.split(".")[1] for root in roots for name in (root, *graph.find_upstream_modules(root)) if "." in name
    }
    modules = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert set(NO_INFLUENCE) < modules
    without = {name for name in modules - set(NO_INFLUENCE) if name.removesuffix(".py") not in reached}
    assert without == {"__init__.py"}


def test_a_user_s_own_part_is_one_of_the_sources(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_placement", raising=False)
    module = tmp_path / "own_placement.py"
    module.write_text("from kvbench.allocators.paged import Paged\n\n\nclass Mine(Paged):\n    pass\n")
    mine = config("allocator._target_=own_placement.Mine")
    before = identify(mine, {})
    assert build(mine).scheduler.allocator.__class__.__name__ == "Mine"
    module.write_text(module.read_text() + "# changed\n")
    assert identify(mine, {}).key != before.key


def test_a_run_leaves_its_folder(config: Callable[..., Config], tmp_path: Path) -> None:
    job = task(config(), tmp_path)
    summary = finished(run(job))
    folder = tmp_path / job.point.folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml", "manifest.json", "requests.parquet", "steps.parquet", "summary.json",
    ]  # fmt: skip
    assert tuple(summary) == POINT_COLUMNS
    assert json.loads((folder / "summary.json").read_text()).keys() == summary.keys()
    assert summary["num_requests"] == 20
    assert summary["device"] == "simulated"
    assert summary["num_slots"] == 15_728
    steps = read_parquet(folder / "steps.parquet")
    assert len(steps["end_s"]) == summary["num_iterations"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["key"] == job.point.key
    assert manifest["capacity"]["num_slots"] == 15_728
    assert manifest["capacity"]["kv_cache_bytes"] == summary["kv_cache_bytes"]
    assert {
        "inputs",
        "git_commit",
        "versions",
        "host",
        "platform",
        "device",
        "wall_s",
        "uses_true_lengths",
    } <= manifest.keys()
    assert list(tmp_path.iterdir()) == [folder]


def test_steps_are_left_out_where_they_are_not_wanted(config: Callable[..., Config], tmp_path: Path) -> None:
    job = task(config(), tmp_path, keeps_steps=False)
    finished(run(job))
    assert not (tmp_path / job.point.folder / "steps.parquet").exists()
    assert finished_summary(job.point, tmp_path, needs_steps=False) is not None
    assert finished_summary(job.point, tmp_path, needs_steps=True) is None


@pytest.mark.parametrize(
    ("system", "uses"),
    [("vllm", False), ("orca_max", False), ("orca_pow2", True), ("orca_oracle", True), ("fastertransformer", True)],
)
def test_use_of_true_lengths_is_recorded(
    config: Callable[..., Config], tmp_path: Path, system: str, uses: bool
) -> None:
    job = task(config(f"system={system}"), tmp_path)
    assert finished(run(job))["uses_true_lengths"] is uses
    assert json.loads((tmp_path / job.point.folder / "manifest.json").read_text())["uses_true_lengths"] is uses


def test_a_finished_point_answers_for_its_own_key_only(config: Callable[..., Config], tmp_path: Path) -> None:
    job = task(config(), tmp_path)
    summary = finished(run(job))
    found = finished_summary(job.point, tmp_path, needs_steps=True)
    assert found is not None
    assert found == json.loads(json.dumps(summary))
    other = Point(job.point.config, job.point.inputs, job.point.key[:8] + "0" * 56)
    assert other.folder == job.point.folder
    assert finished_summary(other, tmp_path, needs_steps=True) is None
    (tmp_path / job.point.folder / "summary.json").write_text("{")
    assert finished_summary(job.point, tmp_path, needs_steps=True) is None


def test_a_point_whose_tables_were_cut_is_not_finished(config: Callable[..., Config], tmp_path: Path) -> None:
    job = task(config(), tmp_path)
    finished(run(job))
    for name in ("requests.parquet", "steps.parquet"):
        whole = (tmp_path / job.point.folder / name).read_bytes()
        assert finished_summary(job.point, tmp_path, needs_steps=True) is not None
        (tmp_path / job.point.folder / name).write_bytes(whole[:-10])
        assert finished_summary(job.point, tmp_path, needs_steps=True) is None
        (tmp_path / job.point.folder / name).write_bytes(whole)


def test_a_window_after_the_end_is_refused(config: Callable[..., Config], tmp_path: Path) -> None:
    assert "measure_from_s=1e+06 is after the last iteration" in str(
        run(task(config("measure_from_s=1e6"), tmp_path)).error
    )


def test_two_runs_agree_apart_from_the_wall(config: Callable[..., Config], tmp_path: Path) -> None:
    one, two = (finished(run(task(config(), tmp_path / name))) for name in "ab")
    assert {**one, "wall_s": 0} == {**two, "wall_s": 0}


def test_a_mistake_leaves_an_error_and_a_later_success_replaces_it(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n0,5,0\n")
    job = task(config("workload=trace", f"workload.path={trace}"), tmp_path / "points")
    outcome = run(job)
    assert outcome.summary is None
    assert outcome.error is not None
    assert "output" in outcome.error
    assert not outcome.is_bug
    folder = tmp_path / "points" / job.point.folder
    assert json.loads((folder / "error.json").read_text()) == {"error": outcome.error, "traceback": None}
    assert finished_summary(job.point, tmp_path / "points", needs_steps=False) is None
    trace.write_text("arrival,prompt,output\n0,5,1\n")
    assert "changed while the command ran" in str(run(job).error)
    again = task(job.point.config, tmp_path / "points")
    assert again.point.key != job.point.key
    finished(run(again))


def test_a_bug_leaves_its_traceback(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.run.serve", lambda *_: 1 // 0)
    job = task(config(), tmp_path)
    outcome = run(job)
    assert outcome.is_bug
    assert outcome.error == "ZeroDivisionError: integer division or modulo by zero"
    error = json.loads((tmp_path / job.point.folder / "error.json").read_text())
    assert "Traceback" in error["traceback"]
    monkeypatch.undo()
    finished(run(job))
    assert not (tmp_path / job.point.folder / "error.json").exists()


def test_requests_that_never_fit_are_counted(config: Callable[..., Config], tmp_path: Path) -> None:
    job = task(config(f"kv_cache_bytes={100 * 819_200}"), tmp_path)
    assert finished(run(job))["num_rejected"] == 20
    assert json.loads((tmp_path / job.point.folder / "manifest.json").read_text())["rejections"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["allocator.block_size=0"], "block_size=0"),
        (["system=orca_max", "reservation=on_demand"], "on_demand does not exist"),
        (["workload.request_rate=-1"], "request_rate=-1"),
        (["+runner.speed=2"], "runner.speed does not exist"),
        (["+runner.costs=2"], "runner.costs is set by kvbench itself"),
        (["+costs.z_ms=2"], "costs.z_ms does not exist"),
    ],
)
def test_parts_refuse_what_they_do_not_have(config: Callable[..., Config], overrides: list[str], words: str) -> None:
    with pytest.raises(KvbenchError, match=words.replace(".", r"\.")):
        build(config(*overrides))


def test_the_kernel_s_block_size_is_that_of_a_block_table(config: Callable[..., Config], tmp_path: Path) -> None:
    small, usual = (
        finished(run(task(config(f"allocator.block_size={size}"), tmp_path)))["simulated_s"] for size in (1, 16)
    )
    assert small > usual
    first_fit, buddy = (
        finished(run(task(config("system=orca_max", f"allocator={allocator}"), tmp_path)))["simulated_s"]
        for allocator in ("first_fit", "buddy")
    )
    assert first_fit == buddy


def test_what_a_dead_process_left_is_cleaned_up(tmp_path: Path) -> None:
    dead = tmp_path / ".p-12345678.999999999.tmp"
    alive = tmp_path / f".p-12345678.{os.getpid()}.tmp"
    kept = tmp_path / "p-12345678"
    for folder in (dead, alive, kept):
        folder.mkdir()
    clean_up(tmp_path)
    assert sorted(tmp_path.iterdir()) == [alive, kept]
