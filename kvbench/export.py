"""``python -m kvbench.export results/NAME``: every point as a benchmark report of llm-d, version 0.2.1.

The schema is that of the package ``llmd-benchmark-report`` (llm-d/llm-d-benchmark on GitHub), to which the tests hold
what is written. docs/compare.md says which fields stay empty, and why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml

from kvbench import __version__, command
from kvbench.core import KvbenchError
from kvbench.partition import CLASSES
from kvbench.records import Columns
from kvbench.results import SIMULATED, Results, is_nothing, write_text

VERSION = "0.2.1"
PERCENTILES = {
    "p0p1": 0.1, "p1": 1, "p5": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99,
    "p99p9": 99.9,
}  # fmt: skip
"""The schema's names of percentiles."""
MAX_POINTS = 500
"""Of a series: longer ones are averaged over equal spans of time, each with its extremes."""
LABEL = "engine"
"""Of the only component."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Numbers = npt.NDArray[np.float64]
Json = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Export what the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 after a user's mistake.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.export",
        description=f"Write each point of a folder of results as a benchmark report of llm-d (schema {VERSION}).",
    )
    parser.add_argument("folder", metavar="results/NAME", type=Path)
    parser.add_argument("--to", type=Path, help="folder of the reports; by default llm-d/ in that of the results")
    options = parser.parse_args(argv)

    def action() -> int:
        print(*export(Results(options.folder), options.to or options.folder / "llm-d"), sep="\n")
        return 0

    return command.run("kvbench.export", action, "reports that are written stay")


def export(results: Results, folder: Path) -> list[Path]:
    """Write ``benchmark_report_v0.2,_<point>.yaml`` for each point of the last command.

    Raises:
        KvbenchError: there is no point, or only the summary was kept.
    """
    rows = [row for _, row in results.summary.drop_duplicates("point").iterrows()]
    if not rows:
        raise KvbenchError(f"{results.path / 'summary.csv'} holds no point; run the experiment first")
    for name, row in product(("requests.parquet", "config.yaml", "manifest.json"), rows):
        if not (results.folder(row) / name).is_file():
            kept = f"{results.path} keeps no {name.partition('.')[0]} of {row['point']}"
            raise KvbenchError(f"{kept}; run the experiment to export it")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for row in rows:
        paths.append(folder / f"benchmark_report_v0.2,_{row['point']}.yaml")
        write_text(paths[-1], yaml.safe_dump(report(results, row), sort_keys=False))
    return paths


def report(results: Results, row: pd.Series[Any]) -> Json:
    """The report of one point, as the schema orders it.

    Args:
        results: whose point it is.
        row: of its summary.
    """
    config, manifest, requests = results.config(row), results.manifest(row), results.requests(row)
    steps = results.steps(row) if (results.folder(row) / "steps.parquet").is_file() else None
    way = SIMULATED if row["runner"] == SIMULATED else f"measured on {row['device']}"
    return {
        "version": VERSION,
        "run": {
            "uid": manifest["key"],
            "eid": results.path.name,
            "time": {"duration": f"PT{float(row['simulated_s'])}S"},
            "description": f"kvbench {row['system']}, {row['model']}, {row['workload']}: {way}",
            "keywords": ["kvbench", SIMULATED if way == SIMULATED else "measured"],
        },
        "scenario": {"stack": [_engine(row, config, way)], "load": _load(row, config, manifest, requests)},
        "results": {
            "request_performance": {"aggregate": _performance(row, requests)},
            "observability": _observability(row, steps, manifest["capacity"]["bytes_per_slot"]),
        },
    }


def _engine(row: pd.Series[Any], config: Json, way: str) -> Json:
    hardware = config["hardware"]
    parts = {
        key: config[key] for key in ("allocator", "reservation", "scheduler", "runner", "costs") if config.get(key)
    }
    return {
        "metadata": {
            "label": LABEL,
            "cfg_id": _digest({**parts, "model": config["model"], "hardware": hardware}),
            "description": f"{row['system']} rebuilt in kvbench, {way}",
        },
        "standardized": {
            "kind": "inference_engine",
            "tool": f"kvbench {row['system']}",
            "tool_version": __version__,
            "role": "replica",
            "replicas": 1,
            "model": {"name": str(row["model"])},
            "accelerator": {
                "model": hardware["gpu"] if way == SIMULATED else str(row["device"]),
                "count": hardware["num_gpus"],
                "parallelism": {"tp": hardware["num_gpus"]},
            },
        },
        "native": {
            "config": {**parts, "kv_cache_bytes": int(row["kv_cache_bytes"]), "num_slots": int(row["num_slots"])}
        },
    }


def _load(row: pd.Series[Any], config: Json, manifest: Json, requests: Columns) -> Json:
    workload = config["workload"]
    lengths = {"input_seq_len": requests["prompt_len"], "output_seq_len": requests["output_len"]}
    return {
        "metadata": {"cfg_id": _digest(workload), "description": str(manifest["workload_source"])},
        "standardized": {
            "tool": "kvbench",
            "tool_version": __version__,
            "source": "unknown" if row["runner"] == SIMULATED else "random",  # the text of a prompt plays no part
            **{name: _length(column) for name, column in lengths.items() if len(column)},
            **({} if is_nothing(row["request_rate"]) else {"rate_qps": float(row["request_rate"])}),
        },
        "native": {"config": workload},
    }


def _performance(row: pd.Series[Any], requests: Columns) -> Json:
    done = np.isfinite(requests["finish_s"].astype(np.float64))
    arrival_s, first_s, finish_s, prompt_len, output_len = (
        requests[name][done].astype(np.float64)
        for name in ("arrival_s", "first_token_s", "finish_s", "prompt_len", "output_len")
    )
    more = output_len > 1
    latencies = {
        "time_to_first_token": _statistics(first_s - arrival_s, "s"),
        "normalized_time_per_output_token": _statistics((finish_s - arrival_s) / output_len, "s/token"),
        "time_per_output_token": _statistics(((finish_s - first_s) / (output_len - 1 + ~more))[more], "s/token"),
        "request_latency": _statistics(finish_s - arrival_s, "s"),
    }
    rates = {
        "output_token_rate": ("throughput_tok_per_s", "tokens/s"),
        "request_rate": ("throughput_req_per_s", "queries/s"),
    }
    return {
        "requests": {
            "total": len(done),
            "failures": int(np.sum(requests["rejected"])),
            "incomplete": int(np.sum(~done & ~requests["rejected"].astype(np.bool_))),
            **_known(
                {"input_length": _statistics(prompt_len, "count"), "output_length": _statistics(output_len, "count")}
            ),
        },
        "latency": _known(latencies),
        "throughput": {
            name: {"units": unit, "mean": float(row[column])}
            for name, (column, unit) in rates.items()
            if not is_nothing(row[column])
        },
    }


def _observability(row: pd.Series[Any], steps: Columns | None, bytes_per_slot: int) -> Json:
    """KV use, batch and queue: series where iterations were kept, else the averages of the summary."""
    if steps is None or not len(steps["end_s"]):
        used_pct = 100.0 - float(row["free_pct"]) - float(row["cached_pct"])
        means = {
            "kv_cache_usage": ("percent", used_pct),
            "running_requests": ("count", float(row["num_running_mean"])),
            "waiting_requests": ("count", float(row["num_waiting_mean"])),
        }
        aggregate = {
            name: {"units": unit, "mean": mean} for name, (unit, mean) in means.items() if not is_nothing(mean)
        }
        return {"components": [{"component_label": LABEL, "aggregate": aggregate}]}
    num_slots, seconds = int(row["num_slots"]), steps["seconds"].astype(np.float64)
    shares = {name: 100.0 * steps[name].astype(np.float64) / num_slots for name in CLASSES}
    usage = 100.0 - shares["free"] - shares["cached"]
    running, waiting = (steps[name].astype(np.float64) for name in ("num_running", "num_waiting"))
    counters = {
        "num_preemptions": ("num_preempted", "count", 1),
        "prompt_tokens": ("prefill_tokens", "count", 1),
        "kv_offload_store_bytes": ("swapped_out", "bytes", bytes_per_slot),
        "kv_offload_load_bytes": ("swapped_in", "bytes", bytes_per_slot),
    }
    end_s = steps["end_s"].astype(np.float64)
    return {
        "components": [
            {
                "component_label": LABEL,
                "aggregate": {
                    "kv_cache_usage": _over_time(usage, end_s, seconds, "percent"),
                    "running_requests": _over_time(running, end_s, seconds, "count"),
                    "waiting_requests": _over_time(waiting, end_s, seconds, "count"),
                },
                "time_series": {
                    "kv_cache_usage": _series(end_s, usage, seconds, "percent"),
                    "num_requests_running": _series(end_s, running, seconds, "count"),
                    "num_requests_waiting": _series(end_s, waiting, seconds, "count"),
                    **{
                        name: _counter(end_s, np.cumsum(steps[column].astype(np.float64)) * factor, unit)
                        for name, (column, unit, factor) in counters.items()
                        if column in steps
                    },
                },
            }
        ],
        **{
            f"kvbench_{name}": _over_time(share, end_s, seconds, "percent", idle=100.0 if name == "free" else 0.0)
            for name, share in shares.items()
        },
    }


def _over_time(values: Numbers, end_s: Numbers, seconds: Numbers, units: str, idle: float = 0.0) -> Json | None:
    """Statistics over the time of the run, in which it was idle between iterations, too."""
    idle_s = max(float(end_s[-1] - seconds.sum()), 0.0)
    return _statistics(np.append(values, idle), units, np.append(seconds, idle_s))


def _statistics(values: Numbers, units: str, weights: Numbers | None = None) -> Json | None:
    """Mean, deviation, extremes and percentiles; with weights, over the time that each value held. None of nothing."""
    if not len(values) or (weights is not None and not weights.sum() > 0):
        return None
    mean = float(np.average(values, weights=weights))
    deviation = float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))
    if weights is None:
        levels = np.percentile(values, list(PERCENTILES.values()))
    else:
        held = weights > 0
        values, weights = values[held], weights[held]
        shares = [each / 100 for each in PERCENTILES.values()]
        levels = np.quantile(values, shares, weights=weights, method="inverted_cdf")
    return {
        "units": units,
        "mean": mean,
        "stddev": deviation,
        "min": float(values.min()),
        **dict(zip(PERCENTILES, levels.tolist(), strict=True)),
        "max": float(values.max()),
    }


def _spans(end_s: Numbers) -> list[npt.NDArray[np.intp]]:
    """Iterations by equal spans of time, at most ``MAX_POINTS``; one each where there are fewer."""
    if len(end_s) <= MAX_POINTS:
        return list(np.arange(len(end_s)).reshape(-1, 1))
    edges = np.searchsorted(end_s, np.linspace(0, end_s[-1], MAX_POINTS + 1)[1:-1], side="right")
    return [each for each in np.split(np.arange(len(end_s)), edges) if len(each)]


def _series(end_s: Numbers, values: Numbers, seconds: Numbers, units: str) -> Json:
    """Averages over time, with extremes where several iterations share a point."""
    points = []
    for span in _spans(end_s):
        point: Json = {
            "ts": _timestamp(end_s[span[-1]]),
            "value": float(np.average(values[span], weights=seconds[span])),
        }
        if len(span) > 1:
            point |= {"mean": point["value"], "min": float(values[span].min()), "max": float(values[span].max())}
        points.append(point)
    return {"units": units, "series": points}


def _counter(end_s: Numbers, totals: Numbers, units: str) -> Json:
    """What had been counted by the end of each span."""
    lasts = [span[-1] for span in _spans(end_s)]
    return {"units": units, "series": [{"ts": _timestamp(end_s[at]), "value": float(totals[at])} for at in lasts]}


def _timestamp(at_s: float) -> str:
    """Of the run's clock, which starts at 0: the epoch."""
    return (_EPOCH + timedelta(seconds=float(at_s))).isoformat(timespec="microseconds")


def _length(tokens: npt.NDArray[np.generic]) -> Json:
    lengths = tokens.astype(np.float64)
    shape = "fixed" if lengths.min() == lengths.max() else "other"
    return {"distribution": shape, "value": float(lengths.mean()), "min": int(lengths.min()), "max": int(lengths.max())}


def _known(fields: Mapping[str, Json | None]) -> Json:
    return {name: each for name, each in fields.items() if each is not None}


def _digest(config: Json) -> str:
    return sha256(yaml.safe_dump(config).encode()).hexdigest()[:32]


if __name__ == "__main__":
    sys.exit(main())
