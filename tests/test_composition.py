"""Overrides as Hydra users type them, and what a point is called."""

from __future__ import annotations

import pytest

from kvbench.composition import Composer, Resolved, Setting, groups, parse
from kvbench.core import KvbenchError
from kvbench.parts import build


def resolve(compose: Composer, command: str) -> Resolved:
    (settings,) = parse(command.split(), sweep=False)
    return compose.resolve(settings)


def test_values_are_parsed_as_hydra_does() -> None:
    (settings,) = parse(["a.b=1", "c='x y'", "d=[1,2]", "e=null", "+f=true", "g=0.5", "h={k:1}"], sweep=False)
    assert settings == [
        Setting("a.b", 1),
        Setting("c", "x y"),
        Setting("d", [1, 2]),
        Setting("e", None),
        Setting("f", True, add=True),
        Setting("g", 0.5),
        Setting("h", {"k": 1}),
    ]


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("x=1,2.5,abc", [1, 2.5, "abc"]),
        ("x=choice(1,2)", [1, 2]),
        ("x=range(1,4)", [1, 2, 3]),
        ("x='a b','c,d'", ["a b", "c,d"]),
        ("x=[1,2],[3]", [[1, 2], [3]]),
        ("reservation=glob(o*)", ["on_demand", "oracle"]),
    ],
)
def test_sweeps(typed: str, values: list[object]) -> None:
    assert [settings[0].value for settings in parse([typed], sweep=True)] == values


def test_a_product_varies_the_last_key_first() -> None:
    combinations = parse(["system=vllm,orca_max", "x=1,2"], sweep=True)
    assert [[each.value for each in settings] for settings in combinations] == [
        ["vllm", 1], ["vllm", 2], ["orca_max", 1], ["orca_max", 2],
    ]  # fmt: skip


def test_the_last_override_of_a_key_counts() -> None:
    assert parse(["x=1", "y=2", "x=3"], sweep=False) == [[Setting("x", 3), Setting("y", 2)]]


def test_selectors_of_an_experiment_need_no_sweep() -> None:
    ((_, panels, systems),) = parse(["+experiment=e", "panel=a,b", "system=vllm,orca_max"], sweep=False)
    assert (panels.value, systems.value) == (("a", "b"), ("vllm", "orca_max"))


def test_a_nested_group_may_be_dotted() -> None:
    assert parse(["workload.arrivals=gamma"], sweep=False) == [[Setting("workload/arrivals", "gamma")]]


@pytest.mark.parametrize("system", groups()["system"])
def test_presets_build(compose: Composer, system: str) -> None:
    resolved = resolve(compose, f"system={system}")
    build(resolved.point)
    assert resolved.point["system"] == system


@pytest.mark.parametrize(
    ("command", "label"),
    [
        ("system=vllm", "vllm"),
        ("system=vllm allocator=paged reservation=on_demand", "vllm"),
        ("system=vllm reservation=max", "vllm[reservation=max]"),
        ("system=vllm scheduler=request_level reservation=max", "vllm[reservation=max,scheduler=request_level]"),
        ("system=vllm allocator.block_size=16", "vllm"),
        ("system=vllm allocator.block_size=32", "vllm[allocator.block_size=32]"),
        ("system=orca_max allocator=first_fit", "orca_max[allocator=first_fit]"),
        ("system=orca_max scheduler.max_num_seqs=256", "orca_max"),
        ("system=orca_max scheduler.max_num_seqs=8", "orca_max[scheduler.max_num_seqs=8]"),
        ("system=fastertransformer scheduler=iteration_level", "fastertransformer[scheduler=iteration_level]"),
        ("system=vllm costs=paper_engine_orca_only", "vllm[costs=paper_engine_orca_only]"),
        ("system=vllm costs.a_ms=20", "vllm[costs.a_ms=20]"),
        ("system=vllm workload.request_rate=7 kv_cache_bytes=100000000000", "vllm"),
        (
            "system=vllm allocator._target_=kvbench.allocators.paged.Paged allocator.copy_on_write=false",
            "vllm[allocator.copy_on_write=false]",
        ),
    ],
)
def test_a_row_that_differs_never_carries_the_bare_name(compose: Composer, command: str, label: str) -> None:
    resolved = resolve(compose, command)
    build(resolved.point)
    assert resolved.point["system"] == label


@pytest.mark.parametrize(
    ("command", "hardware"),
    [
        ("", "a100_40gb"),
        ("model=opt_66b", "a100_40gb_x4"),
        ("model=opt_175b", "a100_80gb_x8"),
        ("hardware=h200 model=opt_66b", "h200"),
        ("model=opt_66b hardware=h200", "h200"),
    ],
)
def test_a_model_brings_its_hardware(compose: Composer, command: str, hardware: str) -> None:
    assert resolve(compose, command).point["hardware"]["name"] == hardware


@pytest.mark.parametrize(
    ("command", "max_num_seqs", "max_model_len"),
    [
        ("system=vllm", 2048, 2048),
        ("system=orca_pow2", 256, 2048),
        ("system=fastertransformer", 5, 2048),
        ("system=fastertransformer workload=alpaca", 14, 1123),
        ("system=fastertransformer model=opt_175b workload=alpaca", 80, 750),
        ("system=fastertransformer workload=fixed", 7, 2048),
        ("system=fastertransformer scheduler.max_num_seqs=20", 20, 786),
        ("system=fastertransformer kv_cache_bytes=16777216000", 10, 2048),
    ],
)
def test_limits_of_the_schedulers(compose: Composer, command: str, max_num_seqs: int, max_model_len: int) -> None:
    resolved = resolve(compose, command)
    assert resolved.point["scheduler"]["max_num_seqs"] == max_num_seqs
    assert resolved.point["scheduler"]["max_model_len"] == max_model_len
    if "slab_len" in resolved.point["allocator"]:
        assert resolved.point["allocator"]["slab_len"] == max_model_len
    build(resolved.point)


def test_a_resolver_s_refusal_is_the_user_s_message(compose: Composer) -> None:
    with pytest.raises(KvbenchError, match="holds no sequence of 2048 tokens"):
        resolve(compose, "system=fastertransformer workload=fixed kv_cache_bytes=819200")


def test_settings_do_not_leak_into_the_next_point(compose: Composer) -> None:
    before = resolve(compose, "system=vllm")
    resolve(compose, "system=vllm allocator.block_size=1 +allocator.extra=1 workload.request_rate=9")
    assert resolve(compose, "system=vllm") == before


def test_only_the_model_s_own_coefficients_are_part_of_a_point(compose: Composer) -> None:
    costs = resolve(compose, "model=opt_66b").point["costs"]
    assert costs["hardware"] == "a100_40gb_x4"
    assert "models" not in costs


def test_choices_and_command_keys_are_set_aside(compose: Composer) -> None:
    resolved = resolve(compose, "executor=serial name=x results_dir=y repeats=3 panel=p")
    assert resolved.executor == {"_target_": "kvbench.executors.serial.Serial"}
    common = resolved.common
    assert (common.name, common.results_dir, common.repeats, common.panel) == ("x", "y", 3, "p")
    assert not {"name", "results_dir", "repeats", "panel", "executor"} & resolved.point.keys()
    assert resolved.point["choices"]["allocator"] == "paged"
    assert "executor" not in resolved.point["choices"]


def test_a_dict_is_merged_as_hydra_does(compose: Composer) -> None:
    lengths = resolve(compose, "workload=fixed workload.lengths={prompt_len:7}").point["workload"]["lengths"]
    assert (lengths["prompt_len"], lengths["output_len"]) == (7, 128)


@pytest.mark.parametrize(
    "command",
    [
        "seed=3 workload.request_rate=2",
        "seed=3 workload.seed=5",
        "workload.seed=5 seed=3",
        "data_dir=here",
        "workload=trace data_dir=here workload.path='${data_dir}/mine.csv'",
        "model.max_model_len=1024 scheduler.max_model_len=2048",
        "scheduler.max_model_len=2048 model.max_model_len=1024",
        "system.max_num_seqs=7",
        "scheduler.max_num_seqs=7 system.max_num_seqs=7",
        "system=fastertransformer scheduler.max_num_seqs=3",
        "system=fastertransformer workload.name=alpaca",
        "kv_cache_bytes=2e10 allocator.block_size=32 records=summary",
        "runner.beams.seed=4 costs.a_ms=3",
        "workload.lengths={_target_:kvbench.workloads.lengths.Alpaca,data_dir:x}",
        "measure_to_s=30 model.request_level_batch.sharegpt=2 system=fastertransformer",
    ],
)
def test_values_set_directly_are_those_that_interpolation_gives(
    compose: Composer, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolve(compose, command)
    monkeypatch.setattr("kvbench.composition._Composed.is_plain", lambda *_: False)
    assert found == resolve(Composer(), command)
