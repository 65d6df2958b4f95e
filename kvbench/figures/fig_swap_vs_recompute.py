"""Fig. 19 (b): normalized latency against block size, preempted requests recomputed or swapped."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from kvbench.figures import blocks, preemption, style
from kvbench.figures.frames import difference, footnote, other_lengths, way
from kvbench.figures.style import Look
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, stated
from kvbench.paper.points import published
from kvbench.results import Results

LOOKS = {
    "recompute": Look("recompute", "#D55E00", "s", (0, (4, 1.2))),
    "swap": Look("swap", "#0072B2", "o", "-"),
}
"""Panel of the experiment -> how its curve is drawn."""


def draw(results: Results) -> dict[str, Figure]:
    """Latency above, the seconds lost to preemption below."""
    summary = results.summary
    curves = _curves(results)
    if not curves:
        return {}
    with style.context():
        note = footnote(
            summary,
            f"Filled: {way(summary)}; hollow: the paper's plotted points",
            "The left side leans on a factor on the attention kernel's time that was fitted to Fig. 18(b)",
        )
        figure = style.new_figure(style.COLUMN_IN, 3.3, note)
        axes, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        blocks.draw(axes, curves, LOOKS)
        for kind in curves:
            style.plot_hollow(
                axes, published()["fig19b"]["latency_s"][kind], LOOKS[kind].color, LOOKS[kind].marker, size=6
            )
        axes.set_yscale("log")
        axes.set_ylabel("Normalized latency\n(s/token)")
        axes.set_xlabel("")
        blocks.draw(lower, {kind: preemption.lost_by_block(summary, kind) for kind in curves}, LOOKS)
        lower.set_ylim(bottom=0)
        lower.set_ylabel("Lost to\npreemption (s)")
        handles = [*style.legend({kind: LOOKS[kind] for kind in curves}), style.hollow("o")]
        style.put_legend(figure, handles, 3)
    return {"fig_swap_vs_recompute": figure}


def table(results: Results) -> str | None:
    """Every point beside the paper's, and what preemption cost."""
    curves = _curves(results)
    if not curves:
        return None
    papers = {f"paper: {kind}": blocks.papers(points) for kind, points in published()["fig19b"]["latency_s"].items()}
    latencies = f"Normalized latency (s/token)\n{aligned(blocks.rows(curves, papers))}"
    return "\n\n".join(filter(None, [latencies, preemption.table_by_block(results.summary, list(curves))]))


def claims(results: Results) -> list[Claim]:
    """Where the two are alike, and who is ahead elsewhere."""
    alike, behind = _larger_over_smaller, _recompute_over_swap
    return [
        *(_judge(results, "fig19b_alike", size, alike) for size in (16, 32, 64)),
        *(_judge(results, "fig19b_recompute_ahead", size, behind) for size in (1, 2, 4)),
        *(_judge(results, "fig19b_swap_ahead", size, behind) for size in (128, 256)),
    ]


def _larger_over_smaller(recompute: float, swap: float) -> float:
    return max(recompute, swap) / min(recompute, swap)


def _recompute_over_swap(recompute: float, swap: float) -> float:
    return recompute / swap


def _judge(results: Results, name: str, size: int, combine: Callable[[float, float], float]) -> Claim:
    """A claim on the two curves at one block size."""
    papers = {kind: blocks.papers(points)[size] for kind, points in published()["fig19b"]["latency_s"].items()}
    ratio = f"{combine(papers['recompute'], papers['swap']):.2f}"
    statement = stated(name, str(size), size=str(size), papers=ratio)
    curves = _curves(results)
    if any(size not in curves.get(kind, {}) for kind in LOOKS):
        return statement.judge(None, missing=f"needs both curves at block size {size}")
    rows = results.summary[results.summary["panel"].isin(list(LOOKS)) & (results.summary["block_size"] == size)]
    obstacle = other_lengths(rows, "sharegpt") or difference(
        rows,
        model="opt_13b",
        hardware="a100_40gb",
        workload="sharegpt",
        costs="paper_engine",
        **{column: published()["fig19b"][column] for column in ("request_rate", "duration_s")},
    )
    return statement.judge(combine(curves["recompute"][size], curves["swap"][size]), obstacle=obstacle)


def _curves(results: Results) -> dict[str, dict[int, float]]:
    found = {kind: blocks.latencies(results.summary, kind) for kind in LOOKS}
    return {kind: points for kind, points in found.items() if points}
