"""What paging costs the attention kernel on this machine's GPU: one kernel over contiguous and over paged memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvbench.figures import style
from kvbench.figures.style import Look
from kvbench.figures.terminal import aligned, number
from kvbench.paper.claims import Claim, Statement
from kvbench.results import Results
from kvbench.runners.kernel_benchmark import Size, times

Floats = npt.NDArray[np.float64]
LOOKS = {
    "identity": Look("identity table", "#009E73", "D", (0, (4, 1.2))),
    "shuffled": Look("shuffled blocks", "#0072B2", "o", "-"),
    "naive": Look("shuffled, table read in the loop", "#D55E00", "s", (0, (1, 1))),
}
"""Operations that are compared with contiguous memory."""
CONTIGUOUS = Look("contiguous", "#000000", "v", (0, (6, 1, 1, 1)))
KINDS = ("MHA", "GQA")
PAPER_PCT = (20.0, 26.0)
"""Section 7.1: the attention kernel's latency over FasterTransformer's."""
BLOCK_SIZE = 16
BARS = {16: 1.05, 8: 1.10}
"""Block size -> kvbench's own bar on paged over contiguous, fixed before the first run."""
LEAST_BANDWIDTH = 0.85
LEAST_KV_BYTES = 1e9
"""From which on the bars hold: smaller launches have not begun when they end, or fit the cache."""
NUM_RESAMPLES = 2000


class Ratio(NamedTuple):
    """Of two medians over the rounds, with a 95 % bootstrap interval over rounds."""

    value: float
    low: float
    high: float


class Timed(NamedTuple):
    """A point.

    Attributes:
        panel: of the experiment.
        size: of its launches.
        seconds: operation -> the time of a launch in each round.
        device: what computed.
    """

    panel: str
    size: Size
    seconds: Mapping[str, Floats]
    device: str

    @property
    def kind(self) -> str:
        """Whether K/V heads are shared."""
        return "MHA" if self.size.num_heads == self.size.num_kv_heads else "GQA"

    def over(self, operation: str, base: str = "contiguous") -> Ratio:
        """Its time over that of another operation."""
        return ratio(self.seconds[operation], self.seconds[base])

    def bandwidth(self, operation: str) -> Ratio:
        """Bytes per second that a launch reads and writes, as a share of what a copy does."""
        moved, copied = self.size.launch_bytes, 2 * self.size.copied_bytes
        found = ratio(self.seconds["copy"], self.seconds[operation])
        return Ratio(*(each * moved / copied for each in found))


def ratio(above: Floats, below: Floats) -> Ratio:
    """Ratio of medians over paired rounds, resampled together."""
    chosen = np.random.default_rng(0).integers(len(above), size=(NUM_RESAMPLES, len(above)))
    resampled = np.median(above[chosen], axis=1) / np.median(below[chosen], axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Ratio(float(np.median(above) / np.median(below)), float(low), float(high))


def draw(results: Results) -> dict[str, Figure]:
    """Overhead against block size and against context, and bandwidth against the size of a launch."""
    points = timed(results)
    if not points:
        return {}
    with style.context():
        figure = style.new_figure(style.PAGE_IN, 2.35, _footnote(points))
        left, middle, right = figure.subplots(1, 3)
        _overheads(left, [each for each in points if each.panel == "block_size"], "block_size", "Block size (tokens)")
        contexts = [each for each in points if each.size.block_size == BLOCK_SIZE and each.panel != "batch"]
        _overheads(middle, contexts, "context_len", "Context (tokens)")
        _bandwidths(right, [each for each in points if each.size.block_size == BLOCK_SIZE])
        figure.legend(handles=style.legend({"contiguous": CONTIGUOUS} | LOOKS), loc="outside upper center", ncols=4)
    return {"fig_kernel_overhead": figure}


def table(results: Results) -> str | None:
    """Every point: time, share of the copy's bandwidth, and what the others take over contiguous memory."""
    points = timed(results)
    if not points:
        return None
    header = ("panel", "heads", "batch", "context", "block", "KV MB", "us", "% of copy", *LOOKS)
    rows = []
    for each in points:
        size = each.size
        cells = [each.panel, f"{size.num_heads}/{size.num_kv_heads}", f"{size.batch}", f"{size.context_len}"]
        cells += [f"{size.block_size}", number(size.kv_bytes / 1e6), number(1e6 * _median(each, "contiguous"))]
        cells += [f"{100 * each.bandwidth('shuffled').value:.1f}", *(_interval(each.over(name)) for name in LOOKS)]
        rows.append(tuple(cells))
    low, high = PAPER_PCT
    return "\n".join(
        [
            aligned([header, *rows], left=2),
            "us: contiguous memory, per launch; % of copy: shuffled blocks. Others: over contiguous, 95 % interval.",
            f"The paper's kernel took {low:g} to {high:g} % more than FasterTransformer's: another algorithm too.",
        ]
    )


def claims(results: Results) -> list[Claim]:
    """The paper's overhead, held against the kernel as it is usually written; kvbench's own bars for its kernel."""
    points = [each for each in timed(results) if each.panel == "block_size" and each.size.kv_bytes >= LEAST_KV_BYTES]
    missing = "needs a launch that reads 1 GB of K and V"
    obstacle = None if not points or _is_gpu(points[0]) else "computed by plain torch on a CPU"
    naive = [each.over("naive") for each in points if each.size.block_size == BLOCK_SIZE]
    low, high = (1 + pct / 100 for pct in PAPER_PCT)
    paper = Statement(
        "attention kernel, paged over contiguous", "Fig. 18(a)", low, high, "ratio", "0",
        "the paper compares two algorithms on an A100; here the usual paged loop over the same kernel without a table",
    )  # fmt: skip
    rows = [_judge(paper, naive, missing, obstacle or "another GPU and another kernel")]
    for block_size, most in BARS.items():
        statement = _own(f"decode kernel, shuffled blocks of {block_size} over contiguous memory", None, most)
        found = [each.over("shuffled") for each in points if each.size.block_size == block_size]
        rows.append(_judge(statement, found, missing, obstacle))
    statement = _own("decode kernel, shuffled blocks of 16: bandwidth over that of a copy", LEAST_BANDWIDTH, None)
    found = [each.bandwidth("shuffled") for each in points if each.size.block_size == BLOCK_SIZE]
    rows.append(_judge(statement, [min(found)] if found else [], missing, obstacle))
    return rows


def timed(results: Results) -> list[Timed]:
    """The points that were run, in the order of the experiment."""
    found = []
    for _, row in results.summary.dropna(subset=["num_iterations"]).iterrows():
        config = results.config(row)
        seconds = times(results.steps(row), config["seed"])
        found.append(Timed(str(row["panel"]), Size.of(config), seconds, str(row["device"])))
    return found


def _own(claim: str, low: float | None, high: float | None) -> Statement:
    return Statement(claim, "none", low, high, "ratio", "0", "kvbench's own expectation, not the paper's")


def _judge(statement: Statement, ratios: list[Ratio], missing: str, obstacle: str | None) -> Claim:
    """The worst of several, by its interval."""
    if not ratios:
        return statement.judge(None, missing=missing)
    worst = max(ratios)
    return statement.judge(worst.value, interval=(worst.low, worst.high), obstacle=obstacle)


def _is_gpu(point: Timed) -> bool:
    return not point.device.startswith("cpu")


def _median(point: Timed, operation: str) -> float:
    return float(np.median(point.seconds[operation]))


def _interval(found: Ratio) -> str:
    return f"{found.value:.3f} ({found.low:.3f}-{found.high:.3f})"


def _overheads(axes: Axes, points: list[Timed], key: str, label: str) -> None:
    """Time over contiguous memory, in percent, for each kernel; hollow where heads are shared."""
    axes.axhspan(*PAPER_PCT, color="#e6e6e6", linewidth=0, zorder=0)
    axes.axhline(0, color=style.GREY, linewidth=0.6, zorder=1)
    for operation, look in LOOKS.items():
        for kind in KINDS:
            chosen = sorted((getattr(each.size, key), each) for each in points if each.kind == kind)
            ratios = [each.over(operation) for _, each in chosen]
            _errorbars(axes, [float(x) for x, _ in chosen], [_percent(each) for each in ratios], look, kind)
    _powers(axes, sorted({getattr(each.size, key) for each in points}), label)
    axes.set_ylabel("Time over contiguous (%)")


def _bandwidths(axes: Axes, points: list[Timed]) -> None:
    """Share of the copy's bandwidth against the bytes of a launch."""
    for operation, look in ({"contiguous": CONTIGUOUS} | {"shuffled": LOOKS["shuffled"]}).items():
        for kind in KINDS:
            chosen = sorted(
                ((each.size.kv_bytes / 2**20, each) for each in points if each.kind == kind), key=lambda pair: pair[0]
            )
            ratios = [Ratio(*(100 * value for value in each.bandwidth(operation))) for _, each in chosen]
            _errorbars(axes, [x for x, _ in chosen], ratios, look, kind, line="none")
    axes.set_xscale("log")
    axes.set_xlabel("K and V of a launch (MiB)")
    axes.set_ylabel("Bandwidth (% of a copy's)")
    axes.set_ylim(0, None)


def _percent(found: Ratio) -> Ratio:
    return Ratio(*(100 * (each - 1) for each in found))


def _errorbars(
    axes: Axes, xs: list[float], ratios: list[Ratio], look: Look, kind: str, line: style.LineStyle | None = None
) -> None:
    if not xs:
        return
    values = [each.value for each in ratios]
    errors = [[each.value - each.low for each in ratios], [each.high - each.value for each in ratios]]
    axes.errorbar(
        xs, values, yerr=np.maximum(errors, 0.0), color=look.color, marker=look.marker, markersize=3.5,
        linestyle=look.linestyle if line is None else line, markerfacecolor=look.color if kind == "MHA" else "none",
        markeredgewidth=0.8, elinewidth=0.7, capsize=1.5, zorder=3,
    )  # fmt: skip


def _powers(axes: Axes, values: list[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    shown = values if len(values) < 9 else values[::2]
    axes.set_xticks(shown, [f"{value // 1024}K" if value >= 1024 else f"{value}" for value in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def _footnote(points: list[Timed]) -> str:
    size = points[0].size
    heads = sorted({(each.kind, each.size.num_heads, each.size.num_kv_heads) for each in points}, reverse=True)
    kinds = ", ".join(f"{kind} {queries}/{shared} heads" for kind, queries, shared in heads)
    low, high = PAPER_PCT
    num_rounds = len(points[0].seconds["copy"])
    return (
        f"Measured on {points[0].device}: one decode kernel, {kinds} (hollow: GQA) of {size.head_dim} numbers of "
        f"{size.value_bytes} bytes; medians of {num_rounds} rounds, bars: 95 % bootstrap "
        f"intervals. Grey band: the paper's {low:g}-{high:g} %, of its paged kernel over FasterTransformer's, another "
        f"algorithm. Middle and right: blocks of {BLOCK_SIZE}."
    )
