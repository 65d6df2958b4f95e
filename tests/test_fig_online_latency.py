"""The experiment of real tokens in real time: its points, whose queue grew, its figure, table and expectations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kvbench.composition import composer, parse
from kvbench.figures import fig_online_latency as online
from kvbench.paper.claims import Verdict
from kvbench.parts import instantiate_workload
from kvbench.plan import plan
from kvbench.records import Columns, write_parquet
from kvbench.results import Results
from tests.drawn import assert_nothing_is_cut, texts
from tests.extras import NEEDS_MODELS
from tests.synthetic_results import Row, write_results

SUSTAINED = {"fastertransformer": 0.5, "orca_max": 2.0, "orca_pow2": 2.5, "orca_oracle": 3.2, "vllm": 4.0}
"""System -> the rate at which its latency is 0.2, five times that of a machine at rest."""
MODEL_LEN = 256


def rows(sustained: dict[str, float] = SUSTAINED, **more: Any) -> list[Row]:
    """Latency 0.04 until a quarter below the sustained rate, from there on a line through 0.2 at that rate."""
    return [
        {
            "system": system,
            "runner": "cpu",
            "device": "cpu, 2 threads",
            "costs": None,
            "model": "opt_125m",
            "hardware": "local",
            "workload": "sharegpt_scaled",
            "num_slots": 4 * MODEL_LEN,
            "request_rate": factor * rate,
            "num_requests": round(20 * factor * rate),
            "normalized_latency_mean_s": seconds,
            "ttft_p50_s": 0.1,
            "num_running_mean": 3 * factor,
            "num_preemptions": 0,
            **more,
        }
        for system, rate in sustained.items()
        for factor, seconds in ((0.5, 0.04), (0.75, 0.04), (1.25, 0.36))
    ]


def results(folder: Path, given: list[Row]) -> Results:
    """A folder in which the queue grew at every rate above the sustained ones."""
    found = write_results(folder, given)
    for i, row in enumerate(given):
        path = folder / "points" / f"p{i}"
        config = {"model": {"max_model_len": MODEL_LEN}, "scheduler": {"max_model_len": MODEL_LEN, "max_num_seqs": 8}}
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        grows = row["normalized_latency_mean_s"] > 0.3
        record = {"num_waiting": [0, 4, 8] if grows else [0, 0, 0], "num_running": [2, 2, 2], "largest_free": [0, 0, 0]}
        seconds = {"end_s": [1.0, 2.0, 3.0], "seconds": [1.0, 1.0, 1.0]}
        write_parquet(path / "steps.parquet", columns(**record, **seconds))
        write_parquet(path / "requests.parquet", columns(arrival_s=[0.0, 3.0]))
    return found


def columns(**given: list[Any]) -> Columns:
    return {name: np.array(values) for name, values in given.items()}


def test_the_experiment_is_five_systems_in_one_pool_and_real() -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    with composer() as compose:
        planned = plan(compose, parse(["+experiment=fig_online_latency"], sweep=False))
    configs = [row.point.config for row in planned.rows]
    assert {config["system"] for config in configs} == set(SUSTAINED)
    assert {config["kv_cache_seqs"] for config in configs} == {4}
    assert {config["choices"]["runner"] for config in configs} == {"cpu"}
    assert planned.keeps_steps  # the marks and the reasons need them
    for config in configs:
        assert config["measure_to_s"] == config["workload"]["duration_s"]
    assert sum(config["workload"]["duration_s"] for config in configs) <= 400  # s, of the eight minutes it may take


def test_every_system_and_rate_sees_the_same_requests_at_scaled_times() -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    with composer() as compose:
        planned = plan(compose, parse(["+experiment=fig_online_latency"], sweep=False))
    first = None
    for row in planned.rows:
        config = row.point.config
        rate = config["workload"]["request_rate"]
        found = instantiate_workload(config).generate().requests[:10]
        seen = [(request.arrival_s * rate, request.prompt_len, request.output_len) for request in found]
        first = first or seen
        for (arrival, *lengths), (other, *others) in zip(seen, first, strict=True):
            assert lengths == others
            assert arrival == pytest.approx(other)


@pytest.mark.parametrize(
    ("waiting", "grew"),
    [
        ([0, 4, 8], True),
        ([8, 8, 8], False),  # long, but it does not grow
        ([0, 9, 8], False),
        ([0, 1, 2], False),  # hardly a queue
    ],
)
def test_a_queue_that_grew_until_arrivals_ended_is_told_from_one_that_did_not(waiting: list[int], grew: bool) -> None:
    steps = columns(end_s=[1.0, 2.0, 3.0, 9.0], seconds=[1.0, 1.0, 1.0, 6.0], num_waiting=[*waiting, 50])
    assert online.grows(steps, columns(arrival_s=[0.5, 3.0])) is grew  # what drains afterwards does not count


def test_a_step_counts_with_the_part_of_it_that_lies_in_a_third() -> None:
    steps = columns(end_s=[2.0, 3.0], seconds=[2.0, 1.0], num_waiting=[5, 9])
    assert not online.grows(steps, columns(arrival_s=[3.0]))  # 5, 5, 9
    steps = columns(end_s=[0.5, 2.0, 3.0], seconds=[0.5, 1.5, 1.0], num_waiting=[1, 5, 9])
    assert online.grows(steps, columns(arrival_s=[3.0]))  # 3, 5, 9


def test_one_request_makes_no_queue() -> None:
    steps = columns(end_s=[1.0], seconds=[1.0], num_waiting=[0])
    assert not online.grows(steps, columns(arrival_s=[0.0]))


def test_the_table_has_every_point_and_the_rate_at_the_threshold(tmp_path: Path) -> None:
    table = online.table(results(tmp_path, rows()))
    assert table is not None
    assert max(map(len, table.splitlines())) <= 120
    points, sustained = table.split("\n\n")
    assert sum(line.split()[0] in ("Faster", "vLLM") for line in points.splitlines()) == 3
    assert points.count("no queue 100 %") == 2 * len(SUSTAINED)
    assert points.count("memory 67 %, no queue 33 %") == len(SUSTAINED)
    assert "5* " in points
    assert "3* " not in points  # the queue did not grow there
    assert "0.2 s/token, 5 times the lowest mean latency (where the mean batch is 1.5)" in sustained
    found = {line.rsplit(maxsplit=2)[0]: line.split()[-2:] for line in sustained.splitlines()[2:]}
    assert found == {
        "FasterTransformer": ["0.5", "8.00"],
        "Orca (Max)": ["2", "2.00"],
        "Orca (Pow2)": ["2.5", "1.60"],
        "Orca (Oracle)": ["3.2", "1.25"],
        "vLLM": ["4", "-"],
    }


def test_the_figure_says_where_it_was_measured_and_cuts_nothing(tmp_path: Path) -> None:
    figure = online.draw(results(tmp_path, rows()))["fig_online_latency"]
    said = " ".join(text.get_text() for text in texts(figure)).replace("\n", " ")
    assert "opt_125m, measured on cpu, 2 threads, KV pool of 1,024 slots" in said
    assert "seed 0" in said
    assert "5 to 100 requests" in said
    assert "0.2 s/token" in said
    assert "imulated" not in said
    assert_nothing_is_cut(figure)


def test_points_whose_queue_grew_are_marked(tmp_path: Path) -> None:
    figure = online.draw(results(tmp_path, rows()))["fig_online_latency"]
    for axes in figure.axes:
        marked = {x for line in axes.lines if line.get_marker() == "x" for x in np.asarray(line.get_xdata())}
        assert marked == {1.25 * rate for rate in SUSTAINED.values()}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda row: row, Verdict.REPRODUCED),
        (lambda row: row | {"model": "tiny_llama"}, Verdict.NOT_COMPARABLE),
        (lambda row: row | {"num_slots": 2048}, Verdict.NOT_COMPARABLE),
        (lambda row: row | {"runner": "simulated", "costs": "paper_engine"}, Verdict.NOT_COMPARABLE),
    ],
)
def test_expectations_hold_for_what_they_were_made(
    change: Callable[[Row], Row], verdict: Verdict, tmp_path: Path
) -> None:
    found = online.claims(results(tmp_path, [change(row) for row in rows()]))
    assert [row.measured for row in found] == pytest.approx([2.0, 1.6, 1.25])
    assert {row.verdict for row in found} == {verdict}
    assert all("not the paper's" in row.note and row.figure == "none" for row in found)


def test_expectations_can_fail_and_an_open_end_confirms_nothing(tmp_path: Path) -> None:
    slow = results(tmp_path / "slow", rows(SUSTAINED | {"vllm": 2.2}))
    verdicts = [row.verdict for row in online.claims(slow)]
    assert verdicts == [Verdict.NOT_REPRODUCED] * 3
    low = [row for row in rows() if row["system"] != "vllm" or row["normalized_latency_mean_s"] < 0.1]
    open_end = online.claims(results(tmp_path / "open", low))
    assert {row.verdict for row in open_end} == {Verdict.UNDECIDED}
    assert all("vLLM > 3" in row.note for row in open_end)


def test_steps_that_were_not_kept_are_said_and_mark_nothing(tmp_path: Path) -> None:
    found = results(tmp_path, rows())
    for path in tmp_path.glob("points/*/steps.parquet"):
        path.unlink()
    table = online.table(found) or ""
    assert "unknown (records=summary)" in table
    assert "*" not in table
