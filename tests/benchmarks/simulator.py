"""How fast the simulator steps, beside the slow reference loop: `make bench` writes results/bench/simulator.csv.

Every number is a median over repeats, each in a fresh process, in CPU time. An iteration is really stepped and recorded
(ledger and request records on, as a run keeps them); reading the trace is not counted, and peak memory is that of the
whole process, writing Parquet included. The reference loop runs without its ledger, to its advantage.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvbench.allocators.buddy import Buddy
from kvbench.allocators.paged import Paged
from kvbench.clock import VirtualClock
from kvbench.core import Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.records import write_parquet
from kvbench.reservation import Max, OnDemand
from kvbench.runners.simulated import IterationCosts, Simulated
from kvbench.schedulers.iteration_level import IterationLevel
from kvbench.workloads.arrivals import Paper
from kvbench.workloads.lengths import Alpaca, ShareGPT
from kvbench.workloads.synthetic import Synthetic
from tests.reference_loop import Costs, reference

CASES = {
    "sharegpt_vllm": ("sharegpt", 2.0, "vllm"),
    "sharegpt_orca_max": ("sharegpt", 2.0, "orca_max"),
    "alpaca_vllm": ("alpaca", 28.0, "vllm"),
    "alpaca_orca_max": ("alpaca", 28.0, "orca_max"),
}
# OPT-13B on an A100-40GB with one cost per request, whatever the batch: at 28 requests/s Alpaca is then just served.
COSTS = Costs(a=28.2, b=7.9e-4, c=0.22, p=0.109, q=8.1e-6, c_large=0.22, knee=40)
NUM_SLOTS = 15728
DURATION_S = 3600.0
COLUMNS = ("case", "iterations_per_s", "requests_per_s", "ratio_to_reference", "peak_rss_mib")


def trace(workload: str, rate: float) -> list[Request]:
    """The paper's trace, seed 0, one hour."""
    data_dir = os.environ.get("KVBENCH_DATA_DIR", "data")
    lengths = ShareGPT(data_dir) if workload == "sharegpt" else Alpaca(data_dir)
    return Synthetic(workload, lengths, Paper(), 2048, rate, DURATION_S).generate().requests


def measure(case: str, what: str) -> dict[str, float]:
    """Run one case in this process; ``what`` is ``engine`` or ``reference``."""
    workload, rate, system = CASES[case]
    requests = trace(workload, rate)
    if what == "reference":
        name, limit = ("on_demand", 2048) if system == "vllm" else ("max", 256)
        start = time.process_time()
        outcome = reference(requests, COSTS, num_slots=NUM_SLOTS, system=name, max_num_seqs=limit, with_rows=False)
        return {"seconds": time.process_time() - start, "iterations": outcome.iterations}
    if system == "vllm":
        scheduler = IterationLevel(Paged(NUM_SLOTS), OnDemand(), 2048, 2048)
    else:
        scheduler = IterationLevel(Buddy(NUM_SLOTS), Max(), 2048, 256)
    costs = IterationCosts(COSTS.a, COSTS.b, COSTS.c, COSTS.p, COSTS.q, COSTS.c_large, COSTS.knee)
    engine = Engine(scheduler, Simulated(costs), VirtualClock(), Ledger(scheduler.allocator))
    start = time.process_time()
    record = serve(engine, requests)
    seconds = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Path(folder) / "steps.parquet", record.steps)
        write_parquet(Path(folder) / "requests.parquet", record.requests)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": seconds,
        "iterations": len(record.steps["end_s"]),
        "requests": len(requests),
        "peak_rss_mib": peak,
    }


def fresh(case: str, what: str) -> dict[str, float]:
    """The same in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.simulator", "--case", case, "--what", what],
        check=True,
        capture_output=True,
        text=True,
    )
    numbers: dict[str, float] = json.loads(done.stdout)
    return numbers


def main() -> None:
    """Measure every case, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--what", choices=("engine", "reference"), default="engine")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/bench/simulator.csv"))
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.what)))
        return
    rows = []
    for case in CASES:
        runs = [fresh(case, "engine") for _ in range(options.repeats)]
        slow = fresh(case, "reference")
        seconds = statistics.median(run["seconds"] for run in runs)
        if slow["iterations"] != runs[0]["iterations"]:
            raise SystemExit(f"{case}: {runs[0]['iterations']} iterations, but {slow['iterations']} in the reference")
        row = (
            case,
            round(runs[0]["iterations"] / seconds),
            round(runs[0]["requests"] / seconds),
            round(slow["seconds"] / seconds, 2),
            round(max(run["peak_rss_mib"] for run in runs), 1),
        )
        rows.append(row)
        print("  ".join(f"{name}={value}" for name, value in zip(COLUMNS, row, strict=True)), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    print(f"wrote {options.out}: medians of {options.repeats} fresh processes, CPU time, simulated runs")


if __name__ == "__main__":
    main()
