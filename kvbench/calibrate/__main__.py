"""``python -m kvbench.calibrate``: fit the costs of an iteration to real runs on this machine, for ``costs=local``."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence

from kvbench import command
from kvbench.calibrate import costs_file
from kvbench.calibrate.regression import fit, residuals
from kvbench.calibrate.runs import measure
from kvbench.composition import CONF, parse
from kvbench.core import KvbenchError
from kvbench.figures.terminal import aligned

MEANINGS = {
    "a_ms": "ms per iteration",
    "b_ms": "ms per token of context",
    "c_ms": "ms per request",
    "c_large_ms": "ms per request beyond the knee",
    "c_knee": "requests",
    "p_ms": "ms per prefill token",
    "q_ms": "ms per squared prefill length",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate as the command line asks.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 after a user's mistake.
    """
    options = _parser().parse_args(argv)

    def action() -> int:
        print(calibrate(options.name, options.overrides, options.passes))
        return 0

    return command.run("kvbench.calibrate", action, "costs stay as they were")


def calibrate(name: str, overrides: Sequence[str], passes: int) -> str:
    """Measure, fit and store; returns what to tell.

    Args:
        name: of the costs file.
        overrides: as on kvbench's command line.
        passes: how often each run is made.

    Raises:
        KvbenchError: a mistake in any of them, or a machine that cannot run the model.
    """
    if passes < 1:
        raise KvbenchError(f"--passes {passes} measures nothing; give 1 or more")
    path = costs_file.path_of(CONF, name)
    costs_file.load(path)  # refused before minutes of measuring
    [given] = parse(list(overrides), sweep=False)
    measured = measure({each.key: each.value for each in given}, passes)
    fitted = fit(measured.fitted)
    found = residuals(fitted.coefficients, measured.fitted, measured.held_out)
    more = {"left_out": fitted.dropped} if fitted.dropped else {}
    day = datetime.datetime.now(datetime.UTC).date()
    source = " ".join(["python -m kvbench.calibrate", *overrides]) + f": real runs on {measured.device}, {day}"
    coefficients = {**fitted.coefficients, "packed": True}
    costs_file.store(path, measured.model, coefficients, source, found | more, measured.hardware)
    rows = [("coefficient", "value", ""), *((n, f"{v:g}", MEANINGS[n]) for n, v in fitted.coefficients.items())]
    rows = [(*row[:2], row[2] + (" (left out: not determined)" if row[0] in fitted.dropped else "")) for row in rows]
    values = aligned([row[:2] for row in rows]).splitlines()
    return "\n".join(
        [
            f"{measured.model} on {measured.device}",
            *(f"{line}  {row[2]}".rstrip() for line, row in zip(values, rows, strict=True)),
            f"Relative error of {found['num_iterations']} iterations: rms {found['rms_pct']:g} %, "
            f"90 % within {found['p90_pct']:g} %.",
            f"Total time of {found['held_out_iterations']} iterations held out: {found['held_out_total_pct']:+g} %.",
            f"Written: {path.parent.parent.name}/{path.parent.name}/{path.name}; use it with costs={name}",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.calibrate",
        description=(__doc__ or "").partition(": ")[2] + " About two minutes; leave the machine alone meanwhile.",
    )
    add = parser.add_argument
    add(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="as on kvbench's command line, as model=tiny_llama or runner.num_threads=1 "
        "(default: opt_125m with 256 tokens at most)",
    )
    add("--name", default="local", help="file in conf/costs/ to write (default: %(default)s)")
    add("--passes", type=int, default=2, metavar="N", help="how often each run is made (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
