"""What an experiment has to show of its results: figures, verdicts and tables, written beside them."""

from __future__ import annotations

import math
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from kvbench.paper.claims import Claim
from kvbench.results import Results, write_csv


def module(name: str) -> ModuleType | None:
    """The module with ``draw``, ``table`` and ``claims`` of an experiment; None where it has no figure."""
    full = f"kvbench.figures.{name}"
    return import_module(full) if find_spec(full) is not None else None


def draw(results: Results, name: str) -> str | None:
    """Write an experiment's figures as PDF, SVG and PNG, ``claims.csv``, and its points as ``table.md`` and ``.tex``.

    Args:
        results: beside which they are written.
        name: of the experiment.

    Returns:
        What the terminal shows; None where there is nothing to show, or the experiment has no figure: nothing is
        written then.
    """
    if (figure := module(name)) is None:
        return None
    from kvbench.figures import comparison, style  # brings matplotlib
    from kvbench.tables import load  # brings pandas

    for stem, drawing in figure.draw(results).items():
        style.save(drawing, results.path, stem)
    points = load(results.path)
    comparison.table(points, comparison.axis(points)).save(results.path, "table")
    names = [each.name for each in fields(Claim)]
    claims = ({each: _short(getattr(claim, each)) for each in names} for claim in figure.claims(results))
    write_csv(results.path / "claims.csv", names, claims)
    table: str | None = figure.table(results)
    return table


def _short(value: object) -> object:
    """Six digits of a number; an end that is open stays empty."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
