"""Tables for the terminal: plain text, columns aligned; cells as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of cells, the first of them the header; the first ``left`` columns are text, the others end on one edge."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def text(value: object) -> str:
    """A value as a person reads it: four digits, yes or no, a dash for what does not exist."""
    if value is None or value != value:  # noqa: PLR0124 - NaN
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def stability(is_stable: bool | None) -> str:
    """Whether a queue did not grow; None: it cannot be told."""
    return "undecided" if is_stable is None else text(is_stable)


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with so many significant digits and without an exponent, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
