"""Everything that only a GPU can tell, in one command of at most 8 minutes; results are written after every part.

1. ``kernels``: every kernel against its plain-torch counterpart in float64, on the device.
2. ``engine``: tokens of every system against Hugging Face's, in float32; no wait inside a step; swaps lose nothing.
3. ``benchmark``: fig_kernel_overhead.
4. ``offline``: fig_offline_throughput on the shapes of OPT-13B, random weights, bfloat16, in a KV pool of 12 GiB as in
   the paper, and in the rest of the card; what a decode step of 64 sequences spends outside the device.
5. ``calibration``: iteration costs of this GPU.
6. ``fidelity``: fig_fidelity: the 12 GiB runs, simulated with these costs.

Each part is a process of its own, so that a crash takes no other part with it, and may take until its share of the time
is over: shortly before it skips what is left, and says so; then it is killed, with what it had found so far. Needs no
network and no installation of kvbench, but torch, triton, transformers, numpy, scipy, pandas, pyarrow, matplotlib,
tqdm, PyYAML (not numba and rich), and three packages that few machines have. Make wheels of these where there is a
network, the second line for those of the others that the script says are missing, with the same Python:

    pip wheel --no-deps -w wheels hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3
    pip wheel -w wheels scipy pandas pyarrow matplotlib tqdm PyYAML

and without one

    pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site python experiments/gpu_check.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # kvbench need not be installed

SHARES = {"kernels": 0.14, "engine": 0.26, "benchmark": 0.46, "offline": 0.78, "calibration": 0.95, "fidelity": 1.0}
"""Part -> when it must be over, as a share of the time."""
WRITING = 0.02
"""Share of the time between the end of a part's own clock and the moment it is killed."""
SYSTEMS = ["vllm", "orca_max", "orca_oracle", "orca_pow2", "fastertransformer"]
"""In the order in which they are run, as far as time allows."""
NEEDED = ("torch", "transformers", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "tqdm", "yaml", "hydra",
          "omegaconf", "antlr4")  # fmt: skip
"""What is imported sooner or later."""
PAPER_KV_BYTES = 12 * 2**30
OVERHEAD_BATCH = 64
RESERVE_S = 20.0
"""Left for the rest of a part when a point is started."""


@dataclass(slots=True)
class Options:
    """Of the command line.

    Attributes:
        device: ``cuda``, or ``cpu`` to try the code.
        tiny: seconds instead of minutes.
        out: the folder of all results.
        minutes: of the whole run.
        parts: which.
        archive: a ``.tar.gz`` that holds ``out``, renewed after every part and point.
    """

    device: str
    tiny: bool
    out: Path
    minutes: float
    parts: list[str]
    archive: Path | None


@dataclass(slots=True)
class Report:
    """What was found, kept in ``gpu_check.json``.

    Attributes:
        started: when the run began, on the clock that all processes share.
        environment: what computed, as the first part saw it: the process that starts the parts leaves the GPU alone.
        parts: name -> status, seconds, and what the part has to say.
        goals: name -> what was measured, what must be reached, and whether it was.
    """

    options: Options
    started: float = field(default_factory=time.monotonic)
    environment: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    goals: dict[str, dict[str, Any]] = field(default_factory=dict)

    def ends_in_s(self, part: str) -> float:
        """Seconds until a part is killed."""
        return 60 * self.options.minutes * SHARES[part] - (time.monotonic() - self.started)

    def left_s(self, part: str) -> float:
        """Seconds that a part has for what it does."""
        return self.ends_in_s(part) - 60 * self.options.minutes * WRITING

    def goal(self, name: str, measured: float, *, least: float | None = None, most: float | None = None) -> None:
        """Note a number with its bar."""
        met = (least is None or measured >= least) and (most is None or measured <= most)
        bars = {"at_least": least, "at_most": most}
        self.goals[name] = {"measured": measured, **{k: v for k, v in bars.items() if v is not None}, "met": met}

    def note(self, part: str, found: dict[str, Any]) -> None:
        """Keep what a part has found so far, in case that it is cut."""
        self.parts[part] = {"status": "under way", **found}
        self.write()

    def read(self) -> None:
        """What the parts have written."""
        content = json.loads((self.options.out / "gpu_check.json").read_text(encoding="utf-8"))
        self.environment, self.parts, self.goals = content["environment"], content["parts"], content["goals"]

    def write(self) -> None:
        """Everything so far."""
        from kvbench.results import write_text

        self.options.out.mkdir(parents=True, exist_ok=True)
        content = {"environment": self.environment, "parts": self.parts, "goals": self.goals}
        write_text(self.options.out / "gpu_check.json", json.dumps(content, indent=1, default=str) + "\n")
        if self.options.archive is not None:
            temporary = self.options.archive.with_suffix(".tmp")
            with tarfile.open(temporary, "w:gz") as archive:
                archive.add(self.options.out, self.options.out.name)
            temporary.replace(self.options.archive)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns 1 if one of them failed."""
    options = _parse(arguments)
    report = Report(options)
    if missing := [name for name in NEEDED if not _is_there(name)]:
        print(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: see --help for what to bring",
              file=sys.stderr)  # fmt: skip
        return 2
    from kvbench.core import KvbenchError

    try:
        from kvbench.runners.cuda import check_device

        check_device(options.device)
    except KvbenchError as refused:
        print(refused, file=sys.stderr)
        return 2
    report.write()
    for name in options.parts:
        began = time.monotonic()
        print(f"== {name} ({report.left_s(name):.0f} s)", flush=True)
        found = run_part(name, report) if report.left_s(name) > 0 else {"status": "skipped: no time left"}
        report.parts[name] = {**found, "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(report.parts[name], default=str), flush=True)
        report.write()
    for name, goal in report.goals.items():
        print(f"{name}: {goal['measured']:.4g} ({'met' if goal['met'] else 'missed'}: {goal})")
    failed = [name for name in options.parts if report.parts[name]["status"] == "failed"]
    print(f"Results: {options.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def run_part(name: str, report: Report) -> dict[str, Any]:
    """Run a part in a process of its own, which ends, with all that it has started, when its share of the time is over.

    Returns:
        What it has found, as far as it came.
    """
    process = multiprocessing.get_context("spawn").Process(target=_part, args=(name, report.options, report.started))
    process.start()
    assert process.pid is not None
    try:
        while process.is_alive() and report.ends_in_s(name) > 0:
            process.join(min(report.ends_in_s(name), 1.0))
        is_late = process.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError):  # a group that is over, or was not made yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(10)
    report.read()
    found = report.parts.get(name, {})
    if is_late:
        return {**found, "status": "failed", "error": "killed at the end of its share of the time"}
    if code := process.exitcode:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
        return {**found, "status": "failed", "error": f"its process ended {how}"}
    return found


def _part(name: str, options: Options, started: float) -> None:
    """The life of a part's process: it leaves what it found in the report."""
    os.setsid()
    report = Report(options, started)
    report.read()
    report.environment = environment(options.device)
    try:
        found = {"status": "done", **PARTS[name](report)}
    except Exception as error:
        traceback.print_exc()
        found = {**report.parts.get(name, {}), "status": "failed", "error": f"{type(error).__name__}: {error}"}
    report.parts[name] = found
    report.write()


def _parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes: to try the code")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_check"), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole run (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=list(SHARES), default=list(SHARES), metavar="PART")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the results, renewed as they come")
    return Options(**vars(parser.parse_args(arguments)))


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@lru_cache
def environment(device: str) -> dict[str, Any]:
    """What computed."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    found: dict[str, Any] = {"python": sys.version.split()[0], **versions, "command": sys.argv}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
        found |= {"multiprocessors": properties.multi_processor_count}
    return found


# --- 1. kernels -----------------------------------------------------------------------------------------------------


DTYPES = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-4}
"""Dtype -> the error that is allowed."""
Shape = tuple[str, int, int, int]
"""Dtype, head dimension, query heads for each K/V head, tokens of a block."""


def check_kernels(report: Report) -> dict[str, Any]:
    """Random shapes against float64, paged against contiguous bit for bit; whatever nobody owns is NaN.

    Most of the time is compiling, so several processes share the shapes.
    """
    shapes = [
        (dtype, head_dim, group, page)
        for page in (16, 1, 8, 12, 32, 128)
        for dtype in DTYPES
        for head_dim, group in ((128, 1), (64, 1), (64, 4), (80, 1), (96, 3), (128, 4), (128, 8))
    ]
    first, *others = shapes
    shapes = [first, *random.Random(0).sample(others, 7 if report.options.tiny else len(others))]
    worst: dict[str, float] = {}
    wrong: list[str] = []
    num_cases = 0
    for errors in _each(report, shapes):
        num_cases += 1
        if isinstance(errors, str):
            wrong.append(errors)
            print(errors, flush=True)
            continue
        for name, error in errors.items():
            worst[name] = max(worst.get(name, 0.0), float(f"{error:.3g}"))
    if wrong:
        raise AssertionError(f"{len(wrong)} of {num_cases} shapes: {'; '.join(wrong)}; the others: {worst}")
    return {"cases": num_cases, "of": len(shapes), "largest_errors": worst}


def _each(report: Report, shapes: list[Shape]) -> Iterator[dict[str, float] | str]:
    """What ``check_shape`` says of every shape, in several processes on a GPU, as long as there is time."""
    options = report.options
    if options.device == "cpu":
        yield from (check_shape(options.device, options.tiny, shape) for shape in shapes)
        return
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    pending: set[Future[dict[str, float] | str]] = set()
    try:
        pending = {pool.submit(check_shape, options.device, options.tiny, shape) for shape in shapes}
        while pending and report.left_s("kernels") > 0:
            done, pending = wait(pending, timeout=max(report.left_s("kernels"), 0.1), return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenExecutor as error:
        yield f"{len(pending) + 1} shapes or more are lost with a process that died: {error}"
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():  # one that compiles, or hangs, would hold up the other parts
            worker.kill()


def check_shape(device: str, tiny: bool, shape: Shape) -> dict[str, float] | str:
    """The largest error of every kernel, or what is wrong: an error that is too large, or a kernel that fails."""
    try:
        errors = _errors(device, tiny, shape)
    except Exception as error:  # the other shapes may still tell something
        return f"{shape}: {type(error).__name__}: {error}"
    if wrong := {name: error for name, error in errors.items() if not error <= DTYPES[shape[0]]}:
        return f"{shape}: {wrong}"
    return {f"{name} {shape[0]}": error for name, error in errors.items()}


def _errors(device: str, tiny: bool, shape: Shape) -> dict[str, float]:
    """Kernel -> its largest error."""
    import torch

    dtype, head_dim, group, page = shape
    rng = random.Random(str(shape))
    edges = [0, 1, page - 1, page, page + 1, 63, 64, 65, 300] + ([] if tiny else [1025, 4097])
    lens = [*(rng.choice(edges) for _ in range(7)), 17]
    case = Case(getattr(torch, dtype), head_dim, group, page, lens, torch.device(device))
    return case.errors(splits=rng.choice([1, 2, 8, 16]), window=rng.choice([0, 0, 1, 100]))


class Case:
    """Sequences in shuffled blocks and side by side, over two pools that hold the same, in a sea of NaN.

    Args:
        dtype: of everything.
        head_dim: numbers of a head.
        group: query heads for each of 2 K/V heads.
        page: tokens of a block.
        lens: tokens of each sequence.
        where: the device.
    """

    def __init__(self, dtype: Any, head_dim: int, group: int, page: int, lens: list[int], where: Any) -> None:
        import torch

        generator = torch.Generator(where).manual_seed(sum(lens) + page + head_dim)

        def noise(*shape: int) -> Any:
            return torch.randn(shape, dtype=torch.float32, device=where, generator=generator).to(dtype)

        self.page, self.lens, self.where, self.dtype = page, lens, where, dtype
        num_blocks = [-(-length // page) for length in lens]
        free = (1 + torch.randperm(sum(num_blocks) + 2)).tolist()  # the first and the last blocks are nobody's
        blocks = [[free.pop() for _ in range(count)] for count in num_blocks]
        width = -(-(max(num_blocks) + 1) // 16) * 16
        self.table = torch.full((len(lens), width), -1, dtype=torch.int32)
        for row, held in zip(self.table, blocks, strict=True):
            row[: len(held)] = torch.tensor(held, dtype=torch.int32)
        self.table = self.table.to(where)
        self.num_rows = (sum(num_blocks) + 4) * page
        starts = [0]
        for length in lens:
            starts.append(starts[-1] + length + 3)
        self.base = torch.tensor(starts[:-1], device=where)
        self.paged, self.flat = (torch.full((2, 2, n, 2, head_dim), torch.nan, dtype=dtype, device=where)
                                 for n in (self.num_rows, starts[-1]))  # fmt: skip
        self.kv = [noise(2, length, 2, head_dim) for length in lens]
        self.slots = [
            torch.tensor([held[i // page] * page + i % page for i in range(length)], dtype=torch.int64, device=where)
            for length, held in zip(lens, blocks, strict=True)
        ]
        self.q = noise(len(lens), 2 * group, head_dim)
        self.counts = [min(length, 1 + index * 7) for index, length in enumerate(lens)]
        self.new = noise(sum(self.counts), 2 * group, head_dim)

    def errors(self, splits: int, window: int) -> dict[str, float]:
        """Kernel -> its largest error; 0 where bits are compared, infinite where they differ."""
        import torch

        from kvbench.attention import triton
        from kvbench_kernels import reference

        kernels = triton.kernels(self.where)
        for k_and_v, slots, start in zip(self.kv, self.slots, self.base.tolist(), strict=True):
            flat = torch.arange(start, start + len(slots), device=self.where)
            padded = torch.cat([slots, slots.new_tensor([-1])])
            for pool, rows in ((self.paged, padded), (self.flat, torch.cat([flat, flat.new_tensor([-1])]))):
                nowhere = torch.full((2, 1, *k_and_v.shape[2:]), 99.0, dtype=k_and_v.dtype, device=self.where)
                new = torch.cat([k_and_v, nowhere], 1)
                kernels.write_kv(new[0], new[1], pool[0, 0], pool[0, 1], rows)
        lens = torch.tensor(self.lens, dtype=torch.int32, device=self.where)
        starts = torch.tensor([0, *self.counts], device=self.where).cumsum(0).int()
        paged: dict[str, Any] = {"table": self.table, "page": self.page}
        found = {}
        options: dict[str, Any] = {"window": window, "scale": 0.1}
        for name, pool, place in (("paged", self.paged, paged), ("flat", self.flat, {"base": self.base})):
            k, v = pool[0]
            decoded = kernels.decode(self.q, k, v, lens, splits=splits, **place, **options)[0]
            filled = kernels.prefill(self.new, k, v, starts, lens, **place, **options)
            found[name] = decoded, filled
        k, v = self.paged[0].double()
        expected = (
            reference.decode(self.q.double(), k, v, lens, **paged, **options)[0],
            reference.prefill(self.new.double(), k, v, starts, lens, **paged, **options),
        )
        naive = kernels.decode(self.q, *self.paged[0], lens, splits=splits, prefetch=False, **paged, **options)[0]
        errors = {
            name: float((got.double() - wanted).abs().nan_to_num(torch.inf).max())
            for name, got, wanted in zip(
                ("decode", "prefill", "naive decode"), (*found["paged"], naive), (*expected, expected[0]), strict=True
            )
        }
        for name, ours, other in zip(("decode", "prefill"), found["paged"], found["flat"], strict=True):
            errors[f"{name}: paged against contiguous"] = 0.0 if torch.equal(ours, other) else torch.inf
        return errors | self._moves(kernels, reference)

    def _moves(self, kernels: Any, reference: Any) -> dict[str, float]:
        """Copies, swaps and moves, bit for bit."""
        import torch

        data = torch.randn_like(self.paged.float()).to(self.dtype)
        blocks = data.unflatten(2, (-1, self.page))
        num_blocks = blocks.shape[2]
        order = torch.randperm(num_blocks)
        pairs = order[: num_blocks // 2 * 2].view(-1, 2)
        errors = {}

        def compare(name: str, work: Callable[[Any, Any], Any]) -> None:
            ours, theirs = blocks.clone(), blocks.clone()
            got, wanted = work(kernels, ours), work(reference, theirs)
            same = torch.equal(ours, theirs) and (got is None or torch.equal(got, wanted))
            errors[name] = 0.0 if same else torch.inf

        compare("copy_blocks", lambda of, kv: of.copy_blocks(kv, pairs))
        ids = order[: max(1, num_blocks // 3)].to(self.where)
        shape = (len(ids), *blocks.shape[:2], *blocks.shape[3:])

        def gather(of: Any, kv: Any) -> Any:
            staging = torch.zeros(shape, dtype=kv.dtype, device=kv.device)
            of.gather_blocks(kv, staging, ids)
            return staging

        staging = torch.randn(shape, device=self.where).to(self.dtype)
        compare("gather_blocks", gather)
        compare("scatter_blocks", lambda of, kv: of.scatter_blocks(kv, staging, ids))
        compare("move_rows", lambda of, kv: of.move_rows(kv.flatten(2, 3), 1, 4, self.num_rows - 5))
        return errors


# --- 2. engine ------------------------------------------------------------------------------------------------------


def check_engine(report: Report) -> dict[str, Any]:
    """Tokens of every system against Hugging Face's, one request at a time, in float32."""
    found: dict[str, Any] = {}
    wrong: list[str] = []
    num = 4 if report.options.tiny else 24
    for model in ("tiny_llama", "tiny_opt"):
        expected: dict[int, list[int]] = {}
        for system in SYSTEMS:
            config = _resolve(
                _small(report, model) | {"system": system, "workload.num_requests": num, "kv_cache_seqs": 1.5}
            )
            outputs = _serve(config)[0].outputs
            expected = expected or _generated(config, outputs)
            equal = sum(outputs[key] == tokens for key, tokens in expected.items())
            found[f"{model}, {system}"] = f"{equal} of {len(expected)}"
            report.note("engine", found)
            if equal != len(expected):
                wrong.append(f"{model}, {system}: {equal} of {len(expected)} outputs equal Hugging Face's")
    swapped = _small(report, "tiny_llama") | {"workload.num_samples": 3, "runner.sampling.temperature": 1.0}
    swapped |= {"workload.num_requests": 12 if report.options.tiny else 16, "allocator.block_size": 4}
    runs = [_serve(_resolve(swapped | {"kv_cache_seqs": seqs})) for seqs in (0.15 if report.options.tiny else 1, 16)]
    if runs[0][0].samples != runs[1][0].samples or not runs[0][1]["swapped_in"].sum() > runs[1][1]["swapped_in"].sum():
        wrong.append("samples differ after they were swapped, or were not")
    found["swaps lose nothing"] = not any("swapped" in each for each in wrong)
    if report.options.device == "cuda":
        _serve(_resolve(_small(report, "tiny_opt") | {"system": "vllm", "workload.num_requests": num}), watched=True)
        found["waits inside a step"] = "none but for the tokens"
    if wrong:
        raise AssertionError(f"{'; '.join(wrong)}; found: {found}")
    return found


def _small(report: Report, model: str) -> dict[str, Any]:
    return _runner(report) | {
        "model": model,
        "model.dtype": "float32",
        "workload": "sharegpt_scaled",
        "workload/arrivals": "all_at_once",
        "workload.lengths.factor": 1 / 32 if report.options.tiny else 1 / 8,
        "workload.lengths.lengths.pairs": "histogram",  # the same requests wherever it runs: all of them fit
        "runner.max_graph_batch": 16,
    }


def _serve(config: dict[str, Any], *, watched: bool = False) -> tuple[Any, Any]:
    """Run a configuration; returns the runner, and the columns of its iterations.

    Watched, a step that makes the host wait for the device, but for an event, is an error.
    """
    import torch

    from kvbench.engine import serve
    from kvbench.parts import build

    parts = build(config)
    engine = parts.open_engine()
    requests = parts.workload.generate().requests
    if watched:
        torch.cuda.set_sync_debug_mode("error")
    try:
        return engine.runner, serve(engine, requests).steps
    finally:
        if watched:
            torch.cuda.set_sync_debug_mode("default")


def _generated(config: dict[str, Any], outputs: dict[int, list[int]]) -> dict[int, list[int]]:
    """What Hugging Face generates for the same requests, with its own cache and attention."""
    import torch

    from kvbench.capacity import model_of
    from kvbench.models.loading import load
    from kvbench.parts import instantiate_workload
    from kvbench.runners.torch import random_prompts

    loaded = load(model_of(config), device=config["runner"]["device"], seed=config["seed"])
    loaded.model.set_attn_implementation("eager")
    prompts = random_prompts(loaded.shapes.vocab_size, config["seed"])
    found = {}
    for request in instantiate_workload(config).generate().requests:
        ids = torch.tensor([prompts(request)], device=config["runner"]["device"])
        count = len(outputs[request.id])
        generate: Callable[..., Any] = loaded.model.generate  # type: ignore[assignment]
        whole = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count,
                         max_new_tokens=count, pad_token_id=0)  # fmt: skip
        found[request.id] = whole[0, request.prompt_len :].tolist()
    return found


# --- 3. to 6. -------------------------------------------------------------------------------------------------------


def benchmark(report: Report) -> dict[str, Any]:
    """fig_kernel_overhead."""
    from kvbench.figures.fig_kernel_overhead import BLOCK_SIZE

    settings: dict[str, Any] = {"experiment": "fig_kernel_overhead"} | _runner(report, "kernels")
    if report.options.tiny:
        settings |= {"model": "tiny_llama", "model.num_kv_heads": 2, "runner.batch": 3, "runner.rotated_bytes": 1e5}
        settings |= {"workload.lengths.prompt_len": 40, "workload.lengths.output_len": 25, "allocator.block_size": 16}
    rows = _plan(report, settings)
    rows.sort(key=lambda row: row.point.config["allocator"]["block_size"] != BLOCK_SIZE)  # the goals
    found = _run(report, "benchmark", "fig_kernel_overhead", rows)
    if report.options.device == "cuda":
        kernel_goals(report)
    return found


def kernel_goals(report: Report) -> None:
    """The worst of the launches that the bars are about: blocks of 16, 1 GB of K and V or more, long contexts."""
    from kvbench.figures.fig_kernel_overhead import BARS, BLOCK_SIZE, KINDS, LEAST_BANDWIDTH, LEAST_KV_BYTES, timed
    from kvbench.results import Results

    points = [
        point
        for point in timed(Results(report.options.out / "fig_kernel_overhead"))
        if point.size.block_size == BLOCK_SIZE
        and point.size.kv_bytes >= LEAST_KV_BYTES
        and point.panel in ("block_size", "batch")
    ]
    for kind in KINDS:
        if some := [point for point in points if point.kind == kind]:
            ratio = max(point.over("shuffled").value for point in some)
            report.goal(f"paged over contiguous, {kind}", ratio, most=BARS[BLOCK_SIZE])
            bandwidth = min(point.bandwidth("shuffled").value for point in some)
            report.goal(f"bandwidth over a copy's, {kind}", bandwidth, least=LEAST_BANDWIDTH)


def offline(report: Report) -> dict[str, Any]:
    """fig_offline_throughput, and the time outside the device."""
    rows = []
    budgets = [None] if report.options.tiny else [PAPER_KV_BYTES, None]
    for budget in budgets:
        settings = _offline(report) | {"kv_cache_bytes": budget}
        if budget is None:
            settings |= {"kv_cache_seqs": 2} if report.options.tiny else {"workload.num_requests": 128}
        rows += _plan(report, settings, SYSTEMS)
    found = _run(report, "offline", "fig_offline_throughput", rows)
    if not report.options.tiny:
        by_system = {row["system"]: row for row in found["rows"] if row["kv_cache_bytes"] == PAPER_KV_BYTES}
        if {"vllm", "orca_max"} <= by_system.keys():
            speeds = [by_system[system]["throughput_tok_per_s"] for system in ("vllm", "orca_max")]
            report.goal("vllm over orca_max, tokens/s at 12 GiB", speeds[0] / speeds[1], least=2.0)
    report.note("offline", found)
    is_late = report.left_s("offline") < _reserve_s(report)
    found["overhead"] = "skipped: no time left" if is_late else overhead(report)
    return found


def overhead(report: Report) -> dict[str, float]:
    """What a decode step of equal sequences takes, and what of it the device is not busy."""
    import numpy as np

    from kvbench.core import Request
    from kvbench.engine import serve
    from kvbench.parts import build

    batch, steps = (4, 6) if report.options.tiny else (OVERHEAD_BATCH, 40)
    seqs = 2 if report.options.tiny else 16
    settings = {"runner.max_graph_batch": batch, "kv_cache_seqs": seqs, "system": "vllm"}
    config = _resolve(_offline(report) | settings)
    engine = build(config).open_engine()
    runner: Any = engine.runner
    prompt_len = 20 if report.options.tiny else 40
    columns = serve(engine, [Request(i, 0.0, prompt_len, steps + 1) for i in range(batch)]).steps
    ends, full = columns["end_s"].astype(np.float64), columns["num_running"] == batch
    step_s = float(np.median(np.diff(ends, prepend=0.0)[full & (columns["num_prefills"] == 0)]))
    device_s = statistics.median(runner.steps.step_seconds(batch) for _ in range(20))
    outside_pct = 100 * (1 - device_s / step_s)
    if report.options.device == "cuda":
        report.goal(f"share of a decode step outside the device, batch {batch} (%)", outside_pct, most=10.0)
    return {"batch": batch, "step_ms": 1e3 * step_s, "device_ms": 1e3 * device_s, "outside_pct": outside_pct}


def calibration(report: Report) -> dict[str, Any]:
    """Costs of this GPU, fitted to runs that no figure shows."""
    from kvbench.calibrate.regression import fit, residuals
    from kvbench.calibrate.runs import measure
    from kvbench.results import write_text

    settings = {key: value for key, value in _offline(report).items() if not key.startswith(("workload", "kv_"))}
    settings |= {"runner.max_graph_batch": 64}
    if report.options.tiny:
        settings |= {"model.max_model_len": 64}
    measured = measure(settings, passes=1)
    fitted = fit(measured.fitted)
    costs = {**fitted.coefficients, "packed": True}
    quality = residuals(fitted.coefficients, measured.fitted, measured.held_out)
    content = {"model": measured.model, "device": measured.device, "costs": costs, "residuals": quality}
    write_text(report.options.out / "costs.json", json.dumps(content, indent=1) + "\n")
    return content


def fidelity(report: Report) -> dict[str, Any]:
    """The offline runs, simulated with the fitted costs."""
    from kvbench.folder import provenance
    from kvbench.point import identify
    from kvbench.results import COLUMNS, Results, write_csv
    from kvbench.run import PointRun
    from kvbench.run import run as run_point

    path = report.options.out / "costs.json"
    if not path.is_file():
        return {"status": "skipped: there are no costs without calibration"}
    fitted = json.loads(path.read_text(encoding="utf-8"))
    real = Results(report.options.out / "fig_offline_throughput")
    folder = report.options.out / "fig_fidelity"
    rows: list[dict[str, Any]] = []
    for _, row in real.summary.iterrows():
        if not report.options.tiny and row["kv_cache_bytes"] != PAPER_KV_BYTES:
            continue
        shutil.copytree(real.folder(row), folder / "points" / str(row["point"]), dirs_exist_ok=True)
        rows.append({**dict(zip(row.index, row, strict=True)), "experiment": "fig_fidelity", "panel": "at_once"})
        config = real.config(row)
        priced = {"_target_": "kvbench.runners.simulated.Simulated", "real_clock": False}
        config["costs"] = {"name": "gpu_check", "hardware": config["hardware"]["name"], **fitted["costs"]}
        config |= {"runner": priced, "kv_cache_bytes": int(row["kv_cache_bytes"]), "kv_cache_seqs": None}
        config["choices"] = {**config["choices"], "runner": "simulated", "costs": "gpu_check"}
        point = identify(config, real.manifest(row)["inputs"])
        outcome = run_point(PointRun(point, folder / "points", True, provenance(None)))
        if outcome.summary is None:
            raise RuntimeError(outcome.error)
        named = {"experiment": "fig_fidelity", "panel": "at_once", "repeat": 0, "point": point.folder}
        rows.append({**outcome.summary, **named})
    write_csv(folder / "summary.csv", COLUMNS, rows)
    return {"points": len(rows), "figure": _draw("fig_fidelity", folder)}


def _offline(report: Report) -> dict[str, Any]:
    if report.options.tiny:
        return _runner(report) | {
            "model": "tiny_llama",
            "workload": "sharegpt_scaled",
            "workload/arrivals": "all_at_once",
            "workload.lengths.factor": 1 / 32,
            "workload.num_requests": 5,
            "runner.max_graph_batch": 4,
            "kv_cache_seqs": 2,
        }
    return _runner(report) | {
        "model": "opt_13b",
        "workload": "sharegpt",
        "workload/arrivals": "all_at_once",
        "workload.num_requests": 32,
    }


def _runner(report: Report, runner: str = "cuda") -> dict[str, Any]:
    on_cpu = {"runner.device": "cpu", "hardware": "local", "runner.usable_by": None}
    return {"runner": runner} | (on_cpu if report.options.device == "cpu" else {})


def _resolve(settings: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one point."""
    from kvbench.composition import Setting, composer

    with composer() as compose:
        return compose.resolve([Setting(*each) for each in settings.items()]).point


def _plan(report: Report, settings: dict[str, Any], systems: Sequence[str] = ()) -> list[Any]:
    """The points of an experiment, or of a product over the systems."""
    from kvbench.composition import Setting, composer
    from kvbench.plan import plan

    fixed = settings | {"results_dir": str(report.options.out)}
    products = [fixed | {"system": each} for each in systems] or [fixed]
    with composer() as compose:
        return list(plan(compose, [[Setting(*each) for each in product.items()] for product in products]).rows)


def _run(report: Report, part: str, experiment: str, rows: Sequence[Any]) -> dict[str, Any]:
    """Run points as long as there is time; the summary and the figure are renewed after each."""
    from kvbench.folder import provenance
    from kvbench.results import COLUMNS, write_csv
    from kvbench.run import PointRun
    from kvbench.run import run as run_point

    folder = report.options.out / experiment
    folder.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    errors: list[str] = []
    skipped = 0
    for row in rows:
        if report.left_s(part) < _reserve_s(report):
            skipped += 1
            continue
        outcome = run_point(PointRun(row.point, folder / "points", True, provenance(None)))
        if outcome.summary is None:
            errors.append(f"{row.point.folder}: {outcome.error}")
            print(errors[-1], flush=True)
            continue
        named = {"experiment": experiment, "panel": row.panel, "repeat": row.repeat, "point": row.point.folder}
        done.append({**outcome.summary, **named})
        write_csv(folder / "summary.csv", COLUMNS, done)
        report.note(part, {"points": len(done), "errors": errors})
    if errors and not done:
        raise RuntimeError(errors[0])
    keys = ("system", "kv_cache_bytes", "throughput_tok_per_s", "num_running_mean", "wall_s")
    short = [{key: row[key] for key in keys} for row in done]
    figure = _draw(experiment, folder) if done else "nothing to draw"
    return {"points": len(done), "skipped": skipped, "errors": errors, "figure": figure, "rows": short}


def _reserve_s(report: Report) -> float:
    """Seconds that must be left where a point is started."""
    return min(RESERVE_S, 3 * report.options.minutes)


def _draw(experiment: str, folder: Path) -> str:
    """The figure, its verdicts and its table; what cannot be drawn here can be drawn elsewhere from the same files."""
    from kvbench.figures.experiment import draw
    from kvbench.results import Results, write_text

    try:
        table = draw(Results(folder), experiment) or ""
        write_text(folder / "table.txt", table + "\n")
        print(table, flush=True)
    except Exception as error:  # numbers are worth more than a picture
        traceback.print_exc()
        return f"not drawn: {type(error).__name__}: {error}"
    return "drawn"


PARTS: dict[str, Callable[[Report], dict[str, Any]]] = {
    "kernels": check_kernels,
    "engine": check_engine,
    "benchmark": benchmark,
    "offline": offline,
    "calibration": calibration,
    "fidelity": fidelity,
}


if __name__ == "__main__":
    sys.exit(main())
