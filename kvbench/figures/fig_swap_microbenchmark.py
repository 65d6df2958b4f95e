"""Fig. 19 (a): what it takes to swap 256 tokens out and in again, or to compute them again, by block size.

By the simulator's prices for the paper's machine, and, with ``runner=cpu``, measured on this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvbench.capacity import model_of
from kvbench.figures import blocks, frames, style
from kvbench.figures.frames import difference, obstacle, where
from kvbench.figures.style import Look
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, expectation, stated
from kvbench.paper.points import published
from kvbench.results import Results
from kvbench.runners.simulated import NOT_COEFFICIENTS, IterationCosts
from kvbench.runners.swap_benchmark import medians_ms

LOOKS = {
    "recompute": Look("recompute", "#D55E00", "s", (0, (4, 1.2))),
    "swap_in": Look("swap in", "#009E73", "D", (0, (6, 1, 1, 1, 1, 1))),
    "swap_out": Look("swap out", "#E69F00", "^", (0, (4, 1, 1, 1))),
    "both": Look("in and out", "#0072B2", "o", "-"),
}
FLAT = 0.75
"""Fastest over slowest recompute that still is flat: a machine that does other things does not give the same twice."""
MODEL = "opt_125m"
"""Of the experiment's real points."""
Curves = Mapping[str, Mapping[int, float]]
"""What is done -> block size -> milliseconds."""


def draw(results: Results) -> dict[str, Figure]:
    """The paper's machine, priced and as published; beside it this one, where it was measured. Four curves each."""
    priced, timed = simulated(results), measured(results)
    if not (priced or timed):
        return {}
    with style.context():
        figure = style.new_figure(style.PAGE_IN if timed else style.COLUMN_IN, 2.4, _footnote(results))
        left, *others = figure.subplots(1, 2 if timed else 1, squeeze=False).flat
        blocks.draw(left, priced, LOOKS)
        blocks.scale(left, list(papers()["both"]))
        for kind, points in papers().items():
            style.plot_hollow(left, sorted(points.items()), LOOKS[kind].color, LOOKS[kind].marker, size=6)
        left.set_ylim(bottom=0)
        for axes in others:
            left.set_title("OPT-13B, A100-40GB")
            blocks.draw(axes, timed, LOOKS)
            axes.set_yscale("log")
            axes.set_title(where(_real(results)))
        for axes in (left, *others):
            axes.set_ylabel("Time (ms)")
        handles = [*style.legend(LOOKS), style.hollow("o")]
        style.put_legend(figure, handles, 5 if timed else 3)
    return {"fig_swap_microbenchmark": figure}


def _footnote(results: Results) -> str:
    tokens, scale = _paper()["prompt_len"], _paper()["recompute_scale"]
    costs = ", ".join(sorted(set(results.summary["costs"].dropna())))
    parts = [f"Computed from simulated prices (costs: {costs}): OPT-13B, {tokens} tokens"] if costs else []
    parts.append(
        f"Hollow: the paper's points, recompute divided by {scale:g}, by which the authors' plotting script multiplies "
        "it and does not say why"
    )
    if len(_real(results)):
        parts.append(f"Measured: medians; {tokens} tokens in blocks that lie at random, moved within the host's memory")
    return ". ".join(parts) + "."


def table(results: Results) -> str | None:
    """Every point, beside the paper's; and what was measured here."""
    lines = []
    if curves := simulated(results):
        lines.append(f"Milliseconds; the paper's recompute is divided by {_paper()['recompute_scale']:g}")
        lines.append(_aligned({"simulated": curves, "paper": papers()}))
    if curves := measured(results):
        lines.append(f"Milliseconds; {where(_real(results))}")
        lines.append(_aligned({"measured": curves}))
    return "\n".join(lines) or None


def _aligned(ways: Mapping[str, Curves]) -> str:
    """Columns for what is done, each in every way."""
    kinds = next(iter(ways.values()))
    columns = {f"{way}: {LOOKS[kind].label}": curves[kind] for kind in kinds for way, curves in ways.items()}
    header, *rows = blocks.rows(columns, {})
    above, below = zip(("block", "size"), *(name.split(": ") for name in header[1:]), strict=True)
    return aligned([above, below, *rows])


def claims(results: Results) -> list[Claim]:
    """Every point; who is faster with small and with large blocks; and the bound of the text."""
    curves = simulated(results)
    why_not = _obstacle(results) if curves else None
    rows = []
    for kind in ("swap_out", "swap_in", "recompute"):
        for size, milliseconds in papers()[kind].items():
            statement = stated("fig19a_point", kind, value=milliseconds, what=LOOKS[kind].label, size=str(size))
            found = curves.get(kind, {}).get(size)
            rows.append(statement.judge(found, missing=f"no result with block size {size}", obstacle=why_not))
    sizes = list(papers()["both"])
    known = all(size in curves.get("both", {}) for size in sizes)
    ratios = {size: curves["recompute"][size] / curves["both"][size] for size in sizes} if known else {}
    for name, chosen in (
        ("fig19a_small", sizes[:1]),
        ("fig19a_large", sizes[-1:]),
        ("fig19a_bound", sizes),
    ):
        largest = max(ratios[size] for size in chosen) if ratios else None
        rows.append(stated(name).judge(largest, missing="needs every block size", obstacle=why_not))
    return rows + _expected(results)


def _expected(results: Results) -> list[Claim]:
    """What of the paper's statements kvbench expects on any machine, where this one was measured."""
    curves = measured(results)
    if not curves:
        return []
    fewest, *_, most = sizes = list(papers()["both"])
    flat = gain = None
    if all(size in curves["both"] for size in sizes):
        flat = min(curves["recompute"].values()) / max(curves["recompute"].values())
        gain = curves["both"][fewest] / curves["both"][most]
    why_not = obstacle(_real(results), model=MODEL)
    expected = (
        (expectation("measured: recompute takes as long with every block size, fastest over slowest", FLAT), flat),
        (expectation(f"measured: swapping out and in, blocks of {fewest} over blocks of {most}", 1.0), gain),
    )
    return [each.judge(found, missing="needs every block size", obstacle=why_not) for each, found in expected]


def simulated(results: Results) -> dict[str, dict[int, float]]:
    """What is done -> block size -> milliseconds, by the prices of the points that were simulated."""
    curves: dict[str, dict[int, float]] = {}
    for _, row in frames.simulated(results.summary).iterrows():
        size = int(row["block_size"])
        for kind, milliseconds in prices(results.config(row), size).items():
            curves.setdefault(kind, {})[size] = milliseconds
    return {kind: dict(sorted(points.items())) for kind, points in curves.items()}


def measured(results: Results) -> dict[str, dict[int, float]]:
    """What is done -> block size -> milliseconds, of the points that ran on this machine with ``records=full``."""
    curves: dict[str, dict[int, float]] = {kind: {} for kind in LOOKS}
    for _, row in _real(results).iterrows():
        size, found = int(row["block_size"]), medians_ms(results.steps(row))
        for kind, milliseconds in {**found, "both": found["swap_in"] + found["swap_out"]}.items():
            curves[kind][size] = milliseconds
    return {kind: dict(sorted(points.items())) for kind, points in curves.items() if points}


def _real(results: Results) -> pd.DataFrame:
    return frames.measured(results.summary)


def prices(config: Mapping[str, Any], block_size: int) -> dict[str, float]:
    """What is done -> milliseconds, for the blocks of the paper's prompt.

    Args:
        config: of a simulated point.
        block_size: of its blocks, which are swapped one by one, in pieces of one layer's K or V.
    """
    costs = IterationCosts(**{key: value for key, value in config["costs"].items() if key not in NOT_COEFFICIENTS})
    model = model_of(config)
    num_tokens = _paper()["prompt_len"]
    num_blocks = -(-num_tokens // block_size)
    num_pieces, num_bytes = 2 * model.num_layers * num_blocks, num_blocks * block_size * model.bytes_per_slot
    swap_in = costs.swap_ms(num_pieces, num_bytes, out=False)
    swap_out = costs.swap_ms(num_pieces, num_bytes, out=True)
    recompute = costs.prompt_alone_ms(num_tokens)
    return {"recompute": recompute, "swap_in": swap_in, "swap_out": swap_out, "both": swap_in + swap_out}


def papers() -> dict[str, dict[int, float]]:
    """What is done -> block size -> the paper's milliseconds, without the factor on recompute."""
    found = {kind: blocks.papers(points) for kind, points in _paper()["time_ms"].items()}
    found["recompute"] = {size: value / _paper()["recompute_scale"] for size, value in found["recompute"].items()}
    found["both"] = {size: value + found["swap_out"][size] for size, value in found["swap_in"].items()}
    return found


def _paper() -> dict[str, Any]:
    return dict(published()["fig19a"])


def _obstacle(results: Results) -> str | None:
    rows = frames.simulated(results.summary)
    return difference(rows, model="opt_13b", hardware="a100_40gb", costs="paper_engine")
