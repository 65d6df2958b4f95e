"""Real tokens on this machine, all requests at once: throughput, batch and memory against the size of the KV pool."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

from kvbench.figures import bars, style
from kvbench.figures.frames import curve, footnote, obstacle, select, systems, value, where
from kvbench.figures.limits import limited_by
from kvbench.figures.terminal import aligned, number
from kvbench.paper.claims import Claim, expectation
from kvbench.partition import CLASSES, Part
from kvbench.results import Results

THROUGHPUT = "throughput_tok_per_s"
BATCH = "num_running_mean"
BUDGET = "budget_seqs"
"""Column added to the summary: the pool's slots divided by the model's longest sequence."""
SHOWN_BUDGET = 4
"""At which the ledger is drawn and the expectations are held, in longest sequences."""
EXPECTED = {"orca_max": 1.8, "orca_oracle": 1.2}
"""System -> how many times its tokens/s vLLM must reach: kvbench's own bars, fixed before the first run."""
MODEL = "opt_125m"
"""For which they were fixed."""


def draw(results: Results) -> dict[str, Figure]:
    """Tokens per second and mean batch against the budget, and what the pool holds at one budget."""
    summary = _with_budget(results)
    looks = style.looks(systems(summary))
    if not looks:
        return {}
    with style.context():
        figure = style.new_figure(style.PAGE_IN, 2.35, _footnote(summary))
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.25])
        for axes, column, label in ((left, THROUGHPUT, "Output tokens/s"), (middle, BATCH, "Mean batch (requests)")):
            for system, look in looks.items():
                points = curve(select(summary, system=system), BUDGET, column)
                style.plot(axes, points, look)
            _label(axes, summary, label)
        shown = _shown_budget(summary)
        parts = _parts(summary)
        for x, system in enumerate(looks):
            rows = select(summary, system=system, **{BUDGET: shown})
            heights = [value(rows, f"{name}_pct") or 0.0 for name in parts]
            bars.stack(right, x, list(parts.values()), heights, labelled_from=7)
        names = [look.label.replace("FasterTransformer", "Faster-\nTransf.") for look in looks.values()]
        right.set_xticks(range(len(looks)), [name.replace(" ", "\n", 1) for name in names])
        right.set_ylim(0, 100)
        right.set_ylabel("Share of the KV pool (%)")
        right.set_title(f"KV budget of {shown:g}")
        right.grid(visible=False, axis="x")
        handles = [*style.legend(looks), *bars.legend(list(parts.values()))[:-1]]  # no paper beside these bars
        style.put_legend(figure, handles, 5)
    return {"fig_offline_throughput": figure}


def table(results: Results) -> str | None:
    """Every point with what limited it, then vLLM's gains."""
    summary = _with_budget(results)
    rows = []
    for system, look in style.looks(systems(summary)).items():
        for budget, points in select(summary, system=system).groupby(BUDGET):
            numbers = [
                number(value(points, name))
                for name in ("num_requests", THROUGHPUT, BATCH, "token_states_pct", "num_preemptions")
            ]
            limit = limited_by(results, points)
            rows.append((look.label, f"{budget:g}", limit, *numbers))
    if not rows:
        return None
    header = (
        "system",
        "KV budget",
        "limited by (share of the time)",
        "requests",
        "tokens/s",
        "batch",
        "token %",
        "preempted",
    )
    lines = [
        aligned([header, *rows], left=3),
        "KV budget: in longest sequences. Batch and token states: over time; request-level batches count the finished.",
    ]
    lines += [
        f"{claim.claim}: {number(claim.measured)} (expected: at least {claim.paper_low:g})"
        for claim in claims(results)
        if claim.measured is not None
    ]
    return "\n".join(lines)


def claims(results: Results) -> list[Claim]:
    """What kvbench expects of vLLM at a budget of four longest sequences; the paper has no such run."""
    summary = _with_budget(results)
    rows = []
    for system, least in EXPECTED.items():
        label = style.SYSTEMS[system].label
        statement = expectation(f"vLLM over {label}: tokens/s, KV budget of {SHOWN_BUDGET} longest sequences", least)
        both = summary[summary["system"].isin(["vllm", system]) & (summary[BUDGET] == SHOWN_BUDGET)]
        reached, base = (value(select(both, system=each), THROUGHPUT) for each in ("vllm", system))
        ratio = reached / base if reached is not None and base else None
        missing = f"needs vLLM and {label} at a budget of {SHOWN_BUDGET}"
        rows.append(statement.judge(ratio, missing=missing, obstacle=obstacle(both, model=MODEL)))
    return rows


def _with_budget(results: Results) -> pd.DataFrame:
    """The summary's rows that have a number, with their budget."""
    summary = results.summary
    slots = [row["num_slots"] / results.config(row)["model"]["max_model_len"] for _, row in summary.iterrows()]
    summary = summary.assign(**{BUDGET: np.array(slots, np.float64)})
    return summary.dropna(subset=[THROUGHPUT])


def _shown_budget(summary: pd.DataFrame) -> float:
    """The budget of the expectations, else the smallest there is."""
    budgets = sorted(set(summary[BUDGET]))
    return float(SHOWN_BUDGET if SHOWN_BUDGET in budgets else budgets[0])


def _parts(summary: pd.DataFrame) -> dict[str, Part]:
    """The classes that hold something anywhere."""
    return {name: part for name, part in CLASSES.items() if (value(summary, f"{name}_pct") or 0.0) > 0}


def _label(axes: Axes, summary: pd.DataFrame, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(summary[BUDGET])))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("KV budget (longest sequences)")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)


def _footnote(summary: pd.DataFrame) -> str:
    """Device, model and workload; whether it was measured."""
    fewest, most = summary["num_requests"].min(), summary["num_requests"].max()
    count = f"{most:g}" if fewest == most else f"{fewest:g} to {most:g}"
    return footnote(summary, f"{where(summary)}; {count} requests, all at once; averages over time, drain included")
