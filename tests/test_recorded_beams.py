"""Recorded searches: what ships, how it is replayed, and that a replay of a real run is that run."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest

from kvbench.clock import VirtualClock
from kvbench.core import Batch, KvbenchError, StepResult
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.runners.recorded_beams import PATH, RecordedBeams, load, store
from kvbench.runners.simulated import Simulated
from tests.extras import NEEDS_MODELS

MODELS = ("smollm2_135m", "stories260k")
FORKS = {2: (0.15, 0.27), 4: (0.5, 0.8), 6: (0.9, 1.4)}
"""Beams replaced in a step, as recorded elsewhere of the same models: 0.20-0.22, 0.63, 1.1-1.2."""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("width", FORKS)
def test_what_ships_is_complete(model: str, width: int) -> None:
    found, source = load(PATH)
    assert list(found) == list(MODELS)
    assert source.startswith("experiments/record_beams.py on 20")
    parents = found[model][width]
    assert parents.shape[2] == width
    assert parents.shape[0] >= 24
    assert parents.max() == width - 1
    least, most = FORKS[width]
    assert least < (parents != np.arange(width)).sum(axis=2).mean() < most
    rows = parents.reshape(-1, width)
    survivors = np.stack([(rows == beam).any(axis=1) for beam in range(width)], axis=1)
    assert (rows[survivors] == np.nonzero(survivors)[1]).all()  # those that have a continuation stay in place
    assert PATH.stat().st_size < 200_000


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two searches of three steps with two beams."""
    path = tmp_path / "small.npz"
    first, second = [[0, 0], [0, 1], [1, 1]], [[0, 1], [0, 1], [0, 0]]
    store(path, {"some_model": {2: np.array([first, second], np.uint8)}}, "a test")
    monkeypatch.setattr("kvbench.runners.recorded_beams.PATH", path)
    return path


def test_a_request_follows_one_search_and_begins_anew_at_its_end(small: Path) -> None:
    assert load(small)[1] == "a test"
    beams = RecordedBeams("some_model")
    followed = [[beams.parents(request, 2, step) for step in range(1, 8)] for request in range(4)]
    assert sorted(followed[:2], key=str) == sorted(
        [[(0, 0), None, (1, 1)] * 2 + [(0, 0)], [None, None, (0, 0)] * 2 + [None]], key=str
    )
    assert followed[2:] == followed[:2]
    orders = [[RecordedBeams("some_model", seed).parents(r, 2, 1) for r in range(2)] for seed in range(9)]
    assert orders[0] == followed[0][:1] + followed[1][:1]
    assert len(set(map(tuple, orders))) == 2


def test_what_was_not_recorded_is_refused(small: Path) -> None:
    with pytest.raises(KvbenchError, match="model=opt_13b was not recorded; choose one of some_model"):
        RecordedBeams("opt_13b")
    with pytest.raises(KvbenchError, match="beam_width=3: searches of some_model were recorded with 2 beams"):
        RecordedBeams("some_model").parents(0, 3, 1)


def test_the_same_content_gives_the_same_file(tmp_path: Path) -> None:
    found, source = load(PATH)
    store(tmp_path / "again.npz", found, source)
    assert (tmp_path / "again.npz").read_bytes() == PATH.read_bytes()


def test_a_replay_of_a_real_run_is_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches that share, copy and are swapped: who runs when, and every slot of every iteration."""
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    from kvbench.runners.torch import Torch
    from tests.real_runs import COSTS, MAX_LEN
    from tests.real_streams import run, some_requests, system

    noted: dict[tuple[int, int], Seq[int]] = {}
    execute = Torch.execute

    def noting(runner: Torch, batch: Batch) -> StepResult:
        result = execute(runner, batch)
        for seq, parents in (result.parents or {}).items():
            noted[seq.request.id, batch.step - seq.origin - seq.request.prompt_len] = parents
        return result

    class Replay:
        def parents(self, request: int, width: int, step: int) -> Seq[int] | None:
            del width
            return noted.get((request, step))

    monkeypatch.setattr(Torch, "execute", noting)
    requests = list(some_requests(4, is_beam=True))
    real, _ = run("tiny_llama", system("swap4", 3 * MAX_LEN), requests)
    scheduler = system("swap4", 3 * MAX_LEN)
    runner = Simulated(COSTS, beams=Replay())
    simulated = serve(Engine(scheduler, runner, VirtualClock(), Ledger(scheduler.allocator)), requests)
    assert real.steps["swapped_in"].sum() > 0
    assert real.steps["copied"].sum() > 0
    for name in real.steps.keys() - {"end_s", "seconds", "swap_s", "recompute_s"}:
        assert (real.steps[name] == simulated.steps[name]).all(), name
