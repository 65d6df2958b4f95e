"""``python -m kvbench.memory_map results/NAME ...``: stills and films of the runs that left memory maps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbench import command
from kvbench.core import KvbenchError
from kvbench.figures import style
from kvbench.figures.film import film
from kvbench.figures.memory_map import Group, groups, still
from kvbench.memory_map.map import failure
from kvbench.results import Results


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 after a user's mistake.
    """
    options = _parser().parse_args(argv)

    def action() -> int:
        for path in draw(options.folders, options.to, seconds=options.seconds):
            print(path, flush=True)
        return 0

    return command.run("kvbench.memory_map", action, "files that are written stay")


def draw(folders: Sequence[Path], to: Path | None = None, seconds: float = 16.0) -> Iterator[Path]:
    """Write a still by purpose, one by owner, and a film, for all runs of the same requests with equal pools.

    Args:
        folders: of results; runs of several are put into one picture.
        to: where to; None: into the first of them.
        seconds: how long films play; 0: none is made.

    Returns:
        The files, as they are written.

    Raises:
        KvbenchError: a folder holds no results, no run left a map, and why, or a length below 0.
    """
    if seconds < 0:
        raise KvbenchError(f"--seconds {seconds:g}: a film plays 0 seconds or more")
    results = [Results(folder) for folder in folders]
    found = groups(results)
    if not found:
        named = ", ".join(map(str, folders))
        points = [point for folder in folders for point in sorted((folder / "points").glob("*"))]
        reasons = [reason for point in points if (reason := failure(point))]
        if reasons and all(each.summary.empty for each in results):
            raise KvbenchError(f"no run in {named} left a map, as it failed: {reasons[0]}")
        raise KvbenchError(f"no run in {named} left a map; run it with memory_map=true")
    target = to or folders[0]
    target.mkdir(parents=True, exist_ok=True)
    return _drawn(found, target, seconds)


def _drawn(found: Sequence[Group], target: Path, seconds: float) -> Iterator[Path]:
    for group in found:
        yield from style.save(still(group.runs), target, group.name)
        yield from style.save(still(group.runs, "owner"), target, f"{group.name}_owners")
        if seconds:
            yield from film(group.runs, target, group.name, seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.memory_map",
        description="Draw who held which slot of the KV pool, when: stills (PDF, SVG, PNG) and a film (GIF; MP4 where "
        "ffmpeg is installed). Runs of the same requests with pools of one size share a picture.",
    )
    parser.add_argument("folders", metavar="results/NAME", nargs="+", type=Path, help="of runs with memory_map=true")
    parser.add_argument("--to", type=Path, help="folder of the pictures; by default the first of the results")
    parser.add_argument("--seconds", type=float, default=16.0, help="length of the film, 0: none (%(default)g)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
