"""What the columns of results are: type, unit, meaning. ``python -m kvbench.schema`` prints docs/columns.md.

The type of a column of ``summary.csv`` has room for what does not exist (a missing value is ``pandas.NA``, or NaN where
the column is ``float64``); records are as the engine left them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

from kvbench.metrics import METRICS
from kvbench.partition import CLASSES

VERSION = 1
"""Of the schema; each manifest says the one it was written under. Raised when a column changes its name, its unit or
its meaning. New columns do not raise it: results that lack them are older, and load."""


class Column(NamedTuple):
    """One column.

    Attributes:
        dtype: pandas' name of its type.
        unit: empty for names, counts, ratios and flags.
        meaning: in a line.
    """

    dtype: str
    unit: str
    meaning: str


def _metric(name: str) -> Column:
    unit, meaning = METRICS[name].unit, METRICS[name].description
    whole = unit in ("bytes", "tokens") or (name.startswith("num_") and not name.endswith("_mean"))
    return Column("boolean" if name == "stable" else "Int64" if whole else "float64", unit, meaning)


SUMMARY: dict[str, Column] = {
    "experiment": Column("string", "", "whose points these are; adhoc for a command without +experiment="),
    "panel": Column("string", "", "part of the experiment's figure"),
    "repeat": Column("Int64", "", "replication: 0, 1, ...; the same one of two systems serves the same requests"),
    "system": Column("string", "", "preset, with what differs from it in brackets: vllm[reservation=max]"),
    "allocator": Column("string", "", "placement of sequences in the pool"),
    "reservation": Column("string", "", "how many slots a sequence is guaranteed"),
    "scheduler": Column("string", "", "who runs when"),
    "copy_on_write": Column("boolean", "", "whether sequences share blocks until they differ"),
    "block_size": Column("Int64", "tokens", "of a block, where memory comes in blocks"),
    "runner": Column("string", "", "simulated, or what computed the tokens: cpu, cuda, kernels"),
    "device": Column("string", "", "where it ran; simulated on the virtual clock"),
    "hardware": Column("string", "", "GPUs whose memory makes the pool"),
    "costs": Column("string", "", "set of iteration costs; of simulated runs"),
    "model": Column("string", "", "the model served"),
    "workload": Column("string", "", "whose requests these are"),
    "workload_source": Column("string", "", "where their lengths come from"),
    "decoding": Column("string", "", "single, parallel samples or beam search"),
    "num_samples": Column("Int64", "", "outputs of a request"),
    "beam_width": Column("Int64", "", "beams of a request"),
    "request_rate": Column("float64", "requests/s", "mean rate of arrivals; missing where none is set"),
    "duration_s": Column("float64", "s", "how long requests arrive"),
    "seed": Column("Int64", "", "of arrivals and lengths"),
    "uses_true_lengths": Column("boolean", "", "whether a part looked at output lengths, which no real system knows"),
    "weights_bytes": Column("Int64", "bytes", "of the model"),
    "activation_bytes": Column("Int64", "bytes", "of an iteration's intermediate results"),
    "reserve_bytes": Column("Int64", "bytes", "kept free"),
    "kv_cache_bytes": Column("Int64", "bytes", "the pool"),
    "num_slots": Column("Int64", "", "the pool in slots: room for K and V of one token in all layers"),
    "num_dropped": Column("Int64", "", "requests left out because they are longer than the model's maximum"),
    "num_clipped": Column("Int64", "", "requests shortened for the same reason"),
    "measure_from_s": Column("float64", "s", "start of the averaging window"),
    "measure_to_s": Column("float64", "s", "its end; missing: the end of the run"),
    "slo_ttft_s": Column("float64", "s", "objective: time to first token"),
    "slo_tpot_s": Column("float64", "s/token", "objective: time per output token after the first"),
    **{name: _metric(name) for name in METRICS},
    "metric": Column("string", "", "of a search for a rate: what has to keep the threshold"),
    "threshold": Column("float64", "", "of a search: the threshold, in the metric's unit"),
    "capacity_req_per_s": Column("float64", "requests/s", "of a search: the rate that is sustained"),
    "trace_capacity_req_per_s": Column("float64", "requests/s", "the same, not corrected for the trace's length"),
    "wall_s": Column("float64", "s", "what the run took; of this machine"),
    "point": Column("string", "", "the point's folder under points/"),
}  # fmt: skip
"""Columns of ``summary.csv``, one row for each point."""

REQUESTS: dict[str, Column] = {
    "id": Column("int32", "", "number of the request"),
    "arrival_s": Column("float64", "s", "when it arrived, on the run's clock"),
    "prompt_len": Column("int32", "tokens", "its prompt"),
    "output_len": Column("int32", "tokens", "its output, each of them where there are several"),
    "num_seqs": Column("int32", "", "its outputs or beams"),
    "first_token_s": Column("float64", "s", "when its first output token came; NaN: never"),
    "finish_s": Column("float64", "s", "when it was done; NaN: never"),
    "num_preemptions": Column("int32", "", "times it lost its memory"),
    "recomputed_tokens": Column("int32", "tokens", "computed once more for that"),
    "preempted_s": Column("float64", "s", "between losing its memory and regaining its place"),
    "rejected": Column("bool", "", "whether it can never be served"),
}
"""Columns of ``requests.parquet``, one row for each request."""

STEPS: dict[str, Column] = {
    "end_s": Column("float64", "s", "when the iteration was over, on the run's clock"),
    "seconds": Column("float64", "s", "what it took"),
    "num_running": Column("int32", "", "requests in the batch"),
    "num_waiting": Column("int32", "", "requests in the queue"),
    "num_prefills": Column("int32", "", "requests of the batch whose prompt is computed"),
    "num_preempted": Column("int32", "", "requests that lost their memory before it"),
    "prefill_tokens": Column("int32", "tokens", "of prompts, computed in it"),
    "context_len": Column("int32", "tokens", "that decoding requests attend to"),
    **{name: Column("int32", "slots", f"of the pool: {name}, see the same share in the summary") for name in CLASSES},
    "largest_free": Column("int32", "slots", "largest piece that can be granted"),
    "num_seqs": Column("int32", "", "samples and beams of the requests in the batch"),
    "shared": Column("int32", "slots", "saved by sharing"),
    "copied": Column("int32", "slots", "copied before it, where sequences forked"),
    "swapped_out": Column("int32", "slots", "moved to the host pool before it"),
    "swapped_in": Column("int32", "slots", "moved back before it"),
    "recomputed": Column("int32", "tokens", "computed once more in it"),
    "recompute_s": Column("float64", "s", "of its seconds, for that"),
    "swap_s": Column("float64", "s", "of its seconds, waiting for blocks on their way"),
}
"""Columns of ``steps.parquet``, one row for each iteration."""

HEADINGS = {
    "capacity_req_per_s": "capacity (requests/s)",
    "normalized_latency_mean_s": "latency (s/token)",
    "ttft_p50_s": "TTFT p50 (s)",
    "ttft_p99_s": "TTFT p99 (s)",
    "throughput_req_per_s": "requests/s",
    "num_running_mean": "batch",
    "token_states_pct": "token states (%)",
    "free_pct": "free (%)",
    "num_preemptions": "preempted",
    "num_rejected": "rejected",
    "stable": "stable",
}
"""The metrics that most people look for, as tables head them."""

TABLES: dict[str, tuple[str, Mapping[str, Column]]] = {
    "summary": ("`summary.csv`: a row for each point", SUMMARY),
    "requests": ("`requests.parquet`: a row for each request of a point", REQUESTS),
    "steps": ("`steps.parquet`: a row for each iteration of a point", STEPS),
}
"""Name -> title and columns."""


def document() -> str:
    """docs/columns.md."""
    parts = [
        "# Columns",
        f"Schema version {VERSION}, printed by `python -m kvbench.schema`; [data.md](data.md) says how to load them.",
    ]
    for name, (title, columns) in TABLES.items():
        rows = [f"| `{column}` | {kind} | {unit} | {meaning} |" for column, (kind, unit, meaning) in columns.items()]
        parts += [
            f"## {name}",
            f"{title}.",
            "\n".join(["| column | type | unit | meaning |", "|---|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
