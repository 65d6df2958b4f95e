"""The run of a point: what is computed from it, or searched, and the row it leaves.

Works without Hydra and pandas, so that a worker process is light.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbench import folder
from kvbench.capacity import Capacity
from kvbench.core import KvbenchError
from kvbench.engine import Engine
from kvbench.memory_map.map import FILE as MAP_FILE
from kvbench.memory_map.map import write as write_map
from kvbench.memory_map.recorder import Recorder
from kvbench.metrics import Slo, summarize
from kvbench.parts import build, capacity_now, instantiate_workload, measured_capacity, serve
from kvbench.point import Point
from kvbench.records import Columns, Record, write_parquet
from kvbench.results import POINT_COLUMNS, is_nothing, write_json
from kvbench.search import Search, of_steady_state
from kvbench.workloads.base import Decoding, Trace


@dataclass(frozen=True, slots=True)
class PointRun:
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
    """What became of a run: a row, or the reason why there is none.

    Attributes:
        is_bug: the reason is not a user's mistake; ``error.json`` has the traceback.
    """

    summary: dict[str, Any] | None
    error: str | None = None
    is_bug: bool = False


def run_all(runs: Iterable[PointRun]) -> list[Outcome]:
    """Run points one after the other; those that finished before a worker of theirs died are not run again."""
    outcomes = []
    for each in runs:
        summary = folder.finished_summary(
            each.point, each.points_dir, needs_steps=each.keeps_steps, needs_map=each.keeps_map
        )
        outcomes.append(run(each) if summary is None else Outcome(summary))
    return outcomes


def run(asked: PointRun) -> Outcome:
    """Run a point and leave its folder, or an ``error.json`` in it. Raises nothing but what stops the process."""
    try:
        return Outcome(_run(asked))
    except KvbenchError as error:
        return _failed(asked, str(error), None)
    except OSError as error:
        return _failed(asked, f"cannot write {error.filename or asked.points_dir}: {error.strerror or error}", None)
    except Exception as error:  # one broken point must not take the others with it
        return _failed(asked, f"{type(error).__name__}: {error}", traceback.format_exc())


def _failed(asked: PointRun, message: str, trace: str | None) -> Outcome:
    point = asked.point
    try:
        temporary = folder.begin(point, asked.points_dir)
        write_json(temporary / "error.json", {"error": message, "traceback": trace})
        folder.write_origin(temporary, point, asked.provenance)
        folder.publish(temporary, point, asked.points_dir)
    except OSError:
        pass  # the message below is all that can be left
    return Outcome(None, message, trace is not None)


@dataclass(frozen=True, slots=True)
class _Served:
    """A finished run: its records, its row, what else its manifest says; spans, pool and block size of its map."""

    record: Record
    values: dict[str, Any]
    origin: dict[str, Any]
    spans: tuple[Columns, int, int] | None = None


def _run(asked: PointRun) -> dict[str, Any]:
    started = time.perf_counter()
    point = asked.point
    if point.config["metric"] is None:
        served = _serve(point.config, point.inputs, keeps_map=asked.keeps_map, headline=asked.headline)
    else:
        served = _search(point.config, point.inputs)
    wall_s = time.perf_counter() - started
    values = {name: value for name, value in served.values.items() if not is_nothing(value)} | {"wall_s": wall_s}
    summary = {name: values.get(name) for name in POINT_COLUMNS}

    temporary = folder.begin(point, asked.points_dir)
    write_parquet(temporary / "requests.parquet", served.record.requests)
    if asked.keeps_steps:
        write_parquet(temporary / "steps.parquet", served.record.steps)
    if served.spans is not None:
        write_map(temporary / MAP_FILE, *served.spans)
    write_json(temporary / "summary.json", summary)
    folder.write_origin(temporary, point, served.origin | {"wall_s": wall_s} | asked.provenance)
    folder.publish(temporary, point, asked.points_dir)
    return summary


def _serve(
    config: dict[str, Any], inputs: dict[str, str], *, keeps_map: bool = False, headline: str | None = None
) -> _Served:
    """Run a configuration; what for: see ``PointRun``."""
    parts = build(config, capacity_now(config))
    trace = _trace(json.dumps(config["workload"]), json.dumps(inputs))
    if not trace.inputs.items() <= inputs.items():
        raise KvbenchError("an input file was changed while the command ran; run it again")
    allocator = parts.scheduler.allocator
    recorder = Recorder(parts.scheduler) if keeps_map else None
    engine = parts.open_engine([recorder] if recorder else [])
    capacity = measured_capacity(parts.capacity, engine.runner)
    with _shown(engine, len(trace.requests), headline):
        record = serve(engine, trace.requests)
    end_s = float(record.steps["end_s"][-1]) if len(record.steps["end_s"]) else 0.0
    if config["measure_from_s"] > end_s:
        raise KvbenchError(f"measure_from_s={config['measure_from_s']:g} is after the last iteration, {end_s:.0f} s")
    metrics = summarize(
        record,
        allocator.num_slots,
        config["measure_from_s"],
        config["measure_to_s"],
        bytes_per_slot=capacity.bytes_per_slot,
        slo=Slo(config["slo_ttft_s"], config["slo_tpot_s"]),
    )
    device = engine.runner.device_name
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


def _description(
    config: dict[str, Any], capacity: Capacity, device: str, uses_true_lengths: bool, trace: Trace
) -> dict[str, Any]:
    """The columns of a row that are not measured."""
    choices, workload, allocator = config["choices"], config["workload"], config["allocator"]
    decoding = Decoding(workload.get("num_samples", 1), workload.get("beam_width", 1))
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
        "decoding": decoding.name,
        "num_samples": decoding.num_samples,
        "beam_width": decoding.beam_width,
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
