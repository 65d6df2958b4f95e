"""Table 1 and Fig. 1 (left): what a model leaves of the GPUs' memory for its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kvbench.figures import bars, style
from kvbench.figures.frames import difference, select
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, stated
from kvbench.paper.points import published
from kvbench.partition import Part
from kvbench.results import Results

GB, GIB = 1e9, 2**30
PARTS = {
    "weights_bytes": Part("parameters", "#8c8c8c"),
    "kv_cache_bytes": Part("KV cache", "#0072B2"),
    "activation_bytes": Part("activations", "#E69F00"),
    "reserve_bytes": Part("reserve, workspace", "#d9d9d9", "////"),
}


def draw(results: Results) -> dict[str, Figure]:
    """A bar for each model."""
    capacities = _capacities(results)
    if not capacities:
        return {}
    with style.context():
        note = (
            "Computed from the models' shapes and the memory that the GPUs report; hollow: the paper's Table 1, as "
            "shares of the GPUs' nominal memory."
        )
        figure = style.new_figure(style.COLUMN_IN, 2.3, note)
        axes = figure.subplots()
        for x, (model, capacity) in enumerate(capacities.items()):
            heights = [100 * capacity[name] / capacity["total_bytes"] for name in PARTS]
            bars.stack(axes, x, list(PARTS.values()), heights, labelled_from=9)
            paper = published()["table1"]["models"][model]
            weights = 100 * paper["weights_gb"] / paper["total_gb"]
            bars.paper(axes, x, [weights, weights + 100 * paper["kv_cache_gib"] / paper["total_gb"]])
        axes.set_xticks(range(len(capacities)), [_tick(capacity) for capacity in capacities.values()])
        axes.set_xlim(-0.5, len(capacities) - 0.5)
        axes.set_ylim(0, 100)
        axes.set_ylabel("Share of the GPUs' memory (%)")
        axes.grid(visible=False, axis="x")
        style.put_legend(figure, bars.legend(list(PARTS.values())), 3)
    return {"fig_memory_layout": figure}


def table(results: Results) -> str | None:
    """Table 1, computed and printed."""
    rows = []
    for model, capacity in _capacities(results).items():
        weights_gb, pool_gib, slots = _computed(capacity)
        papers = [str(number) for number in _printed(model)]
        rows.append(
            (_name(model), f"{weights_gb:.1f}", papers[0], f"{pool_gib:.2f}", papers[1], f"{slots:.0f}", papers[2])
        )
    header = ("model", "parameters GB", "paper", "KV cache GiB", "paper", "slots", "paper")
    return aligned([header, *rows]) if rows else None


def claims(results: Results) -> list[Claim]:
    """Table 1 line by line, then the two shares of Fig. 1."""
    capacities = _capacities(results)
    rows = []
    for model, paper in published()["table1"]["models"].items():
        measured, obstacle = None, None
        if model in capacities:
            measured = _computed(capacities[model])
            obstacle = difference(select(results.summary, model=model), hardware=paper["hardware"])
        for column, name in enumerate(("table1_weights", "table1_kv_cache", "table1_slots")):
            statement = stated(name, value=_printed(model)[column], model=_name(model))
            value = measured[column] if measured else None
            rows.append(statement.judge(value, missing=f"no result for {model}", obstacle=obstacle))
    text = published()["fig1_left"]
    capacity = capacities.get(text["model"])
    for name, part, percent in (
        ("fig1_weights", "weights_bytes", text["weights_pct"]),
        ("fig1_kv_cache", "kv_cache_bytes", text["kv_cache_pct"]),
    ):
        share = 100 * capacity[part] / capacity["total_bytes"] if capacity else None
        rows.append(stated(name, value=percent).judge(share, missing=f"no result for {text['model']}"))
    return rows


def _computed(capacity: Mapping[str, Any]) -> tuple[float, float, float]:
    """GB of weights; GiB and slots that are left for the KV cache, whatever pool the run was given."""
    spent = sum(capacity[name] for name in ("weights_bytes", "activation_bytes", "reserve_bytes"))
    pool_bytes = capacity["total_bytes"] - spent
    return capacity["weights_bytes"] / GB, pool_bytes / GIB, pool_bytes // capacity["bytes_per_slot"]


def _printed(model: str) -> tuple[float, float, float]:
    """The same from Table 1."""
    paper = published()["table1"]["models"][model]
    return paper["weights_gb"], paper["kv_cache_gib"], paper["num_slots"]


def _capacities(results: Results) -> dict[str, Mapping[str, Any]]:
    """Model of Table 1 -> the capacity report of its first row."""
    summary = results.summary
    found = {}
    for model in published()["table1"]["models"]:
        rows = select(summary, model=model)
        if len(rows):
            found[model] = results.manifest(rows.iloc[0])["capacity"]
    return found


def _name(model: str) -> str:
    return model.upper().replace("_", "-")


def _tick(capacity: Mapping[str, Any]) -> str:
    gpus = published()["table1"]["models"][capacity["model"]]["gpus"]
    return f"{_name(capacity['model'])}\n{gpus}\n{capacity['num_slots']:,} slots"
