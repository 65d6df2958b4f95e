"""How fast the real engine generates on this CPU, beside transformers' ``generate_batch``: ``make bench``.

Random weights, greedy, all requests at once, prompts of log-normal lengths, as many tokens each; 2 threads. Each side
serves the same requests in a fresh process that has warmed up; the sides take turns. Rates are medians over the
repeats, the ratio is the median of each turn's, and peak memory is that of the engine's whole process. All this goes
into ``results/bench/engine.csv``.

``results/bench/engine_overhead.csv`` says what a decode step of a batch of equal sequences spends outside the model's
forward: in the runner (addresses, sampling, the new tokens), and in the rest of the engine (scheduler, ledger).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvbench.allocators.paged import Paged
from kvbench.capacity import Dtype, Model
from kvbench.clock import WallClock
from kvbench.core import Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.models import dtypes
from kvbench.models.loading import load
from kvbench.reservation import OnDemand
from kvbench.runners.cpu import open_runner
from kvbench.runners.torch import Torch, random_prompts
from kvbench.sampling import SamplingParams
from kvbench.schedulers.iteration_level import IterationLevel

CONF = Path(__file__).parents[2] / "conf" / "model"
NUM_THREADS = 2
BLOCK_SIZE = 16
PROMPTS, PROMPT_TOKENS, MAX_PROMPT_LEN, SIGMA, SEED = 128, 19_059, 512, 0.75, 0
OUTPUT_LEN = 64
COLUMNS = ("case", "tokens_per_s", "ratio_to_generate_batch", "peak_rss_mib")
Outputs = dict[int, list[int]]
OVERHEAD_COLUMNS = ("case", "step_ms", "forward_ms", "runner_pct", "engine_pct")


@dataclass(frozen=True, slots=True)
class Case:
    """A model of ``conf/model/`` with random weights, and how many of the prompts it gets."""

    model: str
    dtype: Dtype
    num_requests: int

    def shapes(self) -> Model:
        """The model."""
        return replace(model(self.model), dtype=self.dtype)


CASES = {
    "tiny_llama, fp32": Case("tiny_llama", "float32", 128),
    "smollm2_135m, fp32": Case("smollm2_135m", "float32", 32),
    "smollm2_135m, bf16": Case("smollm2_135m", "bfloat16", 32),
}
OVERHEAD_CASE = "opt_125m, decode step of 64"
OVERHEAD_BATCH, OVERHEAD_PROMPT_LEN, OVERHEAD_STEPS = 64, 128, 32


def model(name: str) -> Model:
    """A file of ``conf/model/`` with random weights."""
    return replace(Model(**yaml.safe_load((CONF / f"{name}.yaml").read_text())), weights="random")


def prompt_lens() -> list[int]:
    """Log-normal lengths, cut at the longest, whose median is such that they sum to ``PROMPT_TOKENS`` exactly."""
    normal = np.random.default_rng(SEED).standard_normal(PROMPTS)

    def lens(log_median: float) -> list[int]:
        return [min(max(round(math.exp(log_median + SIGMA * z)), 1), MAX_PROMPT_LEN) for z in normal]

    low, high = 0.0, math.log(MAX_PROMPT_LEN)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(lens(middle)) >= PROMPT_TOKENS else (middle, high)
    return lens(high)


def requests(num: int) -> list[Request]:
    """The first of the requests, all there from the start, with outputs of one length."""
    return [Request(i, 0.0, length, OUTPUT_LEN) for i, length in enumerate(prompt_lens()[:num])]


def engine(shapes: Model, work: list[Request]) -> tuple[Engine, Torch]:
    """Paged, with room for all requests at once."""
    num_blocks = sum(-(-request.final_len // BLOCK_SIZE) for request in work)
    allocator = Paged((num_blocks + num_blocks // 50 + 2) * BLOCK_SIZE, BLOCK_SIZE)
    scheduler = IterationLevel(allocator, OnDemand(), shapes.max_model_len)
    runner = open_runner(shapes, allocator, SEED, "cpu", "cpu", SamplingParams(), NUM_THREADS)
    return Engine(scheduler, runner, WallClock(), Ledger(allocator)), runner


def with_engine(shapes: Model, work: list[Request]) -> tuple[float, Outputs]:
    """Seconds that ours takes, and the tokens."""
    ours, runner = engine(shapes, work)
    start = time.perf_counter()
    serve(ours, work)
    seconds = time.perf_counter() - start
    return seconds, runner.outputs


def with_generate_batch(shapes: Model, work: list[Request]) -> tuple[float, Outputs]:
    """The same of transformers, with as much room and as large steps as ours has."""
    torch.set_num_threads(NUM_THREADS)
    loaded = load(shapes, seed=SEED)
    prompt = random_prompts(shapes.vocab_size, SEED)
    prompts = [prompt(request) for request in work]
    page_size = 256
    settings = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=sum(-(-request.final_len // page_size) for request in work) + 2,
        max_batch_tokens=2560,
    )
    generate_batch: Callable[..., dict[str, Any]] = loaded.model.generate_batch  # type: ignore[assignment]

    def generate(prompts: list[list[int]], length: int) -> Outputs:
        greedy = GenerationConfig(do_sample=False, max_new_tokens=length, eos_token_id=-1, pad_token_id=0)
        outputs = generate_batch(prompts, greedy, settings, warmup=False)
        return {i: output.generated_tokens for i, output in enumerate(outputs.values())}

    generate(prompts[:2], 2)
    start = time.perf_counter()
    outputs = generate(prompts, work[0].output_len)
    return time.perf_counter() - start, outputs


SIDES = {"engine": with_engine, "generate_batch": with_generate_batch}


def measure(shapes: Model, side: str, work: list[Request]) -> dict[str, float]:
    """Run one side in this process."""
    seconds, outputs = SIDES[side](shapes, work)
    if {i: len(tokens) for i, tokens in outputs.items()} != {request.id: request.output_len for request in work}:
        raise SystemExit("not every request got all its tokens")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"tokens_per_s": sum(request.output_len for request in work) / seconds, "peak_rss_mib": peak}


def overhead(shapes: Model, batch: int, prompt_len: int, num_steps: int) -> dict[str, float]:
    """What a decode step of the whole batch takes, medians over its steps, in this process."""
    work = [Request(i, 0.0, prompt_len, num_steps + 1) for i in range(batch)]
    ours, runner = engine(shapes, work)
    steps: list[tuple[int, float, float]] = []  # number, seconds of the whole step and of the forward
    model_s, end = 0.0, time.perf_counter()
    for number, step in enumerate(ours.run(work)):
        now = time.perf_counter()
        if step.num_decodes == batch:
            steps.append((number, now - end, runner.model_s - model_s))
        model_s, end = runner.model_s, now
    executed = ours.ledger.columns()["seconds"]
    whole = statistics.median(seconds for _, seconds, _ in steps)
    forward = statistics.median(seconds for _, _, seconds in steps)
    in_runner = statistics.median(float(executed[number]) - seconds for number, _, seconds in steps)
    outside = statistics.median(seconds - float(executed[number]) for number, seconds, _ in steps)
    return {
        "step_ms": whole * 1e3,
        "forward_ms": forward * 1e3,
        "runner_pct": in_runner / whole * 100,
        "engine_pct": outside / whole * 100,
    }


def fresh(case: str, what: str) -> dict[str, float]:
    """The same in a new process."""
    command = [sys.executable, "-m", "tests.benchmarks.engine", "--case", case, "--what", what]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}, {what}: {done.stderr.strip()}")
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def row(case: str, repeats: int) -> tuple[object, ...]:
    """A row of ``engine.csv``."""
    if CASES[case].dtype == "bfloat16" and dtypes.resolve("auto") != "bfloat16":
        return (case, "not run: this CPU has no bf16 instructions", "", "")
    turns = [(fresh(case, "engine"), fresh(case, "generate_batch")) for _ in range(repeats)]
    return (
        case,
        round(statistics.median(ours["tokens_per_s"] for ours, _ in turns), 1),
        round(statistics.median(ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in turns), 2),
        round(statistics.median(ours["peak_rss_mib"] for ours, _ in turns), 1),
    )


def overhead_row(case: str, repeats: int) -> tuple[object, ...]:
    """A row of ``engine_overhead.csv``: the median of every column over the repeats."""
    runs = [fresh(case, "overhead") for _ in range(repeats)]
    return (case, *(round(statistics.median(run[name] for run in runs), 2) for name in OVERHEAD_COLUMNS[1:]))


def write(path: Path, columns: Sequence[str], rows: Iterable[tuple[object, ...]]) -> None:
    """Print rows as they come, then write them."""
    table = []
    for each in rows:
        table.append(each)
        print("  ".join(f"{name}={value}" for name, value in zip(columns, each, strict=True)), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *table])


def main() -> None:
    """Measure every case, print and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=(*CASES, OVERHEAD_CASE))
    parser.add_argument("--what", choices=(*SIDES, "overhead"), default="engine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/bench/engine.csv"))
    options = parser.parse_args()
    if options.what == "overhead":
        print(json.dumps(overhead(model("opt_125m"), OVERHEAD_BATCH, OVERHEAD_PROMPT_LEN, OVERHEAD_STEPS)))
        return
    if options.case:
        case = CASES[options.case]
        print(json.dumps(measure(case.shapes(), options.what, requests(case.num_requests))))
        return
    write(options.out, COLUMNS, (row(case, options.repeats) for case in CASES))
    second = options.out.with_stem(options.out.stem + "_overhead")
    write(second, OVERHEAD_COLUMNS, (overhead_row(OVERHEAD_CASE, options.repeats),))
    print(f"wrote {options.out} and {second}: {NUM_THREADS} threads, medians of {options.repeats} fresh processes")


if __name__ == "__main__":
    main()
