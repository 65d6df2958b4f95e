"""Fig. 18 (b): normalized latency against block size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.figures import blocks, preemption, style
from kvbench.figures.frames import PUBLIC, difference, footnote, noted, other_lengths, select
from kvbench.figures.style import Look
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, stated
from kvbench.paper.points import published
from kvbench.results import Results

LOOKS = {
    "factor": Look("simulated, with the kernel's factor", "#0072B2", "o", "-"),
    "flat": Look("simulated, without it", "#D55E00", "s", (0, (4, 1.2))),
}
Latencies = Mapping[int, float]
Combine = Callable[[Latencies], float]


def draw(results: Results) -> dict[str, Figure]:
    """A panel for each data set, with the kernel's factor and without."""
    summary = results.summary
    panels = {name: curves for name in _panels() if (curves := _curves(results, name))}
    if not panels:
        return {}
    with style.context():
        note = footnote(
            summary,
            "The left side, below 16, follows from a factor on the time of the attention kernel, by block size and "
            "fitted to the ShareGPT curve; the right side from allocation: without the factor it alone remains",
            "Hollow: the paper's plotted points",
        )
        figure = style.new_figure(style.PAGE_IN if len(panels) > 1 else style.COLUMN_IN, 2.2, note)
        for axes, (name, curves) in zip(
            figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True
        ):
            _draw_panel(axes, name, curves)
        looks = {kind: look for kind, look in LOOKS.items() if any(kind in curves for curves in panels.values())}
        handles = [*style.legend(looks), style.hollow("o")]
        style.put_legend(figure, handles, 3 if len(panels) > 1 else 1)
    return {"fig_block_size": figure}


def _draw_panel(axes: Axes, name: str, curves: Mapping[str, Latencies]) -> None:
    panel = _panels()[name]
    blocks.draw(axes, curves, LOOKS)
    style.plot_hollow(axes, panel["latency_s"], style.INK, "o", size=6)
    axes.set_yscale("log")
    axes.set_title(f"{panel['title']}, {panel['request_rate']:g} requests/s")
    axes.set_ylabel("Normalized latency (s/token)")


def table(results: Results) -> str | None:
    """Every point, beside the paper's; and what preemption cost, with the kernel's factor."""
    parts = []
    for name, panel in _panels().items():
        curves = _curves(results, name)
        if curves:
            mine = {LOOKS[kind].label: points for kind, points in curves.items()}
            rows = blocks.rows(mine, {"paper": blocks.papers(panel["latency_s"])})
            parts.append(f"{panel['title']}: normalized latency (s/token)\n{aligned(rows)}")
    lost = preemption.table_by_block(results.summary, [name for name in _panels() if _curves(results, name)])
    return "\n\n".join([*parts, *([lost] if lost else [])]) or None


def claims(results: Results) -> list[Claim]:
    """Where the best block size lies, and how much worse the others are."""
    sharegpt, alpaca = (_Judge(results, name) for name in ("sharegpt", "alpaca"))
    return [
        sharegpt("fig18b_best", _best),
        *(sharegpt("fig18b_near", _over(size, 32), size) for size in (16, 64)),
        *(sharegpt("fig18b_far", _over(size, 32), size) for size in (8, 128)),
        sharegpt("fig18b_text_sharegpt", _worst_over_others(16, 32, 64, 128)),
        alpaca("fig18b_best", _best),
        alpaca("fig18b_alike", _alike),
        *(alpaca("fig18b_far", _over(size, None), size) for size in (8, 64)),
        alpaca("fig18b_text_alpaca", _worst_over_others(16, 32)),
    ]


def _best(latency: Latencies) -> float:
    return min(latency, key=latency.__getitem__)


def _over(size: int, other: int | None) -> Combine:
    """Over another size's latency, or over the smallest."""
    return lambda latency: latency[size] / (latency[other] if other else min(latency.values()))


def _alike(latency: Latencies) -> float:
    return max(latency[16], latency[32]) / min(latency[16], latency[32])


def _worst_over_others(*sizes: int) -> Combine:
    def combine(latency: Latencies) -> float:
        return max(latency[size] for size in sizes) / min(latency[size] for size in latency if size not in sizes)

    return combine


class _Judge:
    """Holds one data set's curve against claims."""

    def __init__(self, results: Results, name: str) -> None:
        self.panel = _panels()[name]
        self.name = name
        self.rows = select(results.summary, panel=name)
        self.latency = blocks.latencies(results.summary, name)
        self.lacking = [size for size in blocks.papers(self.panel["latency_s"]) if size not in self.latency]

    def __call__(self, claim: str, combine: Combine, size: int | None = None) -> Claim:
        """One number of the curve, and the verdict on it; ``size`` is the block size that the claim names, if any."""
        statement = stated(claim, f"{self.name}{size or ''}", workload=self.panel["title"], size=str(size))
        if self.lacking:
            missing = f"needs block size {', '.join(map(str, self.lacking))} of panel {self.name}"
            return statement.judge(None, missing=missing)
        lengths = other_lengths(self.rows, self.name)
        obstacle = (lengths if self.name in PUBLIC else None) or difference(
            self.rows,
            model="opt_13b",
            hardware="a100_40gb",
            workload=self.name,
            request_rate=self.panel["request_rate"],
            duration_s=published()["fig18b"]["duration_s"],
            costs="paper_engine",
        )
        return noted(statement.judge(combine(self.latency), obstacle=obstacle), lengths)


def _curves(results: Results, name: str) -> dict[str, dict[int, float]]:
    """Kind of curve -> latencies, for those that were run."""
    found = {
        kind: blocks.latencies(results.summary, panel) for kind, panel in (("factor", name), ("flat", f"{name}_flat"))
    }
    return {kind: points for kind, points in found.items() if points}


def _panels() -> dict[str, dict[str, Any]]:
    return dict(published()["fig18b"]["panels"])
