"""Results folders written by hand, so that figures and claims can be held against numbers that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kvbench.figures.fig_sharing import SERIES
from kvbench.figures.rates import POOLS
from kvbench.paper.points import latency_panels, published
from kvbench.records import write_parquet
from kvbench.results import COLUMNS, Results, write_csv, write_json

Row = dict[str, Any]

BASE: Row = {
    "experiment": "synthetic",
    "repeat": 0,
    "system": "vllm",
    "block_size": 16,
    "runner": "simulated",
    "device": "simulated",
    "costs": "paper_engine",
    "model": "opt_13b",
    "hardware": "a100_40gb",
    "workload": "sharegpt",
    "workload_source": "ShareGPT pairs of the authors' artifact",
    "seed": 0,
    "num_slots": 15728,
    "kv_cache_bytes": 15728 * 819_200,
    "weights_bytes": 25_706_946_560,
    "num_samples": 1,
    "beam_width": 1,
    "measure_from_s": 0,
    "duration_s": 3600,
    "stable": True,
    "num_censored": 0,
    "num_rejected": 0,
}
CONF = Path(__file__).parents[1] / "conf"
NUM_SLOTS = {"opt_13b": 15728, "llama_13b": 15728, "opt_66b": 9696, "opt_175b": 60064}
SOURCES = {
    "sharegpt": BASE["workload_source"],
    "alpaca": "Alpaca, a sample of its pairs",
    "wmt16": "WMT16 English-German",
    "sharegpt_chat": "ShareGPT V3 conversations, rejoined from pieces",
}


def write_results(folder: Path, rows: list[Row], arrivals: str = "kvbench.workloads.arrivals.Paper") -> Results:
    """A folder with these rows, completed from ``BASE``; every point has a configuration.

    A row's "options" are further ones of its workload, its "config" further parts of its configuration.
    """
    complete = [{**BASE, "point": f"p{i}", "options": {}, "config": {}, **row} for i, row in enumerate(rows)]
    configs = [
        {"workload": {"arrivals": {"_target_": arrivals}} | row.pop("options")} | row.pop("config") for row in complete
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "summary.csv", COLUMNS, complete)
    for row, config in zip(complete, configs, strict=True):
        point = folder / "points" / row["point"]
        point.mkdir(parents=True, exist_ok=True)
        (point / "config.yaml").write_text(yaml.safe_dump(config))
    return Results(folder)


def throughput_rows(scale: float = 1.0, figure: str = "fig12") -> list[Row]:
    """Fig. 12, or another of its kind, as published.

    Every curve has its own points, and the next one on the line by which it leaves the plot.

    Where the paper has two points at one rate their mean stands. ``scale`` multiplies all latencies.
    """
    rows = []
    for letter, panel in latency_panels(figure).items():
        for system, curve in panel.curves.items():
            known: dict[float, list[float]] = {}
            for point in curve.measurements:
                known.setdefault(point.x, []).append(point.y)
            if curve.next_rate is not None:
                last, leaves = curve.measurements[-1], curve.points[-1]
                rise = (leaves.y - last.y) / (leaves.x - last.x)
                known[curve.next_rate] = [last.y + rise * (curve.next_rate - last.x)]
            rows += [
                {
                    "panel": letter,
                    "system": system,
                    "model": panel.model,
                    "hardware": published()["table1"]["models"][POOLS.get(panel.model, panel.model)]["hardware"],
                    "num_slots": NUM_SLOTS[panel.model],
                    "workload": panel.workload,
                    "workload_source": SOURCES[panel.workload],
                    "duration_s": panel.duration_s,
                    "num_samples": panel.num_samples,
                    "beam_width": panel.beam_width,
                    "options": {
                        name: value[system] if isinstance(value, dict) else value
                        for name, value in panel.options.items()
                    },
                    "costs": "fastertransformer" if system == "fastertransformer" else "paper_engine",
                    "block_size": None if system == "fastertransformer" else 16,
                    "request_rate": rate,
                    "normalized_latency_mean_s": scale * sum(values) / len(values),
                }
                for rate, values in known.items()
            ]
    return rows


def prefix_rows() -> list[Row]:
    """Fig. 16 as published, both systems under the authors' limit of sequences."""
    names = {"vllm": "vllm[system.max_num_seqs=256]"}
    rows = throughput_rows(figure="fig16")
    return [row | {"system": names.get(row["system"], row["system"])} for row in rows]


def waste_rows() -> list[Row]:
    """Fig. 2 as published."""
    paper = published()["fig2"]
    window = {name: paper[name] for name in ("request_rate", "duration_s", "measure_from_s", "measure_to_s")}
    rows = []
    for system, shares in paper["pct"].items():
        unfilled = shares.get("reservation", shares.get("unfilled"))
        known = {
            "token_states": shares["token_states"],
            "reserved": unfilled,
            "overreserved": shares.get("internal", 0.0),
        }
        known |= {"padding": 2.0 if system == "orca_pow2" else 0.0}
        known["free"] = 100.0 - sum(known.values())
        rows.append({"system": system, **window, **{f"{name}_iteration_pct": share for name, share in known.items()}})
    return rows


def batch_rows() -> list[Row]:
    """Fig. 13 as published, for both trace lengths."""
    return [
        {
            "panel": letter,
            "system": system,
            "workload": panel["workload"],
            "workload_source": SOURCES[panel["workload"]],
            "request_rate": panel["request_rate"],
            "duration_s": duration_s,
            "measure_from_s": 600,
            "num_running_iteration_mean": batch,
        }
        for letter, panel in published()["fig13"]["panels"].items()
        for system, batch in panel["num_requests"].items()
        for duration_s in (900, 3600)
    ]


def sharing_rows() -> list[Row]:
    """Fig. 15 as published, six seeds that scatter around it for ShareGPT."""
    paper = published()["fig15"]
    window = {name: paper[name] for name in ("request_rate", "duration_s", "measure_from_s", "measure_to_s")}
    return [
        {
            "panel": panel,
            "repeat": repeat,
            "workload": series.workload,
            "workload_source": SOURCES[series.workload],
            **window,
            series.column: width,
            "sharing_saved_pct": percent + repeat - (series.num_seeds - 1) / 2,
            "config": {"runner": {"beams": dict([series.beams] if series.beams else [])}},
        }
        for panel, series in SERIES.items()
        for width, percent in series.papers.items()
        for repeat in range(series.num_seeds)
    ]


def block_size_rows() -> list[Row]:
    """Fig. 18 (b) as published, and curves without the factor that are flat."""
    paper = published()["fig18b"]
    return [
        {
            "panel": panel,
            "workload": workload,
            "workload_source": SOURCES[workload],
            "request_rate": entry["request_rate"],
            "duration_s": paper["duration_s"],
            "block_size": size,
            "normalized_latency_mean_s": latency,
        }
        for workload, entry in paper["panels"].items()
        for size, published_s in entry["latency_s"]
        for panel, latency in ((workload, published_s), (f"{workload}_flat", 0.05))
    ]


def swap_rows() -> list[Row]:
    """Fig. 19 (b) as published."""
    paper = published()["fig19b"]
    preemption: Row = {"num_preemptions": 1234, "recomputed_tokens": 567890, "swapped_out_bytes": 10**12}
    preemption |= {"recompute_s": 30.0, "swap_s": 15.5, "lost_s": 45.5, "simulated_s": 700.0, "preempted_s": 2468.0}
    conditions = {name: paper[name] for name in ("request_rate", "duration_s")}
    return [
        {"panel": kind, **conditions, "block_size": size, "normalized_latency_mean_s": latency, **preemption}
        for kind, points in paper["latency_s"].items()
        for size, latency in points
    ]


def price_rows() -> list[Row]:
    """Points with the prices that ship, from which Fig. 19 (a) is computed."""
    costs, model = (
        yaml.safe_load((CONF / group).read_text(encoding="utf-8"))
        for group in ("costs/paper_engine.yaml", "model/opt_13b.yaml")
    )
    config = {"costs": {"name": "paper_engine", **costs["models"]["opt_13b"]}, "model": model}
    sizes = [size for size, _ in published()["fig19a"]["time_ms"]["swap_in"]]
    return [{"block_size": size, "workload": "fixed", "config": config} for size in sizes]


def growth_rows() -> list[Row]:
    """Fig. 1 (right) as published: the memory of every batch, and the throughput where it is known."""
    paper = published()["fig1_right"]
    rows = []
    for system, name in (("orca_max", "existing"), ("vllm", "vllm")):
        throughput = np.array(paper["throughput_tok_per_s"])
        for batch, memory_gb in paper["memory_gb"][name][1:]:
            used_bytes = memory_gb * 1e9 - BASE["weights_bytes"]
            rows.append(
                {
                    "system": f"{system}[scheduler.max_num_seqs={batch:g}]",
                    "request_rate": 4,
                    "num_running_iteration_mean": batch,
                    "throughput_tok_per_s": float(np.interp(batch, throughput[:, 0], throughput[:, 1])),
                    "free_iteration_pct": 100 * (1 - used_bytes / BASE["kv_cache_bytes"]),
                }
            )
    return rows


def layout_results(folder: Path) -> Results:
    """Table 1 as printed, on GPUs that report what makes it so."""
    rows = []
    for model, memory in published()["table1"]["models"].items():
        rows.append({"model": model, "hardware": memory["hardware"]})
    results = write_results(folder, rows)
    for row, (model, memory) in zip(rows, published()["table1"]["models"].items(), strict=True):
        parts = {
            "weights_bytes": int(memory["weights_gb"] * 1e9),
            "activation_bytes": 10**9,
            "reserve_bytes": 3 * 10**9,
            "kv_cache_bytes": int(memory["kv_cache_gib"] * 2**30),
        }
        slot = parts["kv_cache_bytes"] // memory["num_slots"]
        capacity = {"model": model, "total_bytes": sum(parts.values()), "bytes_per_slot": slot, **parts}
        write_json(
            folder / "points" / f"p{rows.index(row)}" / "manifest.json",
            {"capacity": capacity | {"num_slots": memory["num_slots"]}},
        )
    return results


def lengths_results(folder: Path) -> Results:
    """Fig. 11 with a thousand requests that have the published means."""
    rng = np.random.default_rng(0)
    rows: list[Row] = [{"panel": "a"}, {"panel": "b", "workload": "alpaca", "workload_source": SOURCES["alpaca"]}]
    results = write_results(folder, rows)
    for i, workload in enumerate(("sharegpt", "alpaca")):
        columns = {}
        for which, mean in published()["fig11"]["mean_len"][workload].items():
            lengths = np.maximum(rng.exponential(mean, 1000), 1).astype(np.int32)
            missing = round(mean * 1000) - int(lengths.sum())
            lengths[lengths.argsort()[-abs(missing) :]] += np.sign(missing)  # one token each, of the longest
            columns[f"{which}_len"] = lengths
        write_parquet(folder / "points" / f"p{i}" / "requests.parquet", columns)
    return results
