"""Tables for papers and pages: Markdown, LaTeX, and the terminal's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvbench.figures.terminal import aligned
from kvbench.results import write_text

_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


class Table(NamedTuple):
    """Cells and what has to be said of them.

    Attributes:
        header: of each column.
        rows: of cells; as many as the header has.
        left: so many columns are text, the others numbers.
        note: in a line or more, below.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    note: str

    def text(self) -> str:
        """For the terminal."""
        return f"{aligned([self.header, *self.rows], left=self.left)}\n{self.note}"

    def markdown(self) -> str:
        """A pipe table, the note below it."""
        aligns = [":--" if column < self.left else "--:" for column in range(len(self.header))]
        lines = [
            f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"
            for row in [self.header, aligns, *self.rows]
        ]
        return "\n".join([*lines, "", self.note]) + "\n"

    def latex(self) -> str:
        r"""A ``tabular`` for ``\input``, with the rules of package booktabs; the note below it in small print."""
        aligns = "l" * self.left + "r" * (len(self.header) - self.left)
        head, *body = [" & ".join(map(_escaped, row)) + r" \\" for row in [self.header, *self.rows]]
        note = rf"\multicolumn{{{len(self.header)}}}{{p{{0.95\linewidth}}}}{{\footnotesize {_escaped(self.note)}}} \\"
        rules = [rf"\begin{{tabular}}{{{aligns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", note]
        return "\n".join(["% needs \\usepackage{booktabs}", *rules, r"\end{tabular}"]) + "\n"

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Write ``<stem>.md`` and ``<stem>.tex`` into ``folder`` and return the paths."""
        paths = []
        for suffix, text in ((".md", self.markdown()), (".tex", self.latex())):
            paths.append(folder / f"{stem}{suffix}")
            write_text(paths[-1], text)
        return paths


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
