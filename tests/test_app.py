"""The command line, from what is typed to what lies in the results folder."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from kvbench import __version__
from kvbench.app import main
from kvbench.composition import CONF, groups
from kvbench.results import Results

ROOT = CONF.parent
FAST = ["workload=fixed", "workload.num_requests=5", "executor=serial"]


pytestmark = pytest.mark.usefixtures("elsewhere")


def said(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must succeed; returns what it prints."""
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def start(*command: str, package: Path | None = None, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start kvbench in a process group of its own; ``package`` is run in place of the one under test."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvbench", *command],
        cwd=cwd,
        env=os.environ if package is None else os.environ | {"PYTHONPATH": str(package)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,  # noqa: PLW1509  (no threads here)
    )


def hear_ctrl_c() -> None:
    """Undo what a shell does to what it starts in the background, tests included."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def rows(folder: str) -> list[dict[str, str]]:
    """``summary.csv`` without what differs from run to run."""
    with Path(folder, "summary.csv").open(encoding="utf-8") as file:
        return [{**row, "wall_s": ""} for row in csv.DictReader(file)]


def finished(folder: str) -> list[Path]:
    return sorted(Path(folder, "points").glob("[!.]*/summary.json"))


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def workers(parent: int) -> list[psutil.Process]:
    """Worker processes of a command, without what else it starts."""
    try:
        children = psutil.Process(parent).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def test_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(["--help"], capsys)
    for options in groups().values():
        for option in options:
            assert option in text
    for key in ("results_dir", "kv_cache_bytes", "repeats", "--cfg", "-m"):
        assert key in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["--version"], capsys) == f"kvbench {__version__}\n"


@pytest.mark.parametrize("flag", [["--cfg"], ["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_prints_the_resolved_point_and_runs_nothing(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(said([*flag, "system=orca_max", *FAST], capsys))
    assert content["system"] == "orca_max"
    assert content["scheduler"]["max_num_seqs"] == 256
    assert not list(Path().iterdir())


def test_cfg_of_many_points_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "# the first of 2 points" in said(["--cfg", "-m", "system=vllm,orca_max", *FAST], capsys)


def test_a_dry_run_lists_what_is_left_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", *FAST, "workload.request_rate=1,2,3"]
    text = said([*sweep, "--dry-run"], capsys)
    assert "Points: 3, of which 0 are finished and 3 would run." in text
    assert re.search(r"\nvllm-opt_13b-fixed-2-[0-9a-f]{8} +0\.01\d\n", text)
    assert "0 s of one core, 2 s with 1 workers and their start (estimated by rules of thumb" in text
    assert not list(Path().iterdir())
    said(["-m", *FAST, "workload.request_rate=1,2"], capsys)
    text = said([*sweep, "--dry-run"], capsys)
    assert "2 are finished and 1 would run" in text
    assert "fixed-3" in text
    assert "fixed-2" not in text
    assert "(estimated from 2 finished points)" in text
    said(sweep, capsys)
    assert said([*sweep, "--dry-run"], capsys).endswith("3 are finished and 0 would run.\n")


def test_equal_memory_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["-m", "system=vllm,orca_max", *FAST, "--dry-run"], capsys).count("Memory: ") == 1


def test_intervals_by_the_bootstrap(capsys: pytest.CaptureFixture[str]) -> None:
    """Of points that are finished, too: what is shown of them is no part of their identity."""
    command = ["workload=fixed", "workload.num_requests=60", "executor=serial", "repeats=10"]
    students = said(command, capsys)
    text = said([*command, "interval=bootstrap"], capsys)
    assert "Finished before: 10 of 10 points." in text
    assert "Means and 95 % bootstrap intervals" in text
    line, other = (next(each for each in words.splitlines() if each.startswith("vllm")) for words in (text, students))
    assert line != other
    assert line.split()[:3] == other.split()[:3]  # the same mean
    assert main([*command[:-1], "repeats=9", "interval=bootstrap"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_one_of_hydra_s_launchers_runs_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", *FAST[:-1], "workload.request_rate=1,2"]
    assert "Results: results/adhoc" in said([*sweep, "hydra/launcher=basic"], capsys)
    assert len(rows("results/adhoc")) == 2
    assert main([*sweep, "hydra/launcher=none"]) == 2
    assert "hydra/launcher" in capsys.readouterr().err


def test_one_point(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(FAST, capsys)
    assert "KV cache 12.00 GiB (Table 1 of the paper): 15,728 slots" in text
    assert "All numbers below are simulated. Lengths: " in text
    assert "vllm, opt_13b on a100_40gb, fixed at 1 requests/s" in text
    assert "s/token" in text
    assert "Results: results/adhoc" in text
    assert {path.name for path in Path("results/adhoc").iterdir()} == {"points", "summary.csv"}
    assert {path.name for path in Path().iterdir()} == {"results"}  # no outputs/, no .hydra/
    assert "Finished before: 1 of 1 points." in said(FAST, capsys)


def test_rejected_requests_are_told_whatever_table_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = said([*FAST, "-m", "kv_cache_seqs=0.5,1", "workload.lengths.prompt_len=1500"], capsys)
    assert "Rejected: 5 requests of 1 of 2 points can never have their memory; they are in no latency.\n" in text
    assert "Rejected" not in said(FAST, capsys)


def test_a_sweep_prints_what_tells_its_points_apart(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(["-m", "system=vllm,orca_max", "workload.request_rate=1,2", *FAST], capsys)
    head, *lines = [line for line in text.splitlines() if line.startswith(("system", "vllm ", "orca_max "))]
    assert head.split()[:2] == ["system", "request_rate"]
    assert [line.split()[:2] for line in lines] == [
        ["vllm", "1"], ["vllm", "2"], ["orca_max", "1"], ["orca_max", "2"],
    ]  # fmt: skip
    assert "hardware" not in head
    assert len(rows("results/adhoc")) == 4


def test_a_long_table_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.app._MAX_ROWS", 1)
    assert "... and 2 more in summary.csv" in said(["-m", "workload.request_rate=1,2,3", *FAST], capsys)


def test_an_experiment_is_drawn_and_judged(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["workload.duration_s=20", "executor=serial", "name=quick"]
    text = said(["+experiment=fig_throughput", "panel=a", "system=vllm", "workload.request_rate=1", *quick], capsys)
    assert "All numbers below are simulated. Lengths: ShareGPT, drawn from the paper's histogram." in text
    folder = Path("results/quick")
    for suffix in ("pdf", "svg", "png"):
        assert (folder / f"fig_throughput.{suffix}").stat().st_size > 1000
    with (folder / "claims.csv").open(encoding="utf-8") as file:
        claims = list(csv.DictReader(file))
    assert list(claims[0]) == [
        "claim", "figure", "paper_low", "paper_high", "measured", "ci_low", "ci_high", "unit", "tolerance", "verdict",
        "note",
    ]  # fmt: skip
    assert {claim["verdict"] for claim in claims} <= {
        "reproduced",
        "not reproduced",
        "not comparable",
        "undecided",
        "not run",
    }
    assert Results(folder).summary["experiment"].tolist() == ["fig_throughput"]


def test_smoke_runs_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(["+experiment=smoke", "executor=serial", "workload.duration_s=60"], capsys)
    for system in groups()["system"]:
        assert system in text
    assert {row["system"] for row in rows("results/smoke")} == set(groups()["system"])


def test_failures_are_told_and_the_rest_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("good.csv").write_text("arrival,prompt,output\n0,5,5\n")
    Path("bad.csv").write_text("arrival,prompt,output\n0,5,0\n")
    command = ["-m", "workload=trace", "workload.path=good.csv,bad.csv", "executor=serial"]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert "bad.csv" in captured.err
    assert "Results: results/adhoc" in captured.out
    assert len(rows("results/adhoc")) == 1


def test_a_bug_in_a_point_says_where_its_traceback_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.run.serve", lambda *_: 1 // 0)
    assert main(FAST) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error
    assert "error.json" in error
    assert (Path("results/adhoc/summary.csv").read_text()).count("\n") == 1


MINE = """
from kvbench.allocators.paged import Paged

class Mine(Paged):
    def __init__(self, num_slots, spare=0):
        super().__init__(num_slots, 16)
        self.spare = spare
"""


def test_a_user_s_own_allocator_runs_also_in_workers() -> None:
    Path("my_allocator.py").write_text(MINE)
    command = [
        "-m",
        "allocator=own",
        "allocator._target_=my_allocator.Mine",
        "+allocator.spare=3",
        "workload.request_rate=1,2",
        *FAST[:2],
    ]
    process = start(*command, "executor.num_workers=2")
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert [row["allocator"] for row in rows("results/adhoc")] == ["my_allocator.Mine"] * 2
    assert rows("results/adhoc")[0]["system"] == "vllm[allocator=my_allocator.Mine,allocator.spare=3]"


def test_the_scripts_are_the_experiments() -> None:
    script = ROOT / "experiments" / "smoke.py"
    quick = ["system=vllm", "workload.duration_s=5", "executor=serial"]
    done = subprocess.run([sys.executable, script, *quick], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["experiment"] for row in rows("results/smoke")] == ["smoke", "smoke"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: what is edited meanwhile must not make a sweep start anew."""
    copy = tmp_path_factory.mktemp("clone")
    for part in ("kvbench", "conf"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


# Six points of a second or two each, so that something can happen to them.
SWEEP = ["-m", "workload.request_rate=1.5,1.51,1.52,1.53,1.54,1.55", "workload.duration_s=6000", "records=summary"]
SWEEP += ["scheduler.restore=swap"]  # not in the compiled loop, which would be done before anything can happen to it


@pytest.fixture(scope="module")
def undisturbed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The rows of the sweep when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    where = {"package": clone, "cwd": folder}
    process = start(*SWEEP, "executor=serial", f"results_dir={folder}", f"data_dir={folder}", **where)
    process.communicate(timeout=120)
    assert process.returncode == 0
    return rows(str(folder / "adhoc"))


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(clone: Path, undisturbed: list[dict[str, str]]) -> None:
    process = start(*SWEEP, "executor.num_workers=2", package=clone)
    wait_for(lambda: finished("results/adhoc"))
    workers(process.pid)[0].kill()
    _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert rows("results/adhoc") == undisturbed


@pytest.mark.slow
def test_a_killed_sweep_is_resumed(clone: Path, undisturbed: list[dict[str, str]]) -> None:
    process = start(*SWEEP, "executor.num_workers=2", package=clone)
    wait_for(lambda: finished("results/adhoc"))
    left_alone = workers(process.pid)
    process.kill()
    process.communicate()
    assert left_alone
    wait_for(lambda: not any(worker.is_running() for worker in left_alone), 10)
    kept = {path: path.stat().st_mtime_ns for path in finished("results/adhoc")}
    assert 0 < len(kept) < 6
    assert not Path("results/adhoc/summary.csv").exists()
    again = start(*SWEEP, "executor.num_workers=2", package=clone)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0
    assert f"Finished before: {len(kept)} of 6 points." in output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert rows("results/adhoc") == undisturbed
    assert not list(Path("results/adhoc/points").glob(".*"))


@pytest.mark.slow
def test_ctrl_c_stops_cleanly(clone: Path) -> None:
    process = start(*SWEEP, "executor.num_workers=2", package=clone)
    wait_for(lambda: finished("results/adhoc"))
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error.startswith("kvbench: interrupted with ")
    assert error.rstrip().endswith("of 6 points finished; the same command resumes")
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_an_interrupted_search_goes_on_where_it_was(clone: Path) -> None:
    """Five searches of a second each; those that are done are not searched again."""
    search = ["+experiment=capacity", "system=vllm", "scheduler.restore=swap", "workload.duration_s=200", "repeats=5"]
    process = start(*search, "executor.num_workers=2", package=clone)
    wait_for(lambda: finished("results/capacity"))
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert re.fullmatch(r"kvbench: interrupted with \d of 5 points finished; the same command resumes\n", error)
    kept = {path: path.stat().st_mtime_ns for path in finished("results/capacity")}
    assert 0 < len(kept) < 5
    output, error = start(*search, "executor=serial", package=clone).communicate(timeout=120)
    assert error == ""
    assert f"Finished before: {len(kept)} of 5 points." in output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert [float(row["capacity_req_per_s"]) > 0 for row in rows("results/capacity")] == [True] * 5


def test_changed_sources_are_never_answered_from_old_results(clone: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(clone, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def run() -> str:
        output, error = start(*FAST, package=copy).communicate(timeout=60)
        assert error == ""
        return output

    assert "Finished before" not in run()
    assert "Finished before: 1 of 1" in run()
    source = copy / "kvbench" / "runners" / "simulated.py"
    source.write_text(source.read_text(encoding="utf-8").replace("ms / 1e3", "ms / 1e2"), encoding="utf-8")
    assert "Finished before" not in run()
    assert len(finished("results/adhoc")) == 2


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_meanings_are_wrapped_between_words_on_a_terminal(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["workload=fixed", "workload.num_requests=3", "executor=serial", f"results_dir={tmp_path}"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(command) == 0
    table = capsys.readouterr().out.partition("metric ")[2].partition("Results:")[0]
    assert max(map(len, table.splitlines())) <= max(columns, 70)
    assert table.split() == plain.partition("metric ")[2].partition("Results:")[0].split()  # not a word is cut
