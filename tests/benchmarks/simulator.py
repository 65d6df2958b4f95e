"""How fast the simulator steps, beside the slow reference loop: `make bench` writes results/bench/simulator.csv.

Every number is a median over repeats, each in a fresh process, in CPU time. An iteration is really stepped and recorded
(ledger and request records on, as a run keeps them, Parquet written). Not counted is what a process does once: reading
the trace, loading libraries and the compiled loop. Peak memory is that of the whole process. The reference loop runs
without ledger and files, to its advantage.
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

from kvbench import compiled
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.paged import Paged
from kvbench.clock import VirtualClock
from kvbench.core import Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.records import Record, write_parquet
from kvbench.reservation import Max, OnDemand
from kvbench.runners.beams import ScoreModel
from kvbench.runners.simulated import IterationCosts, Simulated
from kvbench.schedulers.iteration_level import IterationLevel
from kvbench.workloads.arrivals import Paper
from kvbench.workloads.lengths import Alpaca, ShareGPT
from kvbench.workloads.synthetic import Synthetic
from tests.reference_loop import Costs, reference
from tests.reference_streams import Setting, StreamCosts, World
from tests.simulated_streams import simulated

CASES = {
    "sharegpt_vllm": ("sharegpt", 2.0, "vllm"),
    "sharegpt_orca_max": ("sharegpt", 2.0, "orca_max"),
    "alpaca_vllm": ("alpaca", 28.0, "vllm"),
    "alpaca_orca_max": ("alpaca", 28.0, "orca_max"),
    "alpaca_vllm_6_samples": ("alpaca", 5.0, "vllm"),
    "alpaca_vllm_6_beams": ("alpaca", 5.0, "vllm"),
    "sharegpt_vllm_compiled": ("sharegpt", 2.0, "vllm"),
    "sharegpt_orca_max_compiled": ("sharegpt", 2.0, "orca_max"),
    "sharegpt_vllm_10_pools_compiled": ("sharegpt", 20.0, "vllm"),
}
SAMPLES, BEAMS = "alpaca_vllm_6_samples", "alpaca_vllm_6_beams"
# OPT-13B on an A100-40GB with one cost per request, whatever the batch: at 28 requests/s Alpaca is then just served.
COSTS = Costs(a=28.2, b=7.9e-4, c=0.22, p=0.109, q=8.1e-6, c_large=0.22, knee=40)
# The same for several streams: powers of two near the fitted ones, so that every sum is exact in whatever order.
PRICES = StreamCosts(28.0, 2.0**-10, 0.25, 2.0**-3, 2.0**-17, 2.0**-4, 2.0**-3, 2.0**-7)
BETA = 4.0  # of the beams, as fitted on Alpaca
NUM_SLOTS = 15728
DURATION_S = 3600.0
TEN = "sharegpt_vllm_10_pools_compiled"
"""Ten times the pool and the rate, for a twentieth of the hour: the reference loop takes long there."""
COLUMNS = ("case", "iterations_per_s", "requests_per_s", "ratio_to_reference", "peak_rss_mib")


def trace(case: str) -> list[Request]:
    """The paper's trace, seed 0, one hour."""
    workload, rate, _ = CASES[case]
    samples, width = 6 if case == SAMPLES else 1, 6 if case == BEAMS else 1
    data_dir = os.environ.get("KVBENCH_DATA_DIR", "data")
    lengths = ShareGPT(data_dir) if workload == "sharegpt" else Alpaca(data_dir)
    duration_s = DURATION_S / 20 if case == TEN else DURATION_S
    synthetic = Synthetic(workload, lengths, Paper(), 2048, rate, duration_s, num_samples=samples, beam_width=width)
    return synthetic.generate().requests


def built(case: str) -> Engine:
    """What serves a case, with nothing served yet."""
    if CASES[case][2] == "vllm":
        scheduler = IterationLevel(Paged(10 * NUM_SLOTS if case == TEN else NUM_SLOTS), OnDemand(), 2048, 2048)
    else:
        scheduler = IterationLevel(Buddy(NUM_SLOTS), Max(), 2048, 256)
    if case in (SAMPLES, BEAMS):
        runner = simulated(PRICES, ScoreModel(BETA))
    else:
        runner = Simulated(IterationCosts(COSTS.a, COSTS.b, COSTS.c, COSTS.p, COSTS.q, COSTS.c_large, COSTS.knee))
    return Engine(scheduler, runner, VirtualClock(), Ledger(scheduler.allocator))


def written(case: str, requests: list[Request]) -> Record:
    """Serve a case and write its record, as a run does."""
    record = compiled.serve(built(case), requests, 1) if case.endswith("compiled") else serve(built(case), requests)
    assert record is not None
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Path(folder) / "steps.parquet", record.steps)
        write_parquet(Path(folder) / "requests.parquet", record.requests)
    return record


def measure(case: str, what: str) -> dict[str, float]:
    """Run one case in this process; ``what`` is ``engine`` or ``reference``."""
    requests = trace(case)
    if what == "reference":
        start = time.process_time()
        iterations = slow(case, requests)
        return {"seconds": time.process_time() - start, "iterations": iterations}
    written(case, requests[:1])  # loads what is loaded once in a process
    start = time.process_time()
    record = written(case, requests)
    return {
        "seconds": time.process_time() - start,
        "iterations": len(record.steps["end_s"]),
        "requests": len(requests),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def slow(case: str, requests: list[Request]) -> int:
    """Iterations of the reference loop."""
    if case in (SAMPLES, BEAMS):
        setting = Setting("on_demand", NUM_SLOTS, block_size=16)
        return len(World(requests, PRICES, ScoreModel(BETA).parents, setting).run(with_memory=False).rows)
    system, limit = ("on_demand", 2048) if CASES[case][2] == "vllm" else ("max", 256)
    num_slots = 10 * NUM_SLOTS if case == TEN else NUM_SLOTS
    outcome = reference(requests, COSTS, num_slots=num_slots, system=system, max_num_seqs=limit, with_rows=False)
    return outcome.iterations


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
        referred = fresh(case, "reference")
        seconds = statistics.median(run["seconds"] for run in runs)
        if referred["iterations"] != runs[0]["iterations"]:
            raise SystemExit(f"{case}: {runs[0]['iterations']} iterations, {referred['iterations']} in the reference")
        row = (
            case,
            round(runs[0]["iterations"] / seconds),
            round(runs[0]["requests"] / seconds),
            round(referred["seconds"] / seconds, 2),
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
