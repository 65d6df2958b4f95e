"""Fig. 2: what the KV pool holds on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from kvbench.figures import bars, style
from kvbench.figures.frames import difference, footnote, other_lengths, select, systems, value, way
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, stated
from kvbench.paper.points import published
from kvbench.partition import CLASSES
from kvbench.results import Results

PARTS = {
    "token_states": CLASSES["token_states"],
    "reservation": CLASSES["reserved"]._replace(label="reservation"),
    "internal": CLASSES["overreserved"]._replace(label="internal"),
    "external": CLASSES["free"]._replace(label="external & others"),
}
"""The paper's segments, from bottom to top."""
SUMS = {
    "token_states": ("token_states",),
    "reservation": ("reserved",),
    "internal": ("overreserved",),
    "external": ("padding", "free"),
    "allocated": ("token_states", "reserved", "overreserved", "padding"),
    "unfilled": ("reserved", "overreserved", "padding"),
}
"""Segment -> the ledger's classes it sums; the last two are what vLLM's small segments mean."""
LABELS = {
    "token_states": "token states",
    "reservation": "reservation",
    "internal": "internal fragmentation",
    "external": "external fragmentation & others",
    "allocated": "allocated",
    "unfilled": "allocated and unfilled",
}


def draw(results: Results) -> dict[str, Figure]:
    """A stacked bar for each system."""
    summary = results.summary
    looks = style.looks(systems(summary))
    if not looks:
        return {}
    groups = {look.label: select(summary, system=system) for system, look in looks.items()}
    papers = [_boundaries(published()["fig2"]["pct"].get(system)) for system in looks]
    return {"fig_memory_waste": draw_groups(groups, papers)}


def draw_groups(
    groups: Mapping[str, pd.DataFrame], papers: Sequence[Sequence[float]] = (), width_in: float = style.COLUMN_IN
) -> Figure:
    """A stacked bar for each group of points.

    Args:
        groups: label -> rows of a summary.
        papers: of each group the boundaries that the paper plots, beside its bar; none: nobody's.
        width_in: of the figure.
    """
    rows = pd.concat(groups.values())
    with style.context():
        hollow = "; hollow: the paper's bars" if papers else ""
        note = footnote(rows, f"Bars: {way(rows)}, means over iterations{hollow}")
        figure = style.new_figure(width_in, 2.5, note)
        axes = figure.subplots()
        for x, mine in enumerate(groups.values()):
            found = segments(mine)
            bars.stack(axes, x, list(PARTS.values()), [found[name] or 0.0 for name in PARTS], labelled_from=5)
            if papers:
                bars.paper(axes, x, papers[x])
        is_narrow = width_in < style.PAGE_IN
        axes.set_xticks(range(len(groups)), [label.replace(" ", "\n", 1) if is_narrow else label for label in groups])
        axes.set_xlim(-0.5, len(groups) - 0.4)
        axes.set_ylim(0, 100)
        axes.set_ylabel("Share of the KV pool (%)")
        axes.grid(visible=False, axis="x")
        handles = bars.legend(list(PARTS.values()))
        if not papers:
            handles.pop()
        style.put_legend(figure, handles, 3 if is_narrow else 5)
    return figure


def table(results: Results) -> str | None:
    """Every segment, beside the paper's."""
    summary = results.summary
    rows = []
    for system, look in style.looks(systems(summary)).items():
        found = segments(select(summary, system=system))
        for name, papers in published()["fig2"]["pct"].get(system, dict.fromkeys(PARTS)).items():
            cells = ("-" if number is None else f"{number:.2f}" for number in (found[name], papers))
            rows.append((look.label, LABELS[name], *cells))
    return aligned([("system", "% of the pool", way(summary), "paper"), *rows], left=2) if rows else None


def claims(results: Results) -> list[Claim]:
    """Every segment, then the range that the text states for existing systems."""
    summary = results.summary
    paper = published()["fig2"]
    rows: list[Claim] = []
    tokens: dict[str, float | None] = {}
    obstacles: dict[str, str | None] = {}
    for system, expected in paper["pct"].items():
        mine = select(summary, system=system)
        found = segments(mine)
        obstacles[system] = _obstacle(mine) if len(mine) else None
        tokens[system] = found["token_states"]
        label = style.SYSTEMS[system].label
        for name, percent in expected.items():
            statement = stated("fig2_segment", name, value=percent, system=label, segment=LABELS[name])
            rows.append(statement.judge(found[name], missing=f"no result of {label}", obstacle=obstacles[system]))
    existing = [system for system in tokens if system != "vllm"]
    known = [share for system in existing if (share := tokens[system]) is not None]
    obstacle = next((reason for system in existing if (reason := obstacles[system])), None)
    for name, choose in (("fig2_lowest", min), ("fig2_highest", max)):
        measured = choose(known) if len(known) == len(existing) else None
        rows.append(stated(name).judge(measured, missing="needs all three Orca systems", obstacle=obstacle))
    return rows


def segments(rows: pd.DataFrame) -> dict[str, float | None]:
    """Percent of the pool, means over iterations, of every segment; None without a result."""
    found = {}
    for name, classes in SUMS.items():
        shares = [value(rows, f"{each}_iteration_pct") for each in classes]
        known = [share for share in shares if share is not None]
        found[name] = sum(known) if len(known) == len(shares) else None
    return found


def _boundaries(paper: dict[str, float] | None) -> list[float]:
    """Where the paper's segments end: all but the last, or vLLM's two that mean what they say."""
    if paper is None:
        return []
    if "allocated" in paper:
        return [paper["token_states"], paper["allocated"]]
    token_states, reservation, internal = (paper[name] for name in ("token_states", "reservation", "internal"))
    return [token_states, token_states + reservation, token_states + reservation + internal]


def _obstacle(rows: pd.DataFrame) -> str | None:
    paper = published()["fig2"]
    return other_lengths(rows, "sharegpt") or difference(
        rows,
        model="opt_13b",
        hardware="a100_40gb",
        workload="sharegpt",
        costs="paper_engine",
        block_size=16,
        **{name: paper[name] for name in ("request_rate", "duration_s", "measure_from_s", "measure_to_s")},
    )
