"""One row of ``claims.csv``: what the paper claims, what was measured, and the verdict.

``claims.yaml`` states the claims and their tolerances; a figure fills in what it measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, cast

import yaml


class Verdict(StrEnum):
    """What became of a claim."""

    REPRODUCED = "reproduced"
    """The measured value, or its interval, meets the claimed range widened by the tolerance."""
    NOT_REPRODUCED = "not reproduced"
    """It does not."""
    NOT_COMPARABLE = "not comparable"
    """Something was measured, but under other conditions than the paper's; the note says which."""
    UNDECIDED = "undecided"
    """It was run, but what was measured does not decide it; the note says why."""
    NOT_RUN = "not run"
    """It was not run, or not all that it takes; the note says what is missing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of ``claims.csv``, in the order of its columns.

    Attributes:
        claim: the claim in a few words.
        figure: of the paper, as "Fig. 12(a)".
        paper_low: lower end of the claimed range; None where the claim has none.
        paper_high: upper end; equal to ``paper_low`` for a single number.
        measured: in ``unit``; None where there is no single value.
        ci_low: lower end of the interval in which the measured value lies; None where there is none.
        ci_high: its upper end.
        tolerance: "15 %" of the bounds, or a number in ``unit``.
        verdict: see ``Verdict``.
        note: the reason for the verdict, and what to know about the claim.
    """

    claim: str
    figure: str
    paper_low: float | None
    paper_high: float | None
    measured: float | None
    ci_low: float | None
    ci_high: float | None
    unit: str
    tolerance: str
    verdict: Verdict
    note: str


@dataclass(frozen=True, slots=True)
class Statement:
    """A claim before anything was measured; fields as in ``Claim``."""

    claim: str
    figure: str
    low: float | None
    high: float | None
    unit: str
    tolerance: str
    note: str

    def meets(self, low: float, high: float) -> bool:
        """Whether [low, high] and the claimed range, widened by the tolerance, have a value in common."""
        return not (
            (self.low is not None and high < self.low - self._margin(self.low))
            or (self.high is not None and low > self.high + self._margin(self.high))
        )

    def _margin(self, bound: float) -> float:
        if self.tolerance.endswith("%"):
            return float(self.tolerance[:-1]) / 100 * abs(bound)
        return float(self.tolerance)

    def judge(
        self,
        measured: float | None,
        *,
        interval: tuple[float, float] | None = None,
        missing: str = "no finished point",
        ran: bool = False,
        obstacle: str | None = None,
    ) -> Claim:
        """Hold a measured value against the claim.

        Args:
            measured: the value; None or NaN if there is none.
            interval: where the true value lies; infinite ends are allowed. Alone, without ``measured``, it can refute a
                claim but not confirm it.
            missing: what is missing where nothing was measured, or why what was measured decides nothing.
            ran: whether all was run that the claim needs; so it was where there is an interval.
            obstacle: why the value cannot be compared with the paper's, if so.
        """
        if measured is not None and math.isnan(measured):
            measured = None
        if measured is None and (interval is None or self.meets(*interval)):
            verdict, reason = (Verdict.UNDECIDED if ran or interval else Verdict.NOT_RUN), missing
        elif obstacle is not None:
            verdict, reason = Verdict.NOT_COMPARABLE, obstacle
        elif measured is None:
            verdict, reason = Verdict.NOT_REPRODUCED, missing
        else:
            met = self.meets(*(interval or (measured, measured)))
            verdict, reason = (Verdict.REPRODUCED if met else Verdict.NOT_REPRODUCED), ""
        low, high = interval or (None, None)
        return Claim(
            claim=self.claim,
            figure=self.figure,
            paper_low=self.low,
            paper_high=self.high,
            measured=measured,
            ci_low=low,
            ci_high=high,
            unit=self.unit,
            tolerance=self.tolerance,
            verdict=verdict,
            note="; ".join(part for part in (reason, self.note) if part),
        )


def expectation(claim: str, least: float) -> Statement:
    """What kvbench itself expects of a real run: a ratio of ``least`` or more. Its note says that no paper says so."""
    return Statement(
        claim=claim,
        figure="none",
        low=least,
        high=None,
        unit="ratio",
        tolerance="0",
        note="kvbench's own expectation of a real run, not the paper's",
    )


@cache
def _stated() -> dict[str, dict[str, Any]]:
    text = files("kvbench.paper").joinpath("claims.yaml").read_text(encoding="utf-8")
    return cast(dict[str, dict[str, Any]], yaml.safe_load(text))


def stated(name: str, variant: str = "", *, value: float | None = None, **words: str) -> Statement:
    """The claim called ``name`` in ``claims.yaml``.

    Args:
        name: its key.
        variant: which value to take where a field has several, one per panel.
        value: the plotted number, for claims that state none; five digits of it count.
        words: what stands in the claim's braces.
    """
    if value is not None:
        value = float(f"{value:.5g}")

    def pick(field: str) -> Any:
        entry = _stated()[name].get(field)
        return entry.get(variant) if isinstance(entry, dict) else entry

    return Statement(
        claim=pick("claim").format(**words),
        figure=pick("figure").format(**words),
        low=pick("low") if value is None else value,
        high=pick("high") if value is None else value,
        unit=pick("unit"),
        tolerance=str(pick("tolerance")),
        note=pick("note") or "",
    )
