"""What a page carries of single runs: iterations, requests, memory maps, each within a number of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvbench.figures import style
from kvbench.figures.memory_map import PURPOSES, SHARED, WAIT, Group, Mapped
from kvbench.memory_map import Purpose
from kvbench.partition import CLASSES
from kvbench.records import Columns
from kvbench.report.packing import packed, size
from kvbench.report.tables import Row
from kvbench.report.timeline import COUNTED, bucketed, columns_of
from kvbench.results import Results

_MOST_BUCKETS, _FEWEST_BUCKETS = 6000, 100
_FEWEST_REQUESTS = 100
_NEVER = -1.0


def run_content(results: Results, row: Row, max_bytes: int) -> dict[str, Any] | None:
    """Iterations and requests of a point, coarse enough for so many bytes; None where it left neither."""
    folder = results.folder(row)
    content: dict[str, Any] = {}
    if (folder / "steps.parquet").is_file() and len((steps := results.steps(row))["end_s"]):
        content["steps"] = _steps_content(steps, int(row["num_slots"]), max_bytes * 2 // 3)
    if (folder / "requests.parquet").is_file() and len((requests := results.requests(row))["id"]):
        content["requests"] = _requests_content(requests, max_bytes // 3)
    return content or None


def _steps_content(steps: Columns, num_slots: int, max_bytes: int) -> dict[str, Any]:
    classes = [name for name in CLASSES if steps[name].any()]
    num_buckets = _MOST_BUCKETS
    while True:
        buckets = bucketed(steps, num_slots, num_buckets)
        content = packed(columns_of(buckets, (*COUNTED, *classes)))
        if size(content) <= max_bytes or num_buckets <= _FEWEST_BUCKETS:
            break
        num_buckets = max(min(num_buckets, len(buckets.edges_s)) // 2, _FEWEST_BUCKETS)
    return {
        "num_iterations": len(steps["end_s"]),
        "num_buckets": len(buckets.edges_s) - 1,
        "is_exact": buckets.is_exact,
        "num_slots": num_slots,
        "classes": classes,
        "packed": content,
    }


def _requests_content(requests: Columns, max_bytes: int) -> dict[str, Any]:
    order = np.argsort(requests["arrival_s"], kind="stable")
    kept, every = order, 1
    while True:
        content = packed(_request_columns({name: column[kept] for name, column in requests.items()}))
        if size(content) <= max_bytes or len(kept) <= _FEWEST_REQUESTS:
            break
        every *= 2
        kept = order[::every]
    return {"num_requests": len(order), "num_kept": len(kept), "every": every, "packed": content}


def _request_columns(requests: Columns) -> Columns:
    found = {name: requests[name] for name in ("id", "prompt_len", "output_len", "num_preemptions")}
    for name in ("arrival_s", "first_token_s", "finish_s"):
        found[name] = np.nan_to_num(requests[name].astype(np.float64), nan=_NEVER)
    return found


def map_content(group: Group) -> dict[str, Any]:
    """The maps of runs that are shown side by side."""
    requests = group.runs[0].requests
    last_s = float(requests["arrival_s"].max(initial=0.0))
    name = f"{group.name.replace('_', ' ')}: {len(requests['id'])} requests that arrive within {last_s:.3g} s"
    return {"name": name, "end_s": max(run.end_s for run in group.runs), "runs": list(map(_map, group.runs))}


def _map(run: Mapped) -> dict[str, Any]:
    memory = run.memory
    order = np.argsort(memory.spans["from_step"], kind="stable")
    spans = {name: column[order] for name, column in memory.spans.items()}
    counts = {name: run.steps[name] for name in COUNTED}
    return {
        "label": run.label,
        "num_slots": memory.num_slots,
        "block_size": memory.block_size,
        "source": run.source,
        "spans": packed(spans),
        "steps": packed({"start_s": memory.start_s, "end_s": memory.end_s, **counts}),
    }


def map_size(content: dict[str, Any]) -> int:
    """Bytes that the maps of a group take in a page."""
    return sum(size(run[name]) for run in content["runs"] for name in ("spans", "steps"))


def palette() -> dict[str, Any]:
    """The colours of the figures, for charts and maps."""
    return {
        "classes": {name: part.color for name, part in CLASSES.items()},
        "purposes": [{"label": PURPOSES[each].label, "color": PURPOSES[each].color} for each in Purpose],
        "shared": {"label": SHARED.label, "color": SHARED.color},
        "wait": WAIT,
        "owners": [look.color for look in style.SYSTEMS.values()][1:],
    }
