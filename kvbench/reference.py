"""Regenerates results/reference/, the small committed set: `make reference`, or `python -m kvbench.reference [target]`.

Most experiments are run without data files, as anybody can; those that replay the paper's own trace, and those that say
little without the authors' data, with it where ``data_dir`` holds it (folder ``<experiment>_pairs``). Kept are
summaries and claims, the manifests in one file, and the figures as PNG; what differs from machine to machine (wall
time, host) is left out.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from kvbench.app import main as kvbench
from kvbench.core import KvbenchError
from kvbench.results import write_csv, write_json

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
    "fig_waterfall": [],
    "fig_traces": [],
}
"""The same with the authors' data."""
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
    write_json(target / "manifests.json", manifests)
    for path in [results / "claims.csv", *sorted(results.glob("*.png"))]:
        if path.is_file():
            shutil.copyfile(path, target / path.name)


def regenerate(target: Path, data_dir: Path) -> None:
    """Run every experiment into a folder of its own and keep what is committed.

    Raises:
        KvbenchError: an experiment failed; those before it are kept.
    """
    with tempfile.TemporaryDirectory() as work:
        absent = Path(work) / "no-data"
        runs = [(name, name, absent, options) for name, options in EXPERIMENTS.items()]
        lacking = [name for name in (PAIRS, TURNS) if not (data_dir / name).is_file()]
        if lacking:
            print(f"{' and '.join(lacking)} not in {data_dir} (KVBENCH_DATA_DIR, else data/): what needs data stays")
        else:
            runs += [(name, f"{name}_pairs", data_dir, options) for name, options in REPLAYS.items()]
        for experiment, folder, data, options in runs:
            print(f"\n== {folder}", flush=True)
            command = [
                f"+experiment={experiment}",
                f"name={folder}",
                f"results_dir={work}",
                f"data_dir={data}",
                *options,
            ]
            if status := kvbench(command):
                raise KvbenchError(f"python -m kvbench {' '.join(command)} ended with status {status}; see above")
            keep(Path(work) / folder, target / folder)


def main() -> int:
    """Regenerate the committed set; returns the exit status."""
    data_dir = Path(os.environ.get("KVBENCH_DATA_DIR") or "data")
    try:
        regenerate(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET, data_dir)
    except KvbenchError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
