"""``python -m kvbench.report results/NAME ...``: one HTML file of a folder of results, or of several."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench import command
from kvbench.report.page import COMPARED, FILE, write


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of what the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 after a user's mistake.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.report",
        description="Write results as one HTML file: tables, charts over time, the memory map, every assumption. "
        "Several folders are put beside each other, if they can be compared.",
    )
    parser.add_argument(
        "words", metavar="results/NAME [column=value[,value] ...]", nargs="+", help="folders, and which of their points"
    )
    parser.add_argument("--mix", action="store_true", help="put together what is not comparable; the page says why")
    parser.add_argument(
        "--to", type=Path, help=f"the file; by default {FILE} in the folder, of several folders {COMPARED / FILE}"
    )
    options = parser.parse_intermixed_args(argv)

    def action() -> int:
        path, notes = write(options.words, options.to, mix=options.mix)
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", *notes, sep="\n")
        return 0

    return command.run("kvbench.report", action, "a report that is written stays")


if __name__ == "__main__":
    sys.exit(main())
