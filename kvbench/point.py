"""A point: one resolved configuration with its seed. Its identity, its parts, its run and its folder.

Works without Hydra and pandas, so that a worker process is light.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import yaml

from kvbench import __version__, compiled
from kvbench.allocators.base import Ability, Allocator
from kvbench.capacity import (
    COMPUTED,
    ESTIMATED,
    MAX_BATCHED_TOKENS,
    Capacity,
    Footprint,
    capacity_of,
    check_fits,
    measured,
    model_of,
    usable_bytes,
)
from kvbench.clock import VirtualClock, WallClock
from kvbench.core import KvbenchError
from kvbench.engine import Engine, serve
from kvbench.instantiate import check_arguments, instantiate, locate
from kvbench.ledger import Ledger
from kvbench.memory_map.map import FILE as MAP_FILE
from kvbench.memory_map.map import write as write_map
from kvbench.memory_map.recorder import Recorder
from kvbench.metrics import Slo, summarize
from kvbench.records import Columns, Record, write_parquet
from kvbench.results import POINT_COLUMNS, is_nothing, write_json, write_text
from kvbench.runners.base import Runner
from kvbench.runners.simulated import NOT_COEFFICIENTS, IterationCosts
from kvbench.schedulers.base import Scheduler
from kvbench.schema import VERSION as SCHEMA
from kvbench.search import Search, of_steady_state
from kvbench.workloads.base import Trace, Workload

PACKAGE = Path(__file__).resolve().parent
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # half of a short point's time goes into the slow one
NO_INFLUENCE = (
    "figures",
    "report",
    "paper",
    "testing",
    "executors",
    "app.py",
    "__main__.py",
    "verify.py",
    "fit",
    "calibrate",
    "reference.py",
    "results.py",
    "memory_map",
    "live.py",
)
"""Parts of the package that no number of a point depends on; a change there keeps finished points."""
NOT_IDENTIFYING = ("records", "data_dir")
"""Keys that say where to read and what to keep; what was read is identified by its digest."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is run, and resumed, as one.

    Attributes:
        config: plain containers, see ``kvbench.composition.Resolved.point``.
        inputs: file name -> digest, or what stands in for a file that is absent.
        key: SHA-256 over the configuration, the inputs and the sources that produce the numbers.
    """

    config: dict[str, Any]
    inputs: dict[str, str]
    key: str

    @property
    def folder(self) -> str:
        """Its folder's name: what it is, in a few words, and 8 digits of the key."""
        config = self.config
        load = config["workload"].get("request_rate")
        words = [config["system"], config["model"]["name"], config["choices"]["workload"]]
        if config.get("metric"):
            words += [config["metric"], f"{config['threshold']:g}"]
        elif load is not None:
            words += [f"{load:g}"]
        words += [f"seed{config['seed']}"] if config["seed"] else []
        words += [f"trial{config['trial']}"] if config.get("trial") else []
        slug = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", str(word)).strip("_") for word in words)
        return f"{slug[:100]}-{self.key[:8]}"


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of a point; a runner that loads a model does so when it is opened."""

    capacity: Capacity
    scheduler: Scheduler
    open_runner: Callable[[], Runner]
    clock: type[VirtualClock] | type[WallClock]
    workload: Workload
    uses_true_lengths: bool


@dataclass(frozen=True, slots=True)
class Task:
    """A point to run, and where its folder goes.

    Attributes:
        keeps_map: whether it leaves ``memory_map.parquet``.
        headline: of the panel that shows it while it runs; None: it is not shown.
    """

    point: Point
    points_dir: Path
    keeps_steps: bool
    provenance: dict[str, Any]
    keeps_map: bool = False
    headline: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task: a row, or the reason why there is none.

    Attributes:
        is_bug: the reason is not a user's mistake; ``error.json`` has the traceback.
    """

    summary: dict[str, Any] | None
    error: str | None = None
    is_bug: bool = False


def build(config: Mapping[str, Any], capacity: Capacity | None = None) -> Parts:
    """Build every object of a point from its configuration; no model is loaded.

    Args:
        config: of the point.
        capacity: the KV pool, as ``capacity_now`` found it; None for the one that is planned.

    Raises:
        KvbenchError: a value, a key or a combination that a constructor refuses.
    """
    capacity = capacity or _planned(config)
    if config["metric"] is not None:
        _check_searchable(config)
    allocator = instantiate(config["allocator"], "allocator", num_slots=capacity.num_slots)
    reservation = instantiate(config["reservation"], "reservation")
    scheduler = instantiate(config["scheduler"], "scheduler", allocator=allocator, reservation=reservation)
    workload = instantiate_workload(config)
    uses_true_lengths = bool(reservation.uses_true_lengths or scheduler.uses_true_lengths)
    if is_real(config):
        check_fits(capacity)
        return Parts(capacity, scheduler, _real_runner(config, allocator), WallClock, workload, uses_true_lengths)
    runner = _simulated_runner(config, allocator)
    return Parts(capacity, scheduler, lambda: runner, VirtualClock, workload, uses_true_lengths)


def _check_searchable(config: Mapping[str, Any]) -> None:
    """Refuse what a search cannot repeat at another rate with other seeds."""
    workload = config["workload"]
    if is_real(config):
        raise KvbenchError(f"metric={config['metric']} is searched in simulated runs; leave runner= at simulated")
    if workload.get("arrivals") is None or workload.get("request_rate") is None:
        raise KvbenchError(
            f"metric={config['metric']} is searched over the rate, with repeats that differ: workload="
            f"{config['choices']['workload']} as given has one trace; choose one with arrivals and a request_rate"
        )


def _planned(config: Mapping[str, Any]) -> Capacity:
    """The capacity report before anything is loaded: of a real run whose pool is not given, an estimate."""
    planned = capacity_of(config)
    return replace(planned, source=ESTIMATED) if is_real(config) and planned.source == COMPUTED else planned


def capacity_now(config: Mapping[str, Any]) -> Capacity:
    """The capacity report of a point that is about to run.

    That of a real run respects what the machine can give now. Where the pool's size is not given, the model is loaded
    and its largest iteration profiled (the runner's ``measured_by``); the pool is what they leave.

    Raises:
        KvbenchError: too little memory, said before anything large is allocated, or what loading the model raises.
    """
    planned = _planned(config)
    if not is_real(config):
        return planned
    usable = _usable_bytes(config["runner"].get("usable_by"), planned.num_gpus)
    check_fits(planned, usable)
    if planned.source != ESTIMATED:
        return planned
    runner, scheduler, model = config["runner"], config["scheduler"], model_of(config)
    if runner.get("measured_by") is None:
        raise KvbenchError("runner.measured_by names nothing that measures; give kv_cache_bytes= or kv_cache_seqs=")
    num_seqs = scheduler.get("max_num_seqs", MAX_BATCHED_TOKENS)
    num_tokens = scheduler.get("max_num_batched_tokens", num_seqs * model.max_model_len)
    seen: Footprint = instantiate(
        _runner_node(config) | {"_target_": runner["measured_by"]},
        "runner",
        model=model,
        seed=config["seed"],
        num_tokens=num_tokens,
        num_seqs=num_seqs,
    )
    found = _sized(planned, seen, num_tokens, runner.get("usable_by"))
    check_fits(replace(found, reserve_bytes=0), usable)  # what other programs took since then may be as much
    return found


@lru_cache
def _sized(planned: Capacity, seen: Footprint, num_tokens: int, usable_by: str | None) -> Capacity:
    """Size a pool once in a process: points that need the same get the same, whatever other programs do meanwhile."""
    return measured(planned, seen, num_tokens, _usable_bytes(usable_by, planned.num_gpus))


def _usable_bytes(usable_by: str | None, num_gpus: int) -> int:
    """What the device of a real run can give now: this machine's memory, unless the runner names who knows better."""
    return usable_bytes() if usable_by is None else int(locate(usable_by, "runner.usable_by")(num_gpus))


def is_real(config: Mapping[str, Any]) -> bool:
    """Whether a point computes tokens, in real time."""
    return bool(config["runner"].get("real_clock"))


def inputs_of(config: Mapping[str, Any], workload: Workload) -> dict[str, str]:
    """File name -> digest of everything a point reads, or what stands in for it."""
    if not is_real(config):
        return workload.inputs()
    from kvbench.models import sources

    return workload.inputs() | sources.inputs(model_of(config).weights)


def _runner_node(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("real_clock", "measured_by", "usable_by")
    return {key: value for key, value in config["runner"].items() if key not in keys}


def _real_runner(config: Mapping[str, Any], allocator: Allocator) -> Callable[[], Runner]:
    """Check the options; the model is loaded later."""
    node = _runner_node(config)
    given = {"model": model_of(config), "allocator": allocator, "seed": config["seed"]}
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    check_arguments(locate(node["_target_"], "runner"), arguments, "runner", given)
    if "sampling" in node:
        instantiate(node["sampling"], "runner.sampling")
    return lambda: cast(Runner, instantiate(node, "runner", **given))


def _simulated_runner(config: Mapping[str, Any], allocator: Allocator) -> Runner:
    costs, hardware = config["costs"], config["hardware"]["name"]
    if costs["hardware"] != hardware:
        raise KvbenchError(
            f"costs={costs['name']} has {config['model']['name']} on {costs['hardware']}, not on hardware={hardware}; "
            f"choose hardware={costs['hardware']}, or give a costs file for {hardware}"
        )
    coefficients = {key: value for key, value in costs.items() if key not in NOT_COEFFICIENTS}
    check_arguments(IterationCosts, coefficients, "costs")
    model = model_of(config)
    node = _runner_node(config)
    beams = instantiate(node.pop("beams"), "runner.beams") if node.get("beams") else None
    runner: Runner = instantiate(
        node,
        "runner",
        costs=IterationCosts(**coefficients),
        bytes_per_slot=model.bytes_per_slot,
        num_layers=model.num_layers,
        beams=beams,
        # The kernel that follows a block table depends on the block size; one that reads contiguous memory does not.
        **({"block_size": allocator.block_size} if Ability.GROW in allocator.abilities else {}),
    )
    return runner


def instantiate_workload(config: Mapping[str, Any]) -> Workload:
    """Build the workload alone. Raises KvbenchError as ``build``."""
    workload: Workload = instantiate(config["workload"], "workload")
    return workload


def identify(config: dict[str, Any], inputs: dict[str, str]) -> Point:
    """Compute the key of a configuration, given what its workload reads."""
    identity = {
        "config": _without(config, NOT_IDENTIFYING),
        "inputs": inputs,
        "sources": sources_digest(PACKAGE),
        "own_parts": {target: _module_digest(target) for target in sorted(set(_foreign_targets(config)))},
    }
    text = json.dumps(identity, sort_keys=True, default=str)
    return Point(config, inputs, hashlib.sha256(text.encode()).hexdigest())


def _without(node: Any, names: tuple[str, ...]) -> Any:
    if isinstance(node, Mapping):
        return {key: _without(value, names) for key, value in node.items() if key not in names}
    return node


def _foreign_targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if isinstance(target, str) and not target.startswith("kvbench."):
            yield target
        for value in node.values():
            yield from _foreign_targets(value)


@cache
def sources_digest(package: Path) -> str:
    """SHA-256 over every file of the package that a point's numbers may depend on: all but ``NO_INFLUENCE``."""
    paths = sorted(
        path
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.relative_to(package).parts[0] not in NO_INFLUENCE
    )
    return _digest_files(package, paths)


def _module_digest(target: str) -> str:
    """The same over a user's own package, or module if it is in none."""
    locate(target, "a part")
    top = sys.modules[target.partition(".")[0]]
    file = getattr(top, "__file__", None)
    if file is None:
        return "no file"
    path = Path(file)
    paths = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return _digest_files(path.parent, paths)


def _digest_files(root: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def finished_summary(
    point: Point, points_dir: Path, *, needs_steps: bool, needs_map: bool = False
) -> dict[str, Any] | None:
    """The row of a point that was finished before, or None if there is none that answers for it."""
    folder = points_dir / point.folder
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    needed = [name for name, needs in (("steps.parquet", needs_steps), (MAP_FILE, needs_map)) if needs]
    if manifest.get("key") != point.key or not all((folder / name).is_file() for name in needed):
        return None
    return dict(summary)


def run_all(tasks: Iterable[Task]) -> list[Outcome]:
    """Run points one after the other; those that finished before a worker of theirs died are not run again."""
    outcomes = []
    for task in tasks:
        summary = finished_summary(task.point, task.points_dir, needs_steps=task.keeps_steps, needs_map=task.keeps_map)
        outcomes.append(run(task) if summary is None else Outcome(summary))
    return outcomes


def run(task: Task) -> Outcome:
    """Run a point and leave its folder, or an ``error.json`` in it. Raises nothing but what stops the process."""
    try:
        return Outcome(_run(task))
    except KvbenchError as error:
        return _failed(task, str(error), None)
    except OSError as error:
        return _failed(task, f"cannot write {error.filename or task.points_dir}: {error.strerror or error}", None)
    except Exception as error:  # one broken point must not take the others with it
        return _failed(task, f"{type(error).__name__}: {error}", traceback.format_exc())


@dataclass(frozen=True, slots=True)
class _Served:
    """A finished run: its records, its row, what else its manifest says; spans, pool and block size of its map."""

    record: Record
    values: dict[str, Any]
    origin: dict[str, Any]
    spans: tuple[Columns, int, int] | None = None


def _run(task: Task) -> dict[str, Any]:
    started = time.perf_counter()
    point = task.point
    if point.config["metric"] is None:
        served = _serve(point.config, point.inputs, keeps_map=task.keeps_map, headline=task.headline)
    else:
        served = _search(point.config, point.inputs)
    wall_s = time.perf_counter() - started
    values = {name: value for name, value in served.values.items() if not is_nothing(value)} | {"wall_s": wall_s}
    summary = {name: values.get(name) for name in POINT_COLUMNS}

    temporary = _temporary(task)
    write_parquet(temporary / "requests.parquet", served.record.requests)
    if task.keeps_steps:
        write_parquet(temporary / "steps.parquet", served.record.steps)
    if served.spans is not None:
        write_map(temporary / MAP_FILE, *served.spans)
    write_json(temporary / "summary.json", summary)
    _write_origin(temporary, task, served.origin | {"wall_s": wall_s})
    _publish(temporary, task)
    return summary


def _serve(
    config: dict[str, Any], inputs: dict[str, str], *, keeps_map: bool = False, headline: str | None = None
) -> _Served:
    """Run a configuration; what for: see ``Task``."""
    parts = build(config, capacity_now(config))
    trace = _trace(json.dumps(config["workload"]), json.dumps(inputs))
    if not trace.inputs.items() <= inputs.items():
        raise KvbenchError("an input file was changed while the command ran; run it again")
    allocator = parts.scheduler.allocator
    runner = parts.open_runner()
    capacity = measured_capacity(parts.capacity, runner)
    ledger = Ledger(allocator, may_stop_early=runner.may_stop_early)
    recorder = Recorder(parts.scheduler) if keeps_map else None
    engine = Engine(parts.scheduler, runner, parts.clock(), ledger, [recorder] if recorder else [])
    with _shown(engine, len(trace.requests), headline):
        record = compiled.serve(engine, trace.requests) or serve(engine, trace.requests)
    metrics = summarize(
        record,
        allocator.num_slots,
        config["measure_from_s"],
        config["measure_to_s"],
        bytes_per_slot=capacity.bytes_per_slot,
        slo=Slo(config["slo_ttft_s"], config["slo_tpot_s"]),
    )
    device = runner.device_name
    return _Served(
        record,
        _description(config, capacity, device, parts.uses_true_lengths, trace) | metrics,
        {
            "capacity": asdict(capacity) | {"num_slots": capacity.num_slots},
            "device": device,
            "uses_true_lengths": parts.uses_true_lengths,
            "workload_source": trace.source,
            "rejections": sorted(set(engine.rejected.values()))[:10],
        },
        (recorder.spans(), allocator.num_slots, allocator.block_size) if recorder else None,
    )


def _shown(engine: Engine, num_requests: int, headline: str | None) -> AbstractContextManager[object]:
    """Whether the run is shown while it goes on: if there is a headline."""
    if headline is None:
        return nullcontext()
    from kvbench.live import Panel  # brings rich

    return Panel(engine, num_requests, headline)


def _search(config: dict[str, Any], inputs: dict[str, str]) -> _Served:
    """Search the rate at which a metric reaches its threshold; the row is that of a run at the rate found."""
    metric, threshold = config["metric"], config["threshold"]

    def at(rate: float, share: float = 1.0) -> _Served:
        return _serve(config | {"workload": _beginning(config["workload"], share) | {"request_rate": rate}}, inputs)

    whole, half = Search(metric, threshold), Search(metric, threshold)
    rate = whole.rate(lambda rate: float(at(rate).values[metric]), config["workload"]["request_rate"])
    half_rate = half.rate(lambda rate: float(at(rate, 0.5).values[metric]), rate, factor=1.1)
    served = at(rate)
    found = {
        "metric": metric,
        "threshold": threshold,
        "capacity_req_per_s": of_steady_state(rate, half_rate),
        "trace_capacity_req_per_s": rate,
    }
    searched = {"searched": {"whole": whole.tried, "half": half.tried}}
    return replace(served, values=served.values | found, origin=served.origin | searched)


def _beginning(workload: Mapping[str, Any], share: float) -> dict[str, Any]:
    """A workload with this share of its duration and of its requests."""
    duration_s, count = workload.get("duration_s"), workload.get("num_requests")
    return {
        **workload,
        "duration_s": None if duration_s is None else share * duration_s,
        "num_requests": None if count is None else max(round(share * count), 1),
    }


@lru_cache(maxsize=1)
def _trace(workload: str, inputs: str) -> Trace:
    """The trace of a workload; points that differ in other parts only, and are run one after the other, share it."""
    del inputs  # only tells a changed file from what was read before
    return instantiate_workload({"workload": json.loads(workload)}).generate()


def measured_capacity(planned: Capacity, runner: Runner) -> Capacity:
    """The capacity report with what an opened runner really takes. Raises KvbenchError as ``check_fits``."""
    if runner.weights_bytes is None:
        return planned
    capacity = replace(planned, weights_bytes=runner.weights_bytes)
    check_fits(capacity)
    return capacity


def _description(
    config: dict[str, Any], capacity: Capacity, device: str, uses_true_lengths: bool, trace: Trace
) -> dict[str, Any]:
    """The columns of a row that are not measured."""
    choices, workload, allocator = config["choices"], config["workload"], config["allocator"]
    samples, width = workload.get("num_samples", 1), workload.get("beam_width", 1)
    return {
        "system": config["system"],
        "allocator": _name(config, "allocator"),
        "reservation": _name(config, "reservation"),
        "scheduler": _name(config, "scheduler"),
        "copy_on_write": allocator.get("copy_on_write"),
        "block_size": allocator.get("block_size"),
        "runner": choices["runner"],
        "device": device,
        "hardware": config["hardware"]["name"],
        "costs": config["costs"]["name"] if config["costs"] else None,
        "model": config["model"]["name"],
        "workload": workload.get("name", choices["workload"]),
        "workload_source": trace.source,
        "decoding": "parallel" if samples > 1 else "beam" if width > 1 else "single",
        "num_samples": samples,
        "beam_width": width,
        "request_rate": workload.get("request_rate"),
        "duration_s": workload.get("duration_s"),
        "seed": config["seed"],
        "uses_true_lengths": uses_true_lengths,
        "weights_bytes": capacity.weights_bytes,
        "activation_bytes": capacity.activation_bytes,
        "reserve_bytes": capacity.reserve_bytes,
        "kv_cache_bytes": capacity.kv_cache_bytes,
        "num_slots": capacity.num_slots,
        "num_dropped": trace.num_dropped,
        "num_clipped": trace.num_clipped,
        "measure_from_s": config["measure_from_s"],
        "measure_to_s": config["measure_to_s"],
        "slo_ttft_s": config["slo_ttft_s"],
        "slo_tpot_s": config["slo_tpot_s"],
    }


def _name(config: dict[str, Any], group: str) -> str:
    """The choice of a group, or the class of a user's own."""
    target = str(config[group]["_target_"])
    return str(config["choices"][group]) if target.startswith("kvbench.") else target


def _temporary(task: Task) -> Path:
    path = task.points_dir / f".{task.point.folder}.{os.getpid()}.tmp"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def _write_origin(folder: Path, task: Task, more: dict[str, Any]) -> None:
    point = task.point
    write_text(folder / "config.yaml", yaml.dump(point.config, Dumper=_DUMPER, sort_keys=False))
    origin = {"key": point.key, "inputs": point.inputs, **more, **task.provenance}
    if is_real(point.config) and "torch" in sys.modules:
        origin["versions"] = origin["versions"] | _versions("torch", "transformers", "numba", "triton")
        origin["cpu"] = _cpu()
    write_json(folder / "manifest.json", origin)


def _cpu() -> dict[str, Any]:
    """What computed a real run's tokens: the CPU, its vector instructions as torch names them, the threads used."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return {
        "name": _cpu_name(),
        "num_threads": torch.get_num_threads(),
        "capabilities": sorted(name for name, has in capabilities.items() if has is True),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _publish(temporary: Path, task: Task) -> None:
    final = task.points_dir / task.point.folder
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)


def _failed(task: Task, message: str, trace: str | None) -> Outcome:
    try:
        temporary = _temporary(task)
        write_json(temporary / "error.json", {"error": message, "traceback": trace})
        _write_origin(temporary, task, {})
        _publish(temporary, task)
    except OSError:
        pass  # the message below is all that can be left
    return Outcome(None, message, trace is not None)


def provenance(commit: str | None) -> dict[str, Any]:
    """What a manifest says of the machine and the software: provenance, never identity."""
    return {
        "schema": SCHEMA,
        "git_commit": commit,
        "versions": {"python": platform.python_version(), "kvbench": __version__, **_versions("numpy", "pyarrow")},
        "host": platform.node(),
        "platform": platform.platform(),
        "num_cores": os.cpu_count(),
        "sources": sources_digest(PACKAGE),
    }


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def clean_up(points_dir: Path) -> None:
    """Remove what processes that no longer live left half written."""
    for path in points_dir.glob(".*.tmp"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
