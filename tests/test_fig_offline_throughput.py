"""The experiment of real tokens, all at once: its points, what limited each, its figure and its expectations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kvbench.composition import composer, parse
from kvbench.core import KvbenchError
from kvbench.figures import fig_offline_throughput as offline
from kvbench.figures.limits import limits
from kvbench.paper.claims import Verdict
from kvbench.plan import plan
from kvbench.records import Columns, write_parquet
from kvbench.results import Results
from tests.drawn import assert_nothing_is_cut, texts
from tests.extras import NEEDS_MODELS
from tests.synthetic_results import Row, write_results

SYSTEMS = ("fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "vllm")
RATES = {"fastertransformer": 10.0, "orca_max": 20.0, "orca_pow2": 25.0, "orca_oracle": 30.0, "vllm": 40.0}
MODEL_LEN = 256
SCHEDULER: dict[str, Any] = {"max_model_len": MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 2560}


def steps(**columns: list[float]) -> Columns:
    return {name: np.array(values) for name, values in columns.items()}


def rows(**more: Any) -> list[Row]:
    return [
        {
            "system": system,
            "runner": "cpu",
            "device": "cpu, 2 threads",
            "costs": None,
            "model": "opt_125m",
            "hardware": "local",
            "workload": "sharegpt_scaled",
            "num_slots": budget * MODEL_LEN,
            "num_requests": 40,
            "throughput_tok_per_s": rate * budget,
            "num_running_mean": budget,
            "token_states_pct": 60.0,
            "free_pct": 40.0,
            "num_preemptions": 0,
            **more,
        }
        for system, rate in RATES.items()
        for budget in (2, 4)
    ]


def results(folder: Path, given: list[Row]) -> Results:
    """A folder whose points waited for memory in one of four seconds."""
    found = write_results(folder, given)
    record = steps(
        num_waiting=[1, 0], largest_free=[0, 0], num_running=[2, 2], seconds=[1.0, 3.0]
    )  # the memory is full until the end, but nobody waits for it any more
    for point in (folder / "points").iterdir() if given else ():
        config = {"model": {"max_model_len": MODEL_LEN}, "scheduler": SCHEDULER}
        (point / "config.yaml").write_text(yaml.safe_dump(config))
        write_parquet(point / "steps.parquet", record)
    return found


def test_the_experiment_is_five_systems_in_four_pools_and_real() -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    with composer() as compose:
        planned = plan(compose, parse(["+experiment=fig_offline_throughput"], sweep=False))
    configs = [row.point.config for row in planned.rows]
    assert {(config["system"], config["kv_cache_seqs"]) for config in configs} == {
        (system, budget) for system in SYSTEMS for budget in (2, 4, 8, 16)
    }
    assert {config["choices"]["runner"] for config in configs} == {"cpu"}
    assert all(config["workload"]["max_model_len"] == MODEL_LEN for config in configs)
    assert planned.keeps_steps  # the table needs them


def test_what_limits_a_run_is_told_apart() -> None:
    record = steps(
        num_waiting=[5, 5, 5, 0, 0],
        largest_free=[MODEL_LEN - 1, MODEL_LEN, MODEL_LEN, 0, 999],
        num_running=[8, 8, 7, 8, 1],
        seconds=[4.0, 3.0, 1.0, 1.0, 1.0],
    )
    expected = {"memory": 0.4, "batch limit": 0.3, "no queue": 0.2, "tokens per iteration": 0.1}
    assert limits(record, SCHEDULER) == pytest.approx(expected)
    assert list(limits(record, SCHEDULER)) == list(expected)
    request_level = {"max_model_len": MODEL_LEN, "max_num_seqs": 8, "max_padded_len": 256}
    assert limits(record, request_level)["batch not over"] == pytest.approx(0.1)


def test_the_table_says_what_limited_each_point(tmp_path: Path) -> None:
    table = offline.table(results(tmp_path, rows()))
    assert table is not None
    lines = table.splitlines()
    assert sum("no queue 75 %, memory 25 %" in line for line in lines) == 10
    assert next(line for line in lines if line.startswith("vLLM  ")).split()[1] == "2"
    assert "vLLM over Orca (Max): tokens/s, KV budget of 4 longest sequences: 2 (expected: at least 1.8)" in lines
    assert max(map(len, lines)) <= 120


def test_the_figure_says_where_it_was_measured_and_cuts_nothing(tmp_path: Path) -> None:
    figure = offline.draw(results(tmp_path, rows()))["fig_offline_throughput"]
    said = " ".join(text.get_text() for text in texts(figure)).replace("\n", " ")
    assert "opt_125m, measured on cpu, 2 threads; 40 requests" in said
    assert "ShareGPT pairs of the authors' artifact" in said
    assert "imulated" not in said
    assert "padding" not in said  # nothing of it in these rows
    assert_nothing_is_cut(figure)


def test_expectations_are_kvbenchs_own_and_hold_for_what_they_were_made(tmp_path: Path) -> None:
    found = offline.claims(results(tmp_path / "as expected", rows()))
    assert [(row.paper_low, row.measured, row.verdict) for row in found] == [
        (1.8, 2.0, Verdict.REPRODUCED),
        (1.2, pytest.approx(4 / 3), Verdict.REPRODUCED),
    ]
    assert all("not the paper's" in row.note and row.figure == "none" for row in found)

    slower = [row | ({"throughput_tok_per_s": 1.0} if row["system"] == "vllm" else {}) for row in rows()]
    assert {row.verdict for row in offline.claims(results(tmp_path / "slower", slower))} == {Verdict.NOT_REPRODUCED}

    for i, other in enumerate(({"model": "tiny_llama"}, {"runner": "simulated", "costs": "paper_engine"})):
        judged = offline.claims(results(tmp_path / str(i), rows(**other)))
        assert {row.verdict for row in judged} == {Verdict.NOT_COMPARABLE}

    two_only = [row for row in rows() if row["num_slots"] == 2 * MODEL_LEN]
    assert {row.verdict for row in offline.claims(results(tmp_path / "two", two_only))} == {Verdict.NOT_RUN}


def test_steps_that_were_not_kept_are_said(tmp_path: Path) -> None:
    found = results(tmp_path, rows())
    for path in tmp_path.glob("points/*/steps.parquet"):
        path.unlink()
    assert "unknown (records=summary)" in (offline.table(found) or "")


def test_a_mistyped_factor_is_refused() -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    with composer() as compose, pytest.raises(KvbenchError, match=r"factors"):
        plan(compose, parse(["+experiment=fig_offline_throughput", "workload.lengths.factors=1"], sweep=False))
