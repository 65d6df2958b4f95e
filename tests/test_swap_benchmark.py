"""Fig. 19 (a) measured on this machine: what is moved, what is timed, and the figure of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.figures import fig_swap_microbenchmark as figure
from kvbench.paper.claims import Claim, Verdict
from kvbench.records import write_parquet
from kvbench.results import Results
from kvbench.runners.swap_benchmark import NUM_WARM_UPS, OPERATIONS, medians_ms
from tests.drawn import assert_nothing_is_cut, texts
from tests.extras import NEEDS_MODELS
from tests.synthetic_results import Row, price_rows, write_results

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def results(folder: Path, recompute_ms: list[float], **values: Any) -> Results:
    """Measured points: swapping a block takes 0.01 ms each way, and 3 ms out and 2 ms in on top."""
    common = {"runner": "cpu", "device": "cpu, 2 threads", "costs": None, "model": "opt_125m", "hardware": "local"}
    rows: list[Row] = [{**common, "block_size": size, "workload": "fixed", **values} for size in SIZES]
    found = write_results(folder, rows)
    for (_, row), size, milliseconds in zip(found.summary.iterrows(), SIZES, recompute_ms, strict=True):
        turn = [milliseconds, 3 + 2.56 / size, 2 + 2.56 / size]
        seconds = np.array([[1e3] * 3] * NUM_WARM_UPS + [turn, [9e3] * 3, turn]) / 1e3
        write_parquet(found.folder(row) / "steps.parquet", {"seconds": seconds.reshape(-1)})
    return found


def measured(found: Results) -> list[Claim]:
    return [claim for claim in figure.claims(found) if claim.figure == "none"]


def test_medians_are_of_the_turns_after_the_warm_ups() -> None:
    turns = np.array([[50.0, 60.0, 70.0]] * NUM_WARM_UPS + [[1.0, 2.0, 3.0], [9.0, 9.0, 9.0], [2.0, 3.0, 4.0]])
    assert medians_ms({"seconds": turns.reshape(-1)}) == {"recompute": 2e3, "swap_out": 3e3, "swap_in": 4e3}


def test_what_was_measured_has_a_panel_of_its_own(tmp_path: Path) -> None:
    found = results(tmp_path, [40.0] * len(SIZES))
    drawn = figure.draw(found)["fig_swap_microbenchmark"]
    assert_nothing_is_cut(drawn)
    assert len(drawn.axes) == 2
    said = " ".join(text.get_text() for text in texts(drawn)).replace("\n", " ")
    assert "opt_125m, measured on cpu, 2 threads" in said
    assert "imulated" not in said
    table = figure.table(found) or ""
    assert table.startswith("Milliseconds; opt_125m, measured on cpu, 2 threads")
    assert table.splitlines()[3].split() == ["1", "40", "4.56", "5.56", "10.1"]
    priced = figure.draw(write_results(tmp_path / "priced", price_rows()))["fig_swap_microbenchmark"]
    assert len(priced.axes) == 1


def test_expectations_are_judged_where_it_was_measured(tmp_path: Path) -> None:
    flat, gain = measured(results(tmp_path / "flat", [40.0, 32.0] + [36.0] * 7))
    assert [flat.measured, gain.measured] == pytest.approx([0.8, 10.12 / 5.02])
    assert flat.verdict is gain.verdict is Verdict.REPRODUCED
    steep, _ = measured(results(tmp_path / "steep", [40.0, 29.0] + [36.0] * 7))
    assert steep.verdict is Verdict.NOT_REPRODUCED
    other = measured(results(tmp_path / "other", [40.0] * 9, model="tiny_llama"))
    assert {claim.verdict for claim in other} == {Verdict.NOT_COMPARABLE}
    assert not measured(write_results(tmp_path / "priced", price_rows()))


def test_a_real_run_leaves_times_of_every_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    from kvbench.app import main

    typed = ["runner=cpu", "model=tiny_llama", "allocator.block_size=8", "runner.num_threads=1"]
    assert main(["+experiment=fig_swap_microbenchmark", *typed, f"results_dir={tmp_path}"]) == 0
    assert "tiny_llama, measured on cpu, 1 thread" in capsys.readouterr().out
    found = Results(tmp_path / "fig_swap_microbenchmark")
    assert list(figure.measured(found)["recompute"]) == [8]
    assert (found.path / "fig_swap_microbenchmark.png").is_file()
    steps = found.steps(found.summary.iloc[0])
    assert len(steps["seconds"]) == 13 * len(OPERATIONS)


def test_what_is_moved_out_and_in_is_what_was_computed() -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    from kvbench.allocators.paged import Paged
    from kvbench.attention import cpu
    from kvbench.cache import KVCache
    from kvbench.core import Batch, Request, Sequence
    from kvbench.runners.packed_model import PackedModel
    from kvbench.runners.swap_benchmark import SwapBenchmark
    from kvbench.runners.torch import Torch, random_prompts
    from kvbench.sampling import SamplingParams
    from tests.real_runs import model

    loaded = model("tiny_llama")
    shapes, size = loaded.shapes, 4
    pool = KVCache(shapes.num_layers, 256, shapes.num_kv_heads, shapes.head_dim)
    packed = PackedModel(loaded.model, pool, cpu.attend)
    runner = Torch(packed, pool, Paged(256, size), random_prompts(shapes.vocab_size, 0), SamplingParams())
    benchmark = SwapBenchmark(runner, seed=0)
    seq = Sequence(Request(0, 0.0, 19, 5), 24, 19)  # of origin 0

    def tokens(cache: KVCache, place: str) -> Any:
        slots = [block * size + i for block in benchmark.places[place] for i in range(size)][:19]
        return cache.data[:, :, slots]

    states = []
    for step in range(5):
        result = benchmark.execute(Batch(step + 19, {seq: None}, 1, 0))
        assert result.seconds > 0
        assert list(result.finished) == ([seq] if step == 4 else [])
        states.append(tokens(benchmark.host, "host") if step % 3 == 1 else tokens(pool, "pool"))
    computed, out, back, *_ = states
    assert computed.abs().sum() > 0
    assert (out == computed).all()
    assert (back == computed).all()
