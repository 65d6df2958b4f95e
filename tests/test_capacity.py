"""The capacity report against Table 1 of the PagedAttention paper."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.capacity import (
    GIB,
    Capacity,
    Footprint,
    Hardware,
    Model,
    batch_limit,
    capacity,
    capacity_of,
    check_fits,
    measured,
    memory_bytes,
    session_len,
    usable_bytes,
    with_swap_space,
)
from kvbench.core import KvbenchError
from tests.choices import load

PAIRS = {"opt_13b": "a100_40gb", "opt_66b": "a100_40gb_x4", "opt_175b": "a100_80gb_x8", "llama_13b": "a100_40gb"}


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
    assert "+ unused 0.5" in report("opt_175b").line()  # the published pool is smaller than the rest
    line = report("opt_13b").line()
    assert "unused" not in line
    for part in (
        "opt_13b on a100_40gb",
        "weights 23.94",
        "activations 0.48",
        "reserve 2.97",
        "12.00 GiB",
        "15,728 slots",
    ):
        assert part in line


SEEN = Footprint(weights_bytes=1_000_000_000, token_bytes=100_000)


@pytest.mark.parametrize("max_num_tokens", [100, 2560, 10**9])
def test_a_measured_pool_is_what_the_largest_iteration_leaves(max_num_tokens: int) -> None:
    planned = report("opt_13b")
    found = measured(planned, SEEN, max_num_tokens, 2**60)
    parts = found.weights_bytes + found.activation_bytes + found.reserve_bytes + found.kv_cache_bytes
    assert (parts, found.total_bytes, found.source) == (planned.total_bytes, planned.total_bytes, "measured")
    assert found.activation_bytes == pytest.approx(100_000 * min(max_num_tokens, found.num_slots), abs=100_000)
    assert (found.num_slots < max_num_tokens) is (max_num_tokens == 10**9)


def test_graphs_take_their_share_before_the_pool_does() -> None:
    planned = report("opt_13b")
    graphs = 300 * 2**20
    plain, captured = (measured(planned, seen, 2560, 2**60) for seen in (SEEN, SEEN._replace(graph_bytes=graphs)))
    assert plain.kv_cache_bytes - captured.kv_cache_bytes == graphs
    assert captured.activation_bytes - plain.activation_bytes == graphs


def test_a_measured_pool_respects_what_is_free() -> None:
    planned = report("opt_13b")
    free = 10 * 2**30
    found = measured(planned, SEEN, 2560, free)
    assert found.total_bytes == free
    assert found.kv_cache_bytes == free - planned.reserve_bytes - 1_000_000_000 - 256_000_000
    least = planned.reserve_bytes + 1_000_000_000 + 100_000 + planned.bytes_per_slot
    assert measured(planned, SEEN, 2560, least + 1).num_slots == 1
    with pytest.raises(KvbenchError, match="KV cache at least") as refused:
        measured(replace(planned, source="computed"), SEEN, 2560, least - 1)
    assert "weights 0.93 GiB" in str(refused.value)


def test_what_does_not_fit_is_refused_with_every_number() -> None:
    given = report("opt_13b", 8 * 2**30)
    check_fits(given)
    with pytest.raises(KvbenchError) as refused:
        check_fits(given, 30 * 2**30)
    lines = str(refused.value).splitlines()
    assert len(lines) == 2
    assert "needs 35.39 GiB: weights 23.94 GiB, activations 0.48 GiB, reserve 2.97 GiB, KV cache 8.00 GiB" in lines[0]
    assert "30.00 GiB of 39.39 GiB are free now; lower kv_cache_bytes= or kv_cache_seqs=" in lines[1]


@pytest.mark.parametrize(
    ("pool_gib", "num_gpus", "free_gib", "pinned", "swap_gib"),
    [
        (100, 1, 1000, True, 4),  # as vLLM's swap_space
        (100, 4, 1000, True, 16),
        (1, 1, 1000, True, 1),  # no more than the pool
        (100, 1, 6, True, 3),  # pinning may take twice as much
        (5, 1, 64, False, 4),  # beside weights of 23.94 and activations of 0.48 GiB, of 39.39 in all
        (12, 1, 64, False, 2.96),
        (12, 1, 30, False, 0),
    ],
)
def test_swap_space_that_is_not_given_is_capped(
    pool_gib: float, num_gpus: int, free_gib: float, pinned: bool, swap_gib: float
) -> None:
    pool = replace(report("opt_13b", pool_gib * GIB), num_gpus=num_gpus)
    found = with_swap_space(pool, None, int(free_gib * GIB), pinned=pinned)
    assert found.swap_space_bytes / GIB == pytest.approx(swap_gib, abs=0.01)
    assert ("; swap space" in found.line()) is (0 < swap_gib < pool_gib)
    assert replace(found, swap_space_bytes=0) == pool


@pytest.mark.parametrize(
    ("given", "free_gib", "pinned", "why"),
    [
        (64e9, 32, True, r"swap_space_bytes=64000000000: 59\.60 GiB \(64\.00 GiB when it is pinned\) of the host's"),
        (64e9, 63, True, r"but 63\.00 GiB are left; lower it, or give 0 to compute again"),
        (4 * GIB, 30, False, r"swap_space_bytes=4294967296: 4\.00 GiB of the host's .* 0\.58 GiB are left"),
    ],
)
def test_swap_space_that_the_host_does_not_have_is_refused_in_one_line(
    given: float, free_gib: int, pinned: bool, why: str
) -> None:
    pool = report("opt_13b", 5 * GIB)
    with pytest.raises(KvbenchError, match=why) as refused:
        with_swap_space(pool, given, free_gib * GIB, pinned=pinned)
    assert "\n" not in str(refused.value)
    assert with_swap_space(pool, given, 1000 * GIB, pinned=True).swap_space_bytes == given
    assert with_swap_space(pool, 0, 0, pinned=pinned).swap_space_bytes == 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system of 10 GB free whose only process has 1 GB."""
    monkeypatch.setattr("kvbench.capacity.PROC", tmp_path / "proc")
    monkeypatch.setattr("kvbench.capacity.CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4 * 10**6}[name])
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal:  16000000 kB\nMemAvailable:  9765625 kB\nHugePages_Total: 0\n"
    )
    (tmp_path / "proc" / "self" / "status").write_text("Name:\tpython\nVmRSS:\t 2000000 kB\nRssAnon:\t  976562 kB\n")
    return tmp_path


def test_free_memory_counts_what_the_process_has(machine: Path) -> None:
    assert memory_bytes() == 16_384_000_000
    assert usable_bytes() == (9_765_625 + 976_562) * 1024
    (machine / "proc" / "meminfo").unlink()
    assert usable_bytes() == memory_bytes()


@pytest.mark.parametrize(
    ("entry", "folder", "names"),
    [
        ("0::/app/run", "app", ("memory.max", "memory.current", "inactive_file")),
        ("0::/app/run", ".", ("memory.max", "memory.current", "inactive_file")),
        ("4:cpu,memory:/app", "memory/app", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_limits_of_control_groups_hold(machine: Path, entry: str, folder: str, names: tuple[str, str, str]) -> None:
    (machine / "proc" / "self" / "cgroup").write_text(f"7:pids:/app\n{entry}\n")
    group = machine / "cgroup" / folder
    group.mkdir(parents=True)
    limit, use, idle = names
    (group / limit).write_text("4000000000\n")
    (group / use).write_text("3000000000\n")
    (group / "memory.stat").write_text(f"anon 1\n{idle} 500000000\n")
    assert memory_bytes() == 4_000_000_000
    assert usable_bytes() == 1_500_000_000 + 976_562 * 1024
    (group / limit).write_text("max\n" if limit == "memory.max" else "9223372036854771712\n")
    assert usable_bytes() == (9_765_625 + 976_562) * 1024
