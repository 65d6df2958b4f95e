"""Planning an experiment, running what is not finished, collecting what was asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from kvbench.composition import CONF, Composer, groups, load_experiment, parse
from kvbench.core import KvbenchError
from kvbench.executors.base import Result, WorkerLost
from kvbench.executors.base import Task as AnyTask
from kvbench.executors.local import Local
from kvbench.executors.serial import Serial
from kvbench.folder import finished_summary
from kvbench.parts import instantiate_workload
from kvbench.plan import Plan, Row, plan
from kvbench.results import COLUMNS
from kvbench.run import run_all
from kvbench.sweep import Interrupted, Report, execute
from tests.extras import NEEDS_MODELS

FAST = ("workload=fixed", "workload.num_requests=5", "executor=serial")


pytestmark = pytest.mark.usefixtures("elsewhere")


Planner = Callable[..., Plan]


@pytest.fixture
def planned(compose: Composer) -> Planner:
    return lambda *typed, sweep=False: plan(compose, parse([*FAST, *typed], sweep=sweep))


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let ``+experiment=smoke`` have this content."""

    def put(text: str) -> None:
        monkeypatch.setattr("kvbench.plan.load_experiment", lambda _: yaml.safe_load(text))

    return put


def summary(of: Plan) -> pd.DataFrame:
    return pd.read_csv(of.folder / "summary.csv")


def run(of: Plan) -> Report:
    return execute(of, shows_progress=False)


def values(of: Plan, *path: str) -> list[Any]:
    found = []
    for row in of.rows:
        node: Any = row.point.config
        for key in path:
            node = node[key]
        found.append(node)
    return found


THREE_PANELS = """
common: {records: summary, workload: fixed, workload.num_requests: 3}
points:
  - {panel: a, system: [vllm, orca_max], workload.request_rate: [1, 2]}
  - {panel: b, system: vllm, workload.request_rate: 1, records: full}
  - {panel: 3, system: orca_pow2, workload.request_rate: 5, workload.lengths.prompt_len: 7}
"""
WITHOUT_RECORDS = THREE_PANELS.replace(", records: full", "")


def test_points_are_the_product_of_lists_in_order(planned: Planner, experiment: Callable[[str], None]) -> None:
    experiment(WITHOUT_RECORDS)
    found = planned("+experiment=smoke")
    assert [row.panel for row in found.rows] == ["a"] * 4 + ["b", 3]
    assert values(found, "system") == ["vllm", "vllm", "orca_max", "orca_max", "vllm", "orca_pow2"]
    assert values(found, "workload", "request_rate") == [1, 2, 1, 2, 1, 5]
    assert not found.keeps_steps
    assert found.folder == Path("results/smoke")
    assert found.rows[0].point == found.rows[4].point


def test_an_entry_stands_above_what_is_common(planned: Planner, experiment: Callable[[str], None]) -> None:
    experiment("{common: {workload.request_rate: 1}, points: [{workload.request_rate: 2}, {}]}")
    assert values(planned("+experiment=smoke"), "workload", "request_rate") == [2, 1]


def test_what_is_typed_stands_above_the_experiment(planned: Planner, experiment: Callable[[str], None]) -> None:
    experiment(WITHOUT_RECORDS)
    found = planned("+experiment=smoke", "workload.request_rate=9", "records=full", "allocator.block_size=32")
    assert set(values(found, "workload", "request_rate")) == {9}
    assert set(values(found, "allocator", "block_size")) == {32}
    assert found.keeps_steps
    assert len(found.rows) == 4  # identical points of a panel are one


def test_records_belong_to_the_command(planned: Planner, experiment: Callable[[str], None]) -> None:
    experiment(THREE_PANELS)
    with pytest.raises(KvbenchError, match="records, interval and executor belong to the whole command"):
        planned("+experiment=smoke")


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        (["panel=a"], 4), (["panel=a,3"], 5), (["system=vllm"], 3), (["system=vllm,orca_pow2"], 4),
        (["panel=a", "system=orca_max"], 2),
    ],
)  # fmt: skip
def test_selection(planned: Planner, experiment: Callable[[str], None], typed: list[str], count: int) -> None:
    experiment(WITHOUT_RECORDS)
    assert len(planned("+experiment=smoke", *typed).rows) == count


BOTH_WAYS = """
common: {workload: fixed, workload.num_requests: 3}
points: [{panel: a, runner: simulated}, {panel: b, runner: cpu, model: tiny_llama}]
selected: {runner: simulated}
"""


@pytest.mark.parametrize(
    ("typed", "panels"),
    [
        ([], ["a"]), (["runner=cpu"], ["b"]), (["runner=simulated"], ["a"]), (["panel=b"], ["b"]),
        (["panel=a,b"], ["a", "b"]),
    ],
)  # fmt: skip
def test_what_runs_unless_it_is_selected(
    planned: Planner, experiment: Callable[[str], None], typed: list[str], panels: list[str]
) -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    experiment(BOTH_WAYS)
    assert [row.panel for row in planned("+experiment=smoke", *typed).rows] == panels


def test_a_runner_that_all_points_have_is_no_selection(planned: Planner, experiment: Callable[[str], None]) -> None:
    experiment("{common: {workload: fixed, runner: cpu}}")
    assert values(planned("+experiment=smoke", "runner=simulated"), "choices", "runner") == ["simulated"]


def test_selecting_what_is_not_there_is_refused(planned: Planner, experiment: Callable[[str], None]) -> None:
    experiment(WITHOUT_RECORDS)
    with pytest.raises(KvbenchError, match="has no panel=c; panel is one of a, b, 3"):
        planned("+experiment=smoke", "panel=c")
    with pytest.raises(
        KvbenchError, match="has no system=fastertransformer; system is one of vllm, orca_max, orca_pow2"
    ):
        planned("+experiment=smoke", "system=fastertransformer")
    with pytest.raises(KvbenchError, match="has no system=orca_max; system is one of vllm"):
        planned("+experiment=smoke", "panel=b", "system=orca_max")


def test_an_experiment_without_systems_takes_any(planned: Planner, experiment: Callable[[str], None]) -> None:
    experiment("points: [{workload.request_rate: [1, 2]}]")
    assert values(planned("+experiment=smoke", "system=orca_pow2"), "system") == ["orca_pow2"] * 2
    assert len(planned("+experiment=smoke", "system=orca_pow2,vllm").rows) == 4


def test_an_override_that_a_part_does_not_have_names_the_point(
    planned: Planner, experiment: Callable[[str], None]
) -> None:
    experiment("points: [{system: [vllm, fastertransformer]}]")
    with pytest.raises(KvbenchError, match=r"system=fastertransformer.*unknown key allocator\.block_size") as refused:
        planned("+experiment=smoke", "allocator.block_size=8")
    assert "\nallocator has _target_, slab_len" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("experiment: other\npoints: [{}]", "calls itself other"),
        ("point: [{}]", "unknown point"),
        ("points: [{sistem: vllm}]", "unknown key sistem"),
    ],
)
def test_a_wrong_experiment_is_refused(
    planned: Planner, experiment: Callable[[str], None], content: str, words: str
) -> None:
    experiment(content)
    with pytest.raises(KvbenchError, match=words):
        planned("+experiment=smoke")


@pytest.mark.parametrize("stem", groups()["experiment"])
def test_every_experiment_plans_and_has_a_script(compose: Composer, stem: str) -> None:
    content = load_experiment(stem)
    entries = (content["common"], *content["points"])
    selected = (content.get("selected") or {}).get("runner")
    runners = {selected} if selected else {entry.get("runner", "simulated") for entry in entries}
    needs_gpu = False
    if runners != {"simulated"}:
        torch = pytest.importorskip("torch", reason=NEEDS_MODELS)
        needs_gpu = "kernels" in runners and not torch.cuda.is_available()
    typed = parse([f"+experiment={stem}", "executor=serial"], sweep=False)
    if {entry.get("costs") for entry in content["points"]} - {None, *groups()["costs"]}:
        with pytest.raises(KvbenchError, match=r"kvbench.calibrate"):  # tests/test_fig_fidelity.py plans it
            plan(compose, typed)
    elif needs_gpu:
        with pytest.raises(KvbenchError, match=r"docs/gpu.md"):
            plan(compose, typed)
    elif stem in (needs := {"fig_chatbot": "sharegpt_turn_lengths", "fig_traces": "azure_2023_conv"}):
        with pytest.raises(KvbenchError, match=needs[stem]):  # for which nothing can stand in
            plan(compose, typed)
    else:
        found = plan(compose, typed)
        assert found.experiment == stem
        assert found.rows
    script = CONF.parent / "experiments" / f"{stem}.py"
    if stem != "reference":
        assert f'"+experiment={stem}"' in script.read_text(encoding="utf-8")


def test_an_ad_hoc_sweep(planned: Planner) -> None:
    found = planned("system=vllm,orca_max", "workload.request_rate=1,2", "name=mine", sweep=True)
    assert values(found, "system") == ["vllm", "vllm", "orca_max", "orca_max"]
    assert (found.experiment, found.folder) == ("adhoc", Path("results/mine"))


def test_repeats_are_consecutive_seeds(planned: Planner) -> None:
    found = planned("seed=5", "repeats=3")
    assert values(found, "seed") == values(found, "workload", "seed") == [5, 6, 7]
    assert [row.repeat for row in found.rows] == [0, 1, 2]
    assert len({row.point.key for row in found.rows}) == 3


def test_repeats_have_common_random_numbers(compose: Composer) -> None:
    """The first is the paper's replay; the others have Poisson arrivals, with the same requests at every rate."""

    def rows(*typed: str) -> list[Row]:
        return plan(compose, parse(["workload.num_requests=50", *typed], sweep=True)).rows

    found = rows("system=vllm,orca_max", "workload.request_rate=1,2", "repeats=3")
    kinds = [row.point.config["choices"]["workload/arrivals"] for row in found]
    assert kinds == ["paper", "poisson", "poisson"] * 4
    traces = [
        [
            (each.arrival_s, each.prompt_len, each.output_len)
            for each in instantiate_workload(row.point.config).generate().requests
        ]
        for row in found
        if row.repeat == 2
    ]
    assert traces[:2] == traces[2:]
    slow, fast = (np.array(trace) for trace in traces[:2])
    assert slow == pytest.approx(fast * [2, 1, 1])
    typed = rows("workload/arrivals=paper", "repeats=2")
    assert [row.point.config["choices"]["workload/arrivals"] for row in typed] == ["paper", "paper"]


def test_capacities_are_listed_once(planned: Planner) -> None:
    found = planned("system=vllm,orca_max", "model=opt_13b,opt_66b", sweep=True)
    assert [each.model for each in found.capacities] == ["opt_13b", "opt_66b"]


def test_a_real_clock_runs_alone(planned: Planner) -> None:
    assert isinstance(planned("executor=local").executor, Local)
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    assert isinstance(planned("executor=local", "runner=cpu", "model=tiny_llama").executor, Serial)


def test_real_time_is_told_beforehand(planned: Planner) -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    real = ("workload=sharegpt_scaled", "workload/arrivals=poisson", "runner=cpu", "model=tiny_llama")
    sweep = planned(
        *real, "workload.request_rate=1,2", "workload.duration_s=30", "workload.num_requests=40", sweep=True
    )
    assert sweep.arrivals_s == 30 + 20  # at 2 requests/s the 40 have come after 20 s
    assert planned("workload.request_rate=1", "workload.num_requests=40").arrivals_s == 0  # simulated
    all_at_once = planned("runner=cpu", "model=tiny_llama", "workload/arrivals=all_at_once")
    assert all_at_once.arrivals_s == 0


@pytest.mark.parametrize("executor", ["serial", "local"])
def test_progress_names_the_point_that_runs(executor: str, planned: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr("kvbench.sweep.tqdm.set_postfix_str", lambda _, text: names.append(text))
    run(planned("workload.request_rate=1,2", f"executor={executor}", sweep=True))
    assert len(names) == 3
    points = {"vllm-opt_13b-fixed-1", "vllm-opt_13b-fixed-2"}
    assert names[0] in (points if executor == "serial" else {f"{point}, and 1 more" for point in points})
    assert names[1] in points
    assert names[2] == ""


def test_a_summary_holds_exactly_the_last_command(planned: Planner) -> None:
    first = planned("workload.request_rate=3,1,2", sweep=True)
    assert run(first).num_reused == 0
    table = summary(first)
    assert tuple(table.columns) == COLUMNS
    assert table["request_rate"].tolist() == [3, 1, 2]
    assert [(first.folder / "points" / point / "summary.json").is_file() for point in table["point"]] == [True] * 3
    second = planned("workload.request_rate=4,2", sweep=True)
    report = run(second)
    assert report.num_reused == 1
    assert summary(second)["request_rate"].tolist() == [4, 2]
    assert len(list((first.folder / "points").iterdir())) == 4


def test_one_point_in_two_panels_runs_once_and_has_two_rows(
    planned: Planner, experiment: Callable[[str], None]
) -> None:
    experiment(WITHOUT_RECORDS)
    found = planned("+experiment=smoke", "system=vllm", "workload.request_rate=1")
    report = run(found)
    assert len(list((found.folder / "points").iterdir())) == 1
    assert [(row["panel"], row["point"]) for row in report.rows] == [
        ("a", found.rows[0].point.folder), ("b", found.rows[0].point.folder),
    ]  # fmt: skip


def test_the_same_command_twice_reuses_everything(planned: Planner) -> None:
    found = planned("workload.request_rate=1,2", sweep=True)
    run(found)
    text = (found.folder / "summary.csv").read_bytes()
    before = {path: path.stat().st_mtime_ns for path in (found.folder / "points").rglob("*")}
    assert run(planned("workload.request_rate=1,2", sweep=True)).num_reused == 2
    assert (found.folder / "summary.csv").read_bytes() == text
    assert {path: path.stat().st_mtime_ns for path in (found.folder / "points").rglob("*")} == before


def test_the_same_command_in_two_places_differs_in_the_wall_time_only(planned: Planner) -> None:
    tables = []
    for place in ("a", "b"):
        found = planned("system=glob(*)", f"results_dir={place}", sweep=True)
        run(found)
        tables.append(summary(found).drop(columns="wall_s"))
    assert len(tables[0]) == len(groups()["system"])
    pd.testing.assert_frame_equal(tables[0], tables[1], check_exact=True)


def test_an_edited_input_is_never_answered_from_old_results(planned: Planner) -> None:
    trace = Path("trace.csv")
    trace.write_text("arrival,prompt,output\n0,5,5\n")
    typed = ("workload=trace", "workload.path=trace.csv", "workload.num_requests=null")
    found = planned(*typed)
    run(found)
    assert summary(found)["num_requests"].tolist() == [1]
    trace.write_text("arrival,prompt,output\n0,5,5\n1,5,5\n")
    again = planned(*typed)
    assert run(again).num_reused == 0
    assert summary(again)["num_requests"].tolist() == [2]


def test_records_that_are_missing_are_made(planned: Planner) -> None:
    found = planned("records=summary")
    run(found)
    folder = found.folder / "points" / found.rows[0].point.folder
    assert not (folder / "steps.parquet").exists()
    assert run(planned("records=full")).num_reused == 0
    assert (folder / "steps.parquet").exists()
    assert run(planned("records=summary")).num_reused == 1


BROKEN = """
from kvbench.allocators.paged import Paged

class Broken(Paged):
    def allocate(self, seq, slots):
        if slots > 200:
            raise RuntimeError("no more")
        return super().allocate(seq, slots)
"""


def test_a_failing_point_does_not_stop_the_others(planned: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("broken_allocator.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(Path.cwd())
    typed = ("allocator._target_=broken_allocator.Broken", "workload.lengths.prompt_len=300,100,200")
    found = planned(*typed, sweep=True)
    report = run(found)
    assert report.failures == {"RuntimeError: no more": [found.rows[0].point.folder]}
    assert report.num_bugs == 1
    assert len(report.rows) == len(summary(found)) == 2
    assert summary(found)["allocator"].unique().tolist() == ["broken_allocator.Broken"]
    error = json.loads((found.folder / "points" / found.rows[0].point.folder / "error.json").read_text())
    assert "broken_allocator.py" in error["traceback"]
    again = run(planned(*typed, sweep=True))  # what failed is tried again
    assert (again.num_reused, len(again.failures)) == (2, 1)


class Losing:
    """Loses the first task it gets."""

    num_workers: int | None = None
    task_s = 0.0

    def run(
        self, function: Callable[[AnyTask], Result], tasks: Seq[AnyTask]
    ) -> Generator[tuple[AnyTask, Result | WorkerLost], None, None]:
        yield tasks[0], WorkerLost()
        for task in tasks[1:]:
            yield task, function(task)


def test_a_lost_worker_is_a_failure_of_its_point(planned: Planner) -> None:
    found = planned("workload.request_rate=1,2", sweep=True)
    found = replace(found, executor=Losing())
    report = run(found)
    assert len(report.rows) == 1
    ((message, points),) = report.failures.items()
    assert "killed twice" in message
    assert len(points) == 1
    assert report.num_bugs == 0


class Stopped(Losing):
    """The user presses Ctrl-C after the first task."""

    def run(
        self, function: Callable[[AnyTask], Result], tasks: Seq[AnyTask]
    ) -> Generator[tuple[AnyTask, Result | WorkerLost], None, None]:
        yield tasks[0], function(tasks[0])
        raise KeyboardInterrupt


def test_an_interrupted_sweep_says_how_far_it_got(planned: Planner) -> None:
    found = planned("workload.request_rate=1,2,3", sweep=True)
    stopped = replace(found, executor=Stopped())
    with pytest.raises(Interrupted, match="1 of 3 points finished; the same command resumes"):
        run(stopped)
    assert not (found.folder / "summary.csv").exists()
    assert run(found).num_reused == 1


def test_the_longest_points_start_first(planned: Planner) -> None:
    started: list[float] = []

    class Watching(Losing):
        def run(
            self, function: Callable[[AnyTask], Result], tasks: Seq[AnyTask]
        ) -> Generator[tuple[AnyTask, Result | WorkerLost], None, None]:
            started.extend(each.point.config["workload"]["request_rate"] for task in tasks for each in task)  # type: ignore[attr-defined]
            yield from Serial().run(function, tasks)

    found = planned("workload.request_rate=1,3,2", "workload.duration_s=9", "workload.num_requests=null", sweep=True)
    run(replace(found, executor=Watching()))
    assert started == [3, 2, 1]
    assert summary(found)["request_rate"].tolist() == [1, 3, 2]


@pytest.mark.slow
def test_a_thousand_points_are_planned_in_seconds(planned: Planner) -> None:
    started = time.process_time()
    found = planned("workload.request_rate=range(1,1001)", sweep=True)
    assert len(found.rows) == 1000
    assert time.process_time() - started < 15  # 5 s on a laptop's core
    assert not list(Path().iterdir())


class Recorded(Losing):
    """Runs everything, but the chunks that hold the first point are lost whenever they hold another one, too."""

    num_workers = 1
    task_s = 60.0

    def __init__(self) -> None:
        self.chunks: list[Any] = []

    def run(
        self, function: Callable[[AnyTask], Result], tasks: Seq[AnyTask]
    ) -> Generator[tuple[AnyTask, Result | WorkerLost], None, None]:
        self.chunks += tasks
        for task in tasks:
            yield task, WorkerLost() if len(task) > 1 and len(self.chunks) <= 5 else function(task)  # type: ignore[arg-type]


def test_short_points_are_put_together_and_a_lost_chunk_is_run_point_by_point(planned: Planner) -> None:
    found = planned("seed=range(0,8)", sweep=True)
    recorded = Recorded()
    report = run(replace(found, executor=recorded))
    sizes = [len(chunk) for chunk in recorded.chunks]
    assert sizes == [2] * 4 + [1] * 8  # four tasks for each worker, then one for each point that was in a lost one
    assert len(report.rows) == 8
    assert not report.failures


def test_what_a_lost_chunk_had_finished_is_not_run_again(planned: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned("seed=range(0,8)", sweep=True)
    recorded = Recorded()
    run(replace(found, executor=recorded))
    monkeypatch.setattr("kvbench.run.run", lambda task: pytest.fail("it was run again"))
    assert [outcome.summary for outcome in run_all(recorded.chunks[0])] == [
        finished_summary(task.point, task.points_dir, needs_steps=True) for task in recorded.chunks[0]
    ]
