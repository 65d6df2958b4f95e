"""The kernel benchmark on a CPU, and its figure from times that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvbench.figures import fig_kernel_overhead
from kvbench.figures.fig_kernel_overhead import ratio
from kvbench.figures.style import save
from kvbench.paper.claims import Verdict
from kvbench.records import write_parquet
from kvbench.results import Results
from kvbench.runners.kernel_benchmark import NUM_WARM_UPS, OPERATIONS, Size, order, times
from tests.extras import NEEDS_MODELS
from tests.synthetic_results import Row, write_results

NUM_ROUNDS = NUM_WARM_UPS + 9
FACTORS = {"contiguous": 1.0, "identity": 1.01, "shuffled": 1.03, "naive": 1.22}
COPY_BYTES_PER_S = 4e12


def synthetic(folder: Path, device: str = "NVIDIA X", slower: float = 1.0) -> Results:
    """A GPU whose contiguous kernel reaches 90 % of its copies; the smaller a block, the slower."""
    rows: list[Row] = []
    steps = []
    rng = np.random.default_rng(0)
    cases = [("block_size", 64, 2048, 2**i) for i in range(8)]
    cases += [("context", 131072 // context, context, 16) for context in (64, 256, 1024, 4096, 16384, 65536)]
    cases += [("batch", batch, 2048, 16) for batch in (1, 4, 16, 256)]
    for heads in (40, 10):
        for panel, batch, context, block_size in cases:
            config = {
                "seed": 3,
                "model": {
                    "name": "llama_13b", "family": "llama", "num_layers": 1, "hidden_size": 5120, "num_heads": 40,
                    "num_kv_heads": heads, "head_dim": 128, "ffn_size": 1, "vocab_size": 1, "num_parameters": 0,
                    "max_model_len": 65591, "dtype": "bfloat16",
                },
                "runner": {"batch": batch, "rotated_bytes": 4e9},
                "allocator": {"block_size": block_size},
            }  # fmt: skip
            size = Size.of({**config, "workload": {"lengths": {"prompt_len": context}}})
            contiguous = size.launch_bytes / (0.9 * COPY_BYTES_PER_S) + 3e-6
            seconds = {"copy": 2 * size.copied_bytes / COPY_BYTES_PER_S}
            for name, factor in FACTORS.items():
                small = 0.3 / block_size if name != "contiguous" else 0.0
                seconds[name] = contiguous * (factor + small) * (slower if name == "shuffled" else 1.0)
            rounds = [[seconds[OPERATIONS[i]] for i in order(3, turn)] for turn in range(NUM_ROUNDS)]
            noisy = np.array(rounds) * rng.normal(1.0, 0.002, (NUM_ROUNDS, len(OPERATIONS)))
            noisy[:NUM_WARM_UPS] *= 100  # the warm-up does not count
            steps.append(noisy.ravel())
            rows.append(
                {
                    "panel": panel, "runner": "kernels", "device": device, "block_size": block_size,
                    "num_iterations": 1, "config": config, "options": {"lengths": {"prompt_len": context}},
                }
            )  # fmt: skip
    results = write_results(folder, rows)
    for (_, row), seconds_of in zip(results.summary.iterrows(), steps, strict=True):
        write_parquet(results.folder(row) / "steps.parquet", {"seconds": seconds_of})
    return results


def test_the_figure_and_its_verdicts(tmp_path: Path) -> None:
    results = synthetic(tmp_path)
    figures = fig_kernel_overhead.draw(results)
    assert [path.suffix for path in save(figures["fig_kernel_overhead"], tmp_path, "drawn")] == [".pdf", ".svg", ".png"]
    assert "1.049" in (fig_kernel_overhead.table(results) or "")  # blocks of 16: 1.03 + 0.3 / 16
    paper, *own = fig_kernel_overhead.claims(results)
    assert (paper.figure, paper.verdict) == ("Fig. 18(a)", Verdict.NOT_COMPARABLE)
    assert paper.measured == pytest.approx(1.22 + 0.3 / 16, rel=0.01)
    assert [claim.verdict for claim in own] == [Verdict.REPRODUCED] * 3
    assert own[2].measured == pytest.approx(0.9 / (1.03 + 0.3 / 16), rel=0.02)


def test_a_slower_kernel_misses_the_bars(tmp_path: Path) -> None:
    _, *own = fig_kernel_overhead.claims(synthetic(tmp_path, slower=1.2))
    assert [claim.verdict for claim in own] == [Verdict.NOT_REPRODUCED] * 3


def test_a_cpu_s_times_decide_nothing(tmp_path: Path) -> None:
    rows = fig_kernel_overhead.claims(synthetic(tmp_path, device="cpu, 2 threads"))
    assert {claim.verdict for claim in rows} == {Verdict.NOT_COMPARABLE}


def test_intervals_cover_the_ratio() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(40):
        found = ratio(rng.normal(1.1, 0.05, 15), rng.normal(1.0, 0.05, 15))
        assert found.low <= found.value <= found.high
        inside += found.low <= 1.1 <= found.high
    assert 32 <= inside <= 40


def test_operations_are_told_apart_whatever_their_order() -> None:
    seconds = np.array([[float(index) for index in order(5, turn)] for turn in range(NUM_ROUNDS)]).ravel()
    found = times({"seconds": seconds}, 5)
    assert {name: set(values.tolist()) for name, values in found.items()} == {
        name: {float(index)} for index, name in enumerate(OPERATIONS)
    }
    assert len({tuple(order(5, turn).tolist()) for turn in range(NUM_ROUNDS)}) > 3


@pytest.mark.parametrize(("num_kv_heads", "block_size", "dtype"), [(4, 16, "float32"), (2, 1, "bfloat16")])
def test_the_benchmark_runs_on_a_cpu(num_kv_heads: int, block_size: int, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    from kvbench.app import main

    overrides = [
        "runner=kernels", "runner.device=cpu", "hardware=local", "runner.usable_by=null", "runner.batch=3",
        "runner.rotated_bytes=1e5", "model=tiny_llama", f"model.dtype={dtype}", f"model.num_kv_heads={num_kv_heads}",
        f"allocator.block_size={block_size}", "workload=fixed", "workload/arrivals=all_at_once",
        "workload.num_requests=1", "workload.lengths.prompt_len=50", "workload.lengths.output_len=25",
        "kv_cache_seqs=2", f"results_dir={tmp_path}",
    ]  # fmt: skip
    assert main(overrides) == 0
    results = Results(tmp_path / "adhoc")
    (point,) = fig_kernel_overhead.timed(results)
    assert point.kind == ("MHA" if num_kv_heads == 4 else "GQA")
    assert all((seconds > 0).all() and len(seconds) == 3 for seconds in point.seconds.values())


def test_launches_that_a_cache_would_serve_are_not_timed() -> None:
    """The cache of a GPU that has just run the same launch: 36 % off in one project, without notice in others."""
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    import torch

    from kvbench.core import KvbenchError
    from kvbench.runners.device import Cpu
    from kvbench.runners.kernel_benchmark import KernelBenchmark

    class Cached(Cpu):
        def cache_bytes(self) -> int:
            return 2500

    sizes = {rotated: Size(2, 9, 4, 2, 16, 4, 4, rotated) for rotated in (9e3, 1e4)}
    with pytest.raises(KvbenchError, match="served by the GPU's cache of 2500; raise runner"):
        KernelBenchmark(sizes[9e3], torch.float32, Cached(), 0)
    KernelBenchmark(sizes[1e4], torch.float32, Cached(), 0)


def test_the_experiment_rotates_over_more_than_the_caches_of_today_s_gpus(tmp_path: Path) -> None:
    for point in fig_kernel_overhead.timed(synthetic(tmp_path)):
        assert point.size.num_layers * point.size.kv_bytes >= 4 * 126e6  # L2 of a B200
        assert point.size.copied_bytes >= 4 * 126e6


def test_kernels_that_differ_are_not_timed() -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    import torch

    from kvbench.core import KvbenchError
    from kvbench.runners.device import Cpu
    from kvbench.runners.kernel_benchmark import KernelBenchmark

    benchmark = KernelBenchmark(Size(2, 9, 4, 2, 16, 4, 4, 1e4), torch.float32, Cpu(), 0)
    benchmark.check()
    benchmark.options["identity"]["table"][0, 1] += 1
    with pytest.raises(KvbenchError, match="paged and contiguous attention differ"):
        benchmark.check()
