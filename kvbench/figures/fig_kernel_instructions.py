"""What paging costs the attention kernel in instructions and in buffers, read off the compiled code: no GPU is needed.

``kernels/compiled/`` has what each version of triton made of the kernels; ``make kernel_tables`` regenerates it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvbench.capacity import model_of
from kvbench.figures import blocks, style
from kvbench.figures.frames import select
from kvbench.figures.style import Look
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, Statement
from kvbench.results import Results

TABLES = Path(__file__).resolve().parents[2] / "kernels" / "compiled"
COMPILED = {"function": "decode", "arch": "sm_90", "dtype": "bfloat16", "splits": 1}
LOOKS = {
    "contiguous": Look("contiguous", "#000000", "v", (0, (6, 1, 1, 1))),
    "paged": Look("paged", "#0072B2", "o", "-"),
    "in loop": Look("paged, table read in the loop", "#D55E00", "s", (0, (4, 1.2))),
}
BLOCK_SIZE = 16
BAR = 1.08
"""kvbench's own bar on paged over contiguous instructions, fixed before the kernel was written."""
Curves = dict[str, dict[int, float]]
"""Kernel -> block size -> a number."""


def draw(results: Results) -> dict[str, Figure]:
    """Instructions of the loop for each triton, and the shared memory that holds the tiles under way."""
    found = read(results)
    if not found:
        return {}
    with style.context():
        note = (
            "Static: read off the code compiled for an H200 (sm_90): decode, bfloat16, 3 stages; what a warp runs "
            "for a tile of 64 tokens. Nothing was timed."
        )
        figure = style.new_figure(style.PAGE_IN, 2.1, note)
        *panels, last = figure.subplots(1, len(found) + 1)
        for axes, (version, rows) in zip(panels, found.items(), strict=True):
            blocks.draw(axes, curves(rows, "loop"), LOOKS)
            axes.set_title(f"triton {version}")
            axes.set_ylabel("Instructions per tile")
            axes.sharey(panels[0])
        blocks.draw(last, curves(found[max(found)], "shared_bytes", 1024), LOOKS)
        last.set_title(f"triton {max(found)}")
        last.set_ylabel("Shared memory (KiB)")
        for axes in (panels[-1], last):
            axes.set_ylim(bottom=0)
        figure.legend(handles=style.legend(LOOKS), loc="outside upper center", ncols=3)
    return {"fig_kernel_instructions": figure}


def table(results: Results) -> str | None:
    """Every kernel: what its loop and its program take."""
    rows = [
        (version, str(row["kernel"]), str(row["page"] or "-"), *(str(row[name]) for name in COLUMNS))
        for version, frame in read(results).items()
        for _, row in frame.iterrows()
    ]
    return aligned([("triton", "kernel", "block", *COLUMNS.values()), *rows], left=2) if rows else None


COLUMNS = {
    "loop": "instructions",
    "registers": "registers",
    "spill_bytes": "spilled",
    "shared_bytes": "shared memory",
    "wide_loads": "128-bit loads",
    "narrow_loads": "others",
}


def claims(results: Results) -> list[Claim]:
    """The bar for each triton; what paging takes in time is another experiment's."""
    found = []
    for version, rows in read(results).items():
        statement = Statement(
            f"instructions of the decode loop, blocks of {BLOCK_SIZE} over contiguous (triton {version})",
            "none", None, BAR, "ratio", "0", "kvbench's own expectation, not the paper's; static",
        )  # fmt: skip
        loops = curves(rows, "loop")
        known = {kernel: loops.get(kernel, {}).get(BLOCK_SIZE) for kernel in ("paged", "contiguous")}
        ratio = known["paged"] / known["contiguous"] if known["paged"] and known["contiguous"] else None
        found.append(statement.judge(ratio, missing=f"needs blocks of {BLOCK_SIZE} and contiguous memory"))
    return found


def read(results: Results) -> dict[str, pd.DataFrame]:
    """Version of triton -> the compiled kernels that the points ask for, by their model's heads and their blocks."""
    asked: list[dict[str, Any]] = []
    for _, row in results.summary.iterrows():
        model = model_of(results.config(row))
        size = int(row["block_size"]) if row["allocator"] == "paged" else 0
        asked.append({"page": size, "head_dim": model.head_dim, "group": model.num_heads // model.num_kv_heads})
    found = {}
    for path in sorted(TABLES.glob("triton-*.csv")) if asked else ():
        rows = select(pd.read_csv(path), **COMPILED).merge(pd.DataFrame(asked).drop_duplicates())
        rows["kernel"] = [_kernel(row) for _, row in rows.iterrows()]
        found[path.stem.removeprefix("triton-")] = rows.sort_values(["kernel", "page"])
    return found


def curves(rows: pd.DataFrame, column: str, unit: float = 1) -> Curves:
    """Kernel -> block size -> a column; contiguous memory has the same at every block size."""
    sizes = sorted(set(rows["page"]) - {0})
    found: Curves = {}
    for kernel, some in rows.groupby("kernel"):
        values = {int(page): value / unit for page, value in zip(some["page"], some[column], strict=True)}
        found[str(kernel)] = dict.fromkeys(sizes, values[0]) if kernel == "contiguous" else values
    return found


def _kernel(row: pd.Series[Any]) -> str:
    if row["page"] == 0:
        return "contiguous"
    return "paged" if row["prefetch"] else "in loop"
