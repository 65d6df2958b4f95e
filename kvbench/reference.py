"""Regenerates results/reference/, the small committed set: `make reference`, `python -m kvbench.reference [folder]`.

Most experiments are run without data files, as anybody can; those that replay the paper's own trace, and those that say
little without the authors' data, with it where ``data_dir`` holds it (folder ``<experiment>_pairs``). Real runs (folder
``<experiment>_measured``) say as much about the machine, which their figures name, and want it for themselves: they are
run where they are asked for. Kept are summaries and claims, the manifests in one file, and the figures as PNG; what
differs between machines of one kind (wall time, host) is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from kvbench import command
from kvbench.app import main as kvbench
from kvbench.core import KvbenchError
from kvbench.results import TOGETHER, write_csv, write_json

TARGET = Path(__file__).resolve().parent.parent / "results" / "reference"
EXPERIMENTS: dict[str, list[str]] = {
    "smoke": [],
    "fig_memory_layout": [],
    "fig_memory_growth": [],
    "fig_memory_waste": [],
    "fig_lengths": [],
    "fig_throughput": [],
    "fig_batched_requests": [],
    "fig_parallel_sampling": [],
    "fig_beam_search": ["-m", "panel=c,f"],
    "fig_shared_prefix": [],
    "fig_swap_microbenchmark": [],
    "fig_kernel_instructions": [],
    "memory_map": [],
}
"""Experiments that are run without data files, and what keeps them short."""
PAIRS, TURNS = "sharegpt_lengths.csv.gz", "sharegpt_turn_lengths.csv.gz"
REPLAYS: dict[str, list[str]] = {
    "fig_memory_waste": [],
    "fig_throughput": [],
    "fig_batched_requests": [],
    "fig_sharing": ["-m", "panel=alpaca_samples,alpaca_beams,alpaca_recorded,sharegpt_samples"],
    "fig_block_size": [],
    "fig_swap_vs_recompute": [],
    "fig_chatbot": [],
    "fig_beam_search": [],
    "fig_waterfall": [],
    "fig_noise": [],
    "fig_traces": [],
    "capacity": [],
}
"""The same with the authors' data."""
MEASURED: dict[str, list[str]] = {
    "fig_swap_microbenchmark": ["runner=cpu"],
    "fig_offline_throughput": [],
    "fig_online_latency": [],
    "fig_sharing_measured": [],
    "fig_fidelity": [],
}
"""Real runs, with the authors' data where they ask for lengths; fig_fidelity follows `python -m kvbench.calibrate`."""
_KEPT = "folders that are made stay; name the others to go on"
OF_THE_MACHINE = ("wall_s", "host", "platform", "num_cores")


def keep(results: Path, target: Path) -> None:
    """Copy what is committed of one experiment's results."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with (results / "summary.csv").open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        columns = [name for name in reader.fieldnames or () if name not in OF_THE_MACHINE]
    write_csv(target / "summary.csv", columns, ({name: row[name] for name in columns} for row in rows))
    manifests = {}
    for row in rows:
        manifest = json.loads((results / "points" / row["point"] / "manifest.json").read_text(encoding="utf-8"))
        manifests[row["point"]] = {name: value for name, value in manifest.items() if name not in OF_THE_MACHINE}
    write_json(target / TOGETHER, manifests)
    for path in [results / "claims.csv", *sorted(results.glob("*.png"))]:
        if path.is_file():
            shutil.copyfile(path, target / path.name)


def regenerate(data_dir: Path, folders: Collection[str] = (), target: Path = TARGET) -> None:
    """Run experiments into a folder of their own and keep what is committed.

    Args:
        data_dir: where the authors' data is, if it is anywhere.
        folders: of the set; all but the measured ones unless given.
        target: the set.

    Raises:
        KvbenchError: there is no such folder in the set, data is lacking, or an experiment failed; those before it are
            kept.
    """
    with tempfile.TemporaryDirectory() as work:
        absent = Path(work) / "no-data"
        absent.mkdir()
        runs = {name: (name, absent, options) for name, options in EXPERIMENTS.items()}
        replays = {f"{name}_pairs": (name, data_dir, options) for name, options in REPLAYS.items()}
        measured = {f"{name}_measured": (name, data_dir, options) for name, options in MEASURED.items()}
        everything = runs | replays | measured
        if unknown := [name for name in folders if name not in everything]:
            raise KvbenchError(f"{unknown[0]} is not of the reference set: {', '.join(everything)}")
        chosen = list(folders or runs | replays)
        lacking = [name for name in (PAIRS, TURNS) if not (data_dir / name).is_file()]
        if lacking and not set(chosen) <= set(runs):
            reason = f"{' and '.join(lacking)} not in {data_dir} (KVBENCH_DATA_DIR, else data/)"
            if folders:
                raise KvbenchError(f"{reason}: {', '.join(chosen)} cannot be made")
            print(f"{reason}: what needs data stays")
            chosen = list(runs)
        for folder in chosen:
            experiment, data, options = everything[folder]
            print(f"\n== {folder}", flush=True)
            words = [
                f"+experiment={experiment}",
                f"name={folder}",
                f"results_dir={work}",
                f"data_dir={data}",
                *options,
            ]
            status = kvbench(words)
            if status == command.INTERRUPTED:
                raise KeyboardInterrupt
            if status:
                raise KvbenchError(f"python -m kvbench {' '.join(words)} ended with status {status}; see above")
            keep(Path(work) / folder, target / folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Regenerate the committed set, or the folders of it that the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 after a user's mistake.
    """
    parser = argparse.ArgumentParser(prog="python -m kvbench.reference", description="Regenerate results/reference/.")
    parser.add_argument("folders", nargs="*", help="of the set; all but the measured ones unless given")
    options = parser.parse_args(argv)

    def action() -> int:
        regenerate(Path(os.environ.get("KVBENCH_DATA_DIR") or "data"), options.folders)
        return 0

    return command.run("kvbench.reference", action, _KEPT)


if __name__ == "__main__":
    sys.exit(main())
