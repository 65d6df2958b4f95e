"""Fig. 19 (a): what it takes to swap 256 tokens out and in again, or to compute them again, by block size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kvbench.capacity import model_of
from kvbench.figures import blocks, style
from kvbench.figures.frames import difference, select
from kvbench.figures.style import Look
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, stated
from kvbench.paper.points import published
from kvbench.results import Results
from kvbench.runners.simulated import NOT_COEFFICIENTS, IterationCosts

LOOKS = {
    "recompute": Look("recompute", "#D55E00", "s", (0, (4, 1.2))),
    "swap_in": Look("swap in", "#009E73", "D", (0, (6, 1, 1, 1, 1, 1))),
    "swap_out": Look("swap out", "#E69F00", "^", (0, (4, 1, 1, 1))),
    "both": Look("in and out", "#0072B2", "o", "-"),
}
Curves = Mapping[str, Mapping[int, float]]
"""What is done -> block size -> milliseconds."""


def draw(results: Results) -> dict[str, Figure]:
    """One panel, four curves."""
    curves = simulated(results)
    if not curves:
        return {}
    paper = papers()
    with style.context():
        costs = ", ".join(sorted(set(results.summary["costs"].dropna())))
        tokens, scale = _paper()["prompt_len"], _paper()["recompute_scale"]
        note = (
            f"Computed from simulated prices (costs: {costs}): OPT-13B, {tokens} tokens. Hollow: the paper's points, "
            f"recompute divided by {scale:g}, by which the authors' plotting script multiplies it and does not say why."
        )
        figure = style.new_figure(style.COLUMN_IN, 2.4, note)
        axes = figure.subplots()
        blocks.draw(axes, curves, LOOKS)
        for kind in curves:
            style.plot_hollow(axes, sorted(paper[kind].items()), LOOKS[kind].color, LOOKS[kind].marker, size=6)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("Time (ms)")
        handles = [*style.legend({kind: LOOKS[kind] for kind in curves}), style.hollow("o")]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return {"fig_swap_microbenchmark": figure}


def table(results: Results) -> str | None:
    """Every point, beside the paper's."""
    curves = simulated(results)
    if not curves:
        return None
    paper = papers()
    mine = {f"simulated: {LOOKS[kind].label}": points for kind, points in curves.items()}
    theirs = {f"paper: {LOOKS[kind].label}": paper[kind] for kind in curves}
    columns = {name: points for pair in zip(mine.items(), theirs.items(), strict=True) for name, points in pair}
    header, *rows = blocks.rows(columns, {})
    stacked = [tuple(name.partition(": ")[0] for name in header), tuple(name.partition(": ")[2] for name in header)]
    stacked[0], stacked[1] = ("block", *stacked[0][1:]), ("size", *stacked[1][1:])
    scale = _paper()["recompute_scale"]
    return f"Milliseconds; the paper's recompute is divided by {scale:g}\n{aligned([*stacked, *rows])}"


def claims(results: Results) -> list[Claim]:
    """Every point; who is faster with small and with large blocks; and the bound of the text."""
    curves = simulated(results)
    obstacle = _obstacle(results) if curves else None
    rows = []
    for kind in ("swap_out", "swap_in", "recompute"):
        for size, milliseconds in papers()[kind].items():
            statement = stated("fig19a_point", kind, value=milliseconds, what=LOOKS[kind].label, size=str(size))
            found = curves.get(kind, {}).get(size)
            rows.append(statement.judge(found, missing=f"no result with block size {size}", obstacle=obstacle))
    sizes = list(papers()["both"])
    known = all(size in curves.get("both", {}) for size in sizes)
    ratios = {size: curves["recompute"][size] / curves["both"][size] for size in sizes} if known else {}
    for name, chosen in (
        ("fig19a_small", sizes[:1]),
        ("fig19a_large", sizes[-1:]),
        ("fig19a_bound", sizes),
    ):
        largest = max(ratios[size] for size in chosen) if ratios else None
        rows.append(stated(name).judge(largest, missing="needs every block size", obstacle=obstacle))
    return rows


def simulated(results: Results) -> dict[str, dict[int, float]]:
    """What is done -> block size -> milliseconds, by the prices of the points that were simulated."""
    curves: dict[str, dict[int, float]] = {}
    for _, row in select(results.summary, runner="simulated").iterrows():
        size = int(row["block_size"])
        for kind, milliseconds in prices(results.config(row), size).items():
            curves.setdefault(kind, {})[size] = milliseconds
    return {kind: dict(sorted(points.items())) for kind, points in curves.items()}


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
    rows = select(results.summary, runner="simulated")
    return difference(rows, model="opt_13b", hardware="a100_40gb", costs="paper_engine")
