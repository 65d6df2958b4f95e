"""``python -m kvbench.compare A B ...``: any runs in one figure and one table, unless they cannot be compared.

Allocators, systems, machines and versions are what a comparison is for. Requests, the model, the pool and the costs of
iterations have to be the same, and a simulated run stands beside simulated ones only; ``--mix`` waives that, and then
the figure says what differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kvbench import command
from kvbench.core import KvbenchError
from kvbench.figures import comparison, conditions, style
from kvbench.figures.typeset import Table
from kvbench.tables import select

__all__ = ["compare", "main", "select"]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare what the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 where there is nothing to compare, or what must not be.
    """
    options = _parser().parse_intermixed_args(argv)

    def action() -> int:
        frame = select(options.words)
        shown, paths = compare(
            frame, options.to, x=options.x, y=options.y, mix=options.mix, wide=options.wide, metrics=options.metrics
        )
        print(shown.text())
        print(*paths, sep="\n")
        return 0

    return command.run("kvbench.compare", action, "files that are written stay")


def compare(
    frame: pd.DataFrame,
    folder: Path,
    *,
    x: str | None = None,
    y: str = "normalized_latency_mean_s",
    mix: bool = False,
    wide: bool = False,
    metrics: Sequence[str] = (),
) -> tuple[Table, list[Path]]:
    """Write ``compare.pdf``, ``.svg``, ``.png``, ``.md`` and ``.tex``.

    Args:
        frame: points, see ``kvbench.tables.select``.
        folder: where to.
        x: column of the horizontal axis; None: the one that series go along.
        y: metric that is drawn.
        mix: whether to draw what is not comparable.
        wide: as wide as a page, else as one column of two.
        metrics: columns of the table; none: ``y`` and the usual ones.

    Returns:
        The table, and the files.

    Raises:
        KvbenchError: the points are not comparable and ``mix`` is not set, or there is nothing to draw.
    """
    for option, name in (("-x", x), ("-y", y), *(("--metrics", each) for each in metrics)):
        if name is not None:
            _check_numbers(frame, name, option)
    x = x or comparison.axis(frame)
    if x is not None and frame.dropna(subset=[x, y]).empty:
        raise KvbenchError(f"no point has a number in both {x} and {y}; choose others with -x and -y")
    notes = conditions.check(frame, x, y, mix=mix)
    over = "" if any(each.startswith(conditions.REFUSED) for each in notes) else y
    wanted = {
        name: comparison.METRICS.get(name, comparison.titled(name)) for name in (metrics or [y, *comparison.METRICS])
    }
    shown = comparison.table(frame, x, wanted, *notes, over=over)
    width_in = style.PAGE_IN if wide else style.COLUMN_IN
    figure = comparison.draw(frame, x, y, *notes, width_in=width_in)
    folder.mkdir(parents=True, exist_ok=True)
    return shown, style.save(figure, folder, "compare") + shown.save(folder, "compare")


def _check_numbers(frame: pd.DataFrame, column: str, option: str) -> None:
    if column not in frame:
        raise KvbenchError(f"there is no column {column}; docs/columns.md lists them")
    cells = frame[column]
    if not pd.api.types.is_numeric_dtype(cells) or pd.api.types.is_bool_dtype(cells):
        what = "yes or no" if pd.api.types.is_bool_dtype(cells) else "text"
        raise KvbenchError(f"{option} needs numbers, and {column} is {what}; docs/columns.md lists every column's type")
    if cells.isna().all():
        raise KvbenchError(f"no point has a number in {column}; choose another column with {option}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.compare",
        description="Put points of any experiments into one figure (PDF, SVG, PNG) and one table (Markdown, LaTeX).",
    )
    parser.add_argument(
        "words", metavar="results/NAME [column=value[,value] ...]", nargs="+", help="folders, and which of their points"
    )
    parser.add_argument("-x", help="column of the horizontal axis; by default the one that changes: the rate, ...")
    parser.add_argument("-y", default="normalized_latency_mean_s", help="metric that is drawn (%(default)s)")
    parser.add_argument(
        "--metrics", type=lambda text: text.split(","), default=(), help="columns of the table: a,b,..."
    )
    parser.add_argument("--mix", action="store_true", help="draw what is not comparable, too; the figure says why")
    parser.add_argument("--wide", action="store_true", help="as wide as a page; else as one column of two")
    parser.add_argument("--to", type=Path, default=Path("results/compare"), help="folder of the files (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
