"""``python -m kvbench.report results/NAME ...``: one HTML file for each folder of results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench import command
from kvbench.core import KvbenchError
from kvbench.report.page import write


def main(argv: Sequence[str] | None = None) -> int:
    """Write the reports that the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 after a user's mistake.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.report",
        description="Write results as one HTML file: tables, charts over time, the memory map, every assumption.",
    )
    parser.add_argument("folders", metavar="results/NAME", nargs="+", type=Path, help="what an experiment left")
    parser.add_argument("--to", type=Path, help="the file, of one folder only; by default report.html in the folder")
    options = parser.parse_args(argv)

    def action() -> int:
        if options.to and len(options.folders) > 1:
            raise KvbenchError(f"--to names one file, but {len(options.folders)} folders are given; leave it out")
        for folder in options.folders:
            path = write(folder, options.to)
            print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
        return 0

    return command.run("kvbench.report", action, "reports that are written stay")


if __name__ == "__main__":
    sys.exit(main())
