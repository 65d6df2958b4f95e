"""The capacity report against Table 1 of the PagedAttention paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from kvbench.capacity import Capacity, Hardware, Model, batch_limit, capacity, capacity_of, session_len
from kvbench.composition import CONF
from kvbench.core import KvbenchError

PAIRS = {"opt_13b": "a100_40gb", "opt_66b": "a100_40gb_x4", "opt_175b": "a100_80gb_x8", "llama_13b": "a100_40gb"}


def load(group: str, name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    content.pop("defaults", None)
    return content


def model(name: str = "opt_13b") -> Model:
    return Model(**load("model", name))


def hardware(name: str = "a100_40gb") -> Hardware:
    return Hardware(**load("hardware", name))


def report(name: str, kv_cache_bytes: float | None = None) -> Capacity:
    return capacity(model(name), hardware(PAIRS[name]), kv_cache_bytes)


@pytest.mark.parametrize(
    ("name", "blocks", "weights_gb"),
    [("opt_13b", 983, 26), ("opt_66b", 606, 132), ("opt_175b", 3754, 346), ("llama_13b", 983, 26)],
)
def test_table_1(name: str, blocks: int, weights_gb: float) -> None:
    found = report(name)
    assert found.num_slots == blocks * 16
    assert found.kv_cache_bytes == blocks * 16 * found.bytes_per_slot
    assert found.weights_bytes == pytest.approx(weights_gb * 1e9, rel=0.012)
    parts = found.weights_bytes + found.activation_bytes + found.reserve_bytes + found.kv_cache_bytes
    assert parts == pytest.approx(found.total_bytes, rel=0.005)


@pytest.mark.parametrize(("name", "blocks"), [("opt_13b", 983), ("opt_66b", 607), ("opt_175b", 3761)])
def test_the_analyzer_finds_the_published_pools(name: str, blocks: int) -> None:
    computed = capacity(replace(model(name), published_blocks={}), hardware(PAIRS[name]))
    assert computed.source == "computed"
    assert computed.num_slots // 16 == blocks


@pytest.mark.parametrize(
    ("name", "expected"),
    [("opt_13b", 819_200), ("opt_66b", 2_359_296), ("opt_175b", 4_718_592), ("llama_13b", 819_200)],
)
def test_bytes_per_slot(name: str, expected: int) -> None:
    assert model(name).bytes_per_slot == expected


@pytest.mark.parametrize("name", ["opt_13b", "opt_66b", "opt_175b"])
def test_parameters_follow_from_the_shapes(name: str) -> None:
    opt = model(name)
    hidden = opt.hidden_size
    layer = 12 * hidden**2 + 13 * hidden
    assert opt.ffn_size == 4 * hidden
    assert opt.num_parameters == (opt.vocab_size + opt.max_model_len + 2) * hidden + opt.num_layers * layer + 2 * hidden


def test_fewer_heads_of_keys_and_values_make_smaller_slots() -> None:
    assert replace(model(), num_kv_heads=8).bytes_per_slot * 5 == model().bytes_per_slot


def test_activations_are_the_logits_on_every_gpu() -> None:
    assert report("opt_66b").activation_bytes == 4 * 2 * 2560 * 2 * 50272


def test_a_small_vocabulary_leaves_the_layer_as_the_largest_activation() -> None:
    tiny = replace(model(), vocab_size=100)
    assert capacity(tiny, hardware()).activation_bytes == 2 * 2560 * 2 * (20480 + 5120)


def test_the_pool_can_be_given() -> None:
    found = report("opt_13b", 100 * 819_200 + 1)
    assert (found.num_slots, found.source) == (100, "kv_cache_bytes")


@pytest.mark.parametrize("kv_cache_bytes", [0, -1, 819_199])
def test_a_pool_below_one_slot_is_refused(kv_cache_bytes: float) -> None:
    with pytest.raises(KvbenchError, match="819200 \\(one slot\\)"):
        report("opt_13b", kv_cache_bytes)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(KvbenchError) as refused:
        capacity(model("opt_66b"), hardware("a100_40gb"))
    message = str(refused.value)
    assert "122.41 GiB" in message
    assert "-86.47 GiB" in message
    assert message.count("\n") == 1


def test_wrong_keys_and_types_are_refused() -> None:
    shapes, gpu = load("model", "opt_13b"), load("hardware", "h200")
    config: dict[str, Any] = {"model": shapes, "hardware": gpu, "kv_cache_bytes": None}
    assert capacity_of(config).source == "computed"
    with pytest.raises(KvbenchError, match=r"hardware\.num_gpu does not exist.*did you mean num_gpus"):
        capacity_of({**config, "hardware": {**gpu, "num_gpu": 1}})
    with pytest.raises(KvbenchError, match=r"model\.num_layers='many' is not a whole number"):
        capacity_of({**config, "model": {**shapes, "num_layers": "many"}})
    with pytest.raises(KvbenchError, match="kv_cache_bytes='12 GB' is no number"):
        capacity_of({**config, "kv_cache_bytes": "12 GB"})


@pytest.mark.parametrize(
    ("name", "workload", "batch", "session"),
    [
        ("opt_13b", "sharegpt", 5, 2048),
        ("opt_13b", "alpaca", 14, 1123),
        ("opt_66b", "sharegpt", 2, 2048),
        ("opt_66b", "alpaca", 8, 1212),
        ("opt_175b", "sharegpt", 24, 2048),
        ("opt_175b", "alpaca", 80, 750),
        ("opt_13b", "fixed", 7, 2048),
    ],
)
def test_request_level_batches(name: str, workload: str, batch: int, session: int) -> None:
    pool = report(name)
    assert batch_limit(model(name), pool, workload) == batch
    assert session_len(model(name), pool, batch) == session


def test_a_published_batch_holds_in_the_published_pool_only() -> None:
    pool = report("opt_13b", 30_000 * 819_200)
    assert batch_limit(model(), pool, "sharegpt") == 14
    with pytest.raises(KvbenchError, match="holds no sequence of 2048 tokens"):
        batch_limit(model(), report("opt_13b", 2047 * 819_200), "sharegpt")


def test_the_line_names_every_part() -> None:
    line = report("opt_13b").line()
    for part in (
        "opt_13b on a100_40gb",
        "weights 23.94",
        "activations 0.48",
        "reserve 2.97",
        "12.00 GiB",
        "15,728 slots",
    ):
        assert part in line
