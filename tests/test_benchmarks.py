"""The pieces of the engine's benchmark, on a model in miniature."""

from __future__ import annotations

import pytest

from tests.extras import NEEDS_MODELS

pytest.importorskip("torch", reason=NEEDS_MODELS)

from kvbench.capacity import Model
from kvbench.core import Request
from kvbench.models import dtypes
from tests.benchmarks import engine

SHAPES = Model("tiny", "llama", 2, 64, 4, 2, 16, 128, 211, 101_056, 64, "float32")
BF16 = "smollm2_135m, bf16"


def test_the_prompts_have_the_stated_number_of_tokens_and_none_is_too_long() -> None:
    lens = engine.prompt_lens()
    assert len(lens) == 128
    assert sum(lens) == 19_059
    assert 1 <= min(lens) < max(lens) <= 512
    assert [request.prompt_len for request in engine.requests(32)] == lens[:32]


def test_both_sides_generate_the_same_tokens() -> None:
    work = [Request(i, 0.0, length, 6) for i, length in enumerate((3, 17, 9))]
    outputs = [side(SHAPES, work)[1] for side in engine.SIDES.values()]
    assert outputs[0] == outputs[1]
    assert [len(outputs[0][i]) for i in range(3)] == [6, 6, 6]


def test_a_side_that_drops_a_token_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.SIDES, "engine", lambda shapes, work: (1.0, {0: [1, 2]}))
    assert engine.measure(SHAPES, "engine", [Request(0, 0.0, 3, 2)])["tokens_per_s"] == 2.0
    with pytest.raises(SystemExit, match="not every request"):
        engine.measure(SHAPES, "engine", [Request(0, 0.0, 3, 3)])


def test_overhead_is_what_the_forward_leaves_of_a_step() -> None:
    found = engine.overhead(SHAPES, batch=4, prompt_len=5, num_steps=9)
    assert 0 < found["forward_ms"] < found["step_ms"]
    assert found["runner_pct"] > 0
    assert found["engine_pct"] > 0
    shares = found["forward_ms"] / found["step_ms"] * 100 + found["runner_pct"] + found["engine_pct"]
    assert shares == pytest.approx(100, abs=30)  # medians of each, on a machine that may be busy


def test_a_case_this_cpu_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "resolve", lambda *_: "float32")
    monkeypatch.setattr(engine, "fresh", lambda *_: pytest.fail("it was run"))
    assert engine.row(BF16, repeats=1)[:2] == (BF16, "not run: this CPU has no bf16 instructions")


def test_a_row_has_medians_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"engine": [100.0, 300.0, 200.0], "generate_batch": [10.0, 60.0, 50.0]}
    peaks = iter([7.0, 0.0, 9.0, 0.0, 8.0, 0.0])
    monkeypatch.setattr(
        engine, "fresh", lambda _, side: {"tokens_per_s": rates[side].pop(0), "peak_rss_mib": next(peaks)}
    )
    assert engine.row("tiny_llama, fp32", repeats=3) == ("tiny_llama, fp32", 200.0, 5.0, 8.0)
