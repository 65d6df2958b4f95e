"""``python -m kvbench.fit``: compare iteration costs with the paper's curves, fit them, or tabulate their fidelity."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import yaml
from tqdm import tqdm

from kvbench import command
from kvbench.core import KvbenchError
from kvbench.fit.curves import (
    ONE_ENGINE,
    Costs,
    Target,
    cells,
    grouped,
    panel_of,
    predict,
    rms_log,
    targets,
)
from kvbench.fit.report import report
from kvbench.fit.search import fit
from kvbench.runners.simulated import NOT_COEFFICIENTS


def main(argv: Sequence[str] | None = None) -> int:
    """Fit or compare what the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 after a user's mistake.
    """
    options = _parser().parse_args(argv)
    return command.run("kvbench.fit", lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    if options.report:
        _check_folder(options.report)
        with ProcessPoolExecutor(options.workers) as pool:
            text = report(pool)
        options.report.write_text(text, encoding="utf-8")
    else:
        _compare(options)
    return 0


def _compare(options: argparse.Namespace) -> None:
    """Fit where something is free; print how far the curves are met."""
    if not options.curves:
        raise KvbenchError("nothing to do; give --curves, as --curves a, or --report FILE")
    if options.output:
        _check_folder(options.output)
    of = targets(dict(_curves(each) for each in options.curves), [f"costs={options.costs}", *options.set])
    models = sorted({target.config["model"]["name"] for target in of})
    if len(models) > 1:
        raise KvbenchError(f"these curves are of {' and '.join(models)}, but coefficients belong to one model")
    entry = of[0].config["costs"]
    start = {key: value for key, value in entry.items() if key not in NOT_COEFFICIENTS} | _numbers(
        "--start", options.start
    )
    weights = _numbers("--weights", options.weights)
    with ProcessPoolExecutor(options.workers) as pool:
        costs = start
        if options.free:
            with tqdm(total=options.evaluations, unit="fit", dynamic_ncols=True) as bar:

                def show(tried: Costs, rms: float) -> None:
                    bar.update()
                    bar.set_postfix_str(
                        " ".join([f"rms {rms:.4f}", *(f"{name}={tried[name]:g}" for name in options.free)])
                    )

                costs = fit(
                    of, start, options.free, pool, evaluations=options.evaluations, weights=weights, on_evaluation=show
                )
        print(table(of, predict(of, costs, pool)))
    for name, value in costs.items():
        if name != "context_factors":
            print(f"{name:12} {value}" + (f"   (start {start[name]})" if name in options.free else ""))
    if options.output:
        how = f"python -m kvbench.fit {' '.join(sys.argv[1:])}"
        content = {
            "name": options.output.stem,
            "models": {models[0]: {"hardware": entry["hardware"], **costs, "source": how}},
        }
        options.output.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def table(of: Sequence[Target], simulated: Sequence[float]) -> str:
    """One line per curve: its rms, and simulated/published at every rate; then one per panel."""
    curves = grouped(of, simulated, lambda target: target.curve)
    panels = grouped(of, simulated, lambda target: f"({target.panel})")
    lines = [f"{curve:22} rms {rms_log(*each):.3f}   {'  '.join(cells(each))}" for curve, each in curves.items()]
    lines += [f"{panel:22} rms {rms_log(*each):.4f}  {len(each[0])} points" for panel, each in panels.items()]
    return "\n".join(lines)


def _check_folder(file: Path) -> None:
    if not file.parent.is_dir():
        raise KvbenchError(f"{file} cannot be written: there is no folder {file.parent}")


def _curves(text: str) -> tuple[str, list[str]]:
    letter, _, systems = text.partition(":")
    panel_of(letter)
    return letter, systems.split(",") if systems else list(ONE_ENGINE)


def _numbers(option: str, texts: Iterable[str]) -> dict[str, float]:
    numbers = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            numbers[name] = int(value) if value.isdigit() else float(value)
        except ValueError:
            raise KvbenchError(f"{option} {text}: give NAME=NUMBER") from None
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvbench.fit", description=(__doc__ or "").partition(": ")[2])
    add = parser.add_argument
    add(
        "--curves",
        nargs="+",
        default=[],
        metavar="PANEL[:SYSTEM,...]",
        help="curves of Fig. 12, as a:orca_max,vllm; a panel alone is all but fastertransformer",
    )
    add(
        "--costs",
        default="paper_engine",
        metavar="NAME",
        help="file in conf/costs/ to start from (default: %(default)s)",
    )
    add(
        "--free",
        nargs="+",
        default=[],
        metavar="NAME",
        help="coefficients to vary, as a_ms; without it, the curves are only compared",
    )
    add("--start", nargs="+", default=[], metavar="NAME=VALUE", help="other coefficients to start from")
    add("--weights", nargs="+", default=[], metavar="PANEL=WEIGHT", help="weight of each point of a panel (default: 1)")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="overrides, as on kvbench's command line: workload.lengths.pairs=histogram",
    )
    add(
        "--evaluations",
        type=int,
        default=150,
        metavar="N",
        help="simulations of all the points, at most (default: %(default)s)",
    )
    add("--workers", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the coefficients there, as a file for conf/costs/")
    add(
        "--report",
        type=Path,
        metavar="FILE",
        help="write all tables of docs/fidelity.md there; takes minutes, and the authors' pairs in data_dir",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
