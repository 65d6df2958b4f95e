"""The chain of systems as an experiment: planned over every combination that exists, run, taken apart, drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvbench.composition import Composer, parse
from kvbench.core import KvbenchError
from kvbench.figures import fig_waterfall
from kvbench.plan import Plan, plan
from kvbench.results import Results
from kvbench.statistics import paired_ratio
from kvbench.sweep import execute

SHORT = ("workload.duration_s=60", "repeats=2", "threshold=0.1", "executor=serial", "workload.lengths.pairs=histogram")


def planned(compose: Composer, *typed: str) -> Plan:
    return plan(compose, parse(["+experiment=fig_waterfall", *SHORT, *typed], sweep=False))


def test_axes_are_crossed_where_combinations_exist(compose: Composer) -> None:
    done = planned(compose, "panel=a", "axes=placement,reservation,watermark")
    systems = [row.point.config["system"] for row in done.rows if row.repeat == 0]
    assert len(systems) == len(set(systems)) == 8  # three placements with oracle, blocks on demand, two watermarks
    assert systems[0] == "vllm[allocator=buddy,reservation=oracle,scheduler.watermark=0]"
    assert systems[-1] == "vllm[scheduler.watermark=0.01]"
    assert len(done.rows) == 2 * 8
    with pytest.raises(KvbenchError, match="no axis colour; it has placement, reservation"):
        planned(compose, "axes=colour")
    with pytest.raises(KvbenchError, match="no combination of axes=reservation exists"):
        planned(compose, "axes=reservation", "allocator=contiguous")


def test_a_chain_and_its_bounds(compose: Composer, tmp_path: Path) -> None:
    done = planned(compose, "panel=a", f"results_dir={tmp_path}")
    assert len(done.rows) == 10
    report = execute(done, shows_progress=False)
    assert not report.failures
    results = Results(done.folder)
    (panel,) = fig_waterfall.panels(results)
    assert [bar.part.label for bar in panel.bars] == [part.label for part in fig_waterfall.PARTS.values()]
    assert panel.num_orders == 1
    assert np.prod([bar.factor.value for bar in panel.bars]) == pytest.approx(panel.total.value)
    assert sum(panel.share(bar) for bar in panel.bars) == pytest.approx(1)
    rows = results.summary
    rates = {
        name: rows[rows["system"] == name]["trace_capacity_req_per_s"].to_numpy() for name in ("vllm", "orca_oracle")
    }
    assert panel.total == paired_ratio(rates["vllm"], rates["orca_oracle"])
    assert {bound.label for bound in panel.bounds} == {
        "clairvoyant admission",
        "no waste of memory",
        "roofline of the GPUs",
    }
    assert panel.bounds[1].rate.value < panel.bounds[2].rate.value
    table = fig_waterfall.table(results)
    assert table is not None
    assert str(panel.total) in table
    assert fig_waterfall.draw(results).keys() == {"fig_waterfall"}
    assert fig_waterfall.claims(results) == []
