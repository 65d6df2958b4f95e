"""The live view, drawn into a string: what it says is what the run is doing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvbench.allocators.paged import Paged
from kvbench.app import main
from kvbench.clock import VirtualClock
from kvbench.core import Batch, Request, StepResult
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.live import Panel
from kvbench.reservation import OnDemand
from kvbench.schedulers.iteration_level import IterationLevel
from tests.reference_streams import StreamCosts
from tests.simulated_streams import simulated


class Wall:
    """A clock that goes on by as much at every look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.05
        return self.now_s


class Finished:
    """How many requests had finished, who ran and what was free, at every iteration."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.rows: list[tuple[int, int, int]] = []

    def watch(self, batch: Batch, result: StepResult) -> None:
        before = self.rows[-1][0] if self.rows else 0
        self.rows.append((before + len(result.finished), len(batch.running), self.ledger.newest()["token_states"]))


def run(console: Console, num_requests: int = 40) -> tuple[Engine, Finished]:
    allocator = Paged(400, 16)
    ledger = Ledger(allocator)
    finished = Finished(ledger)
    scheduler = IterationLevel(allocator, OnDemand(), 200)
    engine = Engine(scheduler, simulated(StreamCosts()), VirtualClock(), ledger, [finished])
    requests = [Request(i, 0.02 * i, 30, 40) for i in range(num_requests)]
    requests.append(Request(num_requests, 2.0, 4000, 1))  # rejected
    with Panel(engine, len(requests), "point 1 of 2", console, Wall()):
        record = serve(engine, requests)
    assert record.steps["token_states"].tolist() == [row[2] for row in finished.rows]
    return engine, finished


def test_a_terminal_is_redrawn_with_what_happens() -> None:
    out = io.StringIO()
    _, finished = run(Console(file=out, width=80, force_terminal=True, color_system=None, legacy_windows=False))
    frames = out.getvalue().split("╭─ point 1 of 2")[1:]
    assert len(frames) > 50
    middle = frames[len(frames) // 2]
    done, running = (int(word.split()[0]) for word in middle.replace("│", "").split("\n")[2:6:3])
    assert any(row[0] == done and row[1] == running for row in finished.rows)
    tokens = int(middle.partition("token states ")[2].split()[0])
    assert tokens in {round(100 * row[2] / 400) for row in finished.rows if row[:2] == (done, running)}
    assert "throughput" in middle
    assert "simulated" in middle
    assert "41 of 41 done, 1 rejected" in frames[-1]
    assert all(len(line) <= 80 for frame in frames for line in frame.split("\n") if "\x1b" not in line)


def test_without_a_terminal_only_the_end_is_printed() -> None:
    out = io.StringIO()
    run(Console(file=out, width=80, force_terminal=False))
    assert out.getvalue().count("point 1 of 2") == 1
    assert "41 of 41 done" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_live_shows_every_point_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["-m", "workload=fixed", "workload.request_rate=1,2", "workload.duration_s=20", "executor=serial"]
    assert main([*command, "name=plain"]) == 0
    assert "point 1 of 2" not in capsys.readouterr().err
    assert main([*command, "name=live", "live=true"]) == 0
    shown = capsys.readouterr().err
    assert "point 1 of 2" in shown
    assert "point 2 of 2" in shown
    for name in ("steps.parquet", "requests.parquet"):
        plain, live = (sorted(tmp_path.glob(f"results/{folder}/points/*/{name}")) for folder in ("plain", "live"))
        assert [path.read_bytes() for path in plain] == [path.read_bytes() for path in live]
        assert len(live) == 2


class Terminal(io.StringIO):
    """Text that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("executor", ["serial", "local"])
def test_the_bar_has_rate_time_left_and_the_current_point(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    command = ["-m", "workload=fixed", "workload.request_rate=1,2", "workload.duration_s=20", f"executor={executor}"]
    assert main(command) == 0
    states = terminal.getvalue().split("\r")
    first = next(state for state in states if "0/2" in state and "vllm" in state)
    assert "vllm-opt_13b-fixed-" in first
    assert (", and 1 more" in first) == (executor == "local")
    assert any("1/2" in state and "point/s" in state.replace("s/point", "point/s") for state in states)
    assert "2/2" in states[-1]
    assert "<00:00" in states[-1]
