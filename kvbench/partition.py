"""The classes into which the ledger parts the pool: their names and looks, in every figure, report and terminal."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """What one segment of every bar stands for."""

    label: str
    color: str
    hatch: str = ""

    @property
    def is_dark(self) -> bool:
        """Whether a label on it should be white."""
        red, green, blue = (int(self.color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue < 120


CLASSES = {
    "token_states": Part("token states", "#009E73"),
    "reserved": Part("reserved", "#E69F00", "\\\\\\\\"),
    "overreserved": Part("over-reserved", "#D55E00", "...."),
    "padding": Part("padding", "#555555"),
    "cached": Part("cached", "#56B4E9"),
    "pinned": Part("pinned", "#CC79A7"),
    "free": Part("free", "#dedede", "////"),
}
"""From bottom to top; in slots they sum to the pool at every iteration.

Colours are Okabe and Ito's and two greys: told apart with any colour vision and, with their hatches, in grey.
"""
