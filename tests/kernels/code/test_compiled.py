"""What the compiler made of the kernels, read without a GPU: no spills, wide loads, and a table to compare with."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from kvbench_kernels import device
from kvbench_kernels.compiled import CASES, Case, compiling, measure
from kvbench_kernels.plan import Tiles, decode_tiles, prefill_tiles

GOLDEN = Path(__file__).parents[3] / "kernels" / "compiled" / f"triton-{triton.__version__}.csv"
SLACK = 0.1
"""How far numbers may be from the table's: ptxas is not the same on every machine."""
NUM_SMS, CLOCK_HZ, COPY_BYTES_PER_S = 132, 1.755e9, 4.3e12
"""Of an H200; the last is a device copy as measured on one."""


@cache
def golden() -> dict[Case, dict[str, str]]:
    with GOLDEN.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        Case(
            row["function"], row["arch"], int(row["page"]), row["prefetch"] == "True", int(row["head_dim"]),
            row["dtype"], int(row["group"]), int(row["splits"]),
        ): row
        for row in rows
    }  # fmt: skip


def name(case: Case) -> str:
    place = f"page{case.page}" if case.page else "contiguous"
    ahead = "" if case.prefetch else "-in_loop"
    return f"{case.function}-{case.arch}-{place}{ahead}-{case.head_dim}-{case.dtype}-x{case.group}-{case.splits}"


def tiles_of(case: Case) -> Tiles:
    chosen = decode_tiles if case.function == "decode" else prefill_tiles
    return chosen(case.head_dim, getattr(torch, case.dtype), case.arch)


def test_the_table_has_every_case() -> None:
    assert list(golden()) == CASES


@pytest.mark.parametrize("case", CASES, ids=name)
def test_case(case: Case) -> None:
    found = measure(case)
    for column, value in golden()[case].items():
        if column in ("registers", "shared_bytes", "loop", "narrow_loads"):
            assert found[column] == pytest.approx(int(value), rel=SLACK, abs=2), column
        else:
            assert str(found[column]) == value, column
    assert found["spill_bytes"] == 0
    limit = {"sm_80": 163, "sm_90": 227, "gfx942": 64}[case.arch] * 1024
    assert found["shared_bytes"] <= limit
    if case.function in ("decode", "prefill") and case.splits == 1:
        check_attention(case, found)


def check_attention(case: Case, found: dict[str, Any]) -> None:
    tiles, size = tiles_of(case), getattr(torch, case.dtype).itemsize
    padded = triton.next_power_of_2(case.head_dim)
    if case.arch != "gfx942":  # its compiler moves one of them out of the loop
        assert found["wide_loads"] == 2 * tiles.block_n * padded * size // (16 * found["threads"])
    entries = -(-tiles.block_n // case.page) if case.page else 0
    assert found["narrow_loads"] <= (min(entries, 8) if case.prefetch else 8) + 2  # a thread needs no more entries
    if size == 2:
        assert found["tensor_core"] > 0
    if case.function == "decode" and case.arch == "sm_90" and size == 2 and case.prefetch:
        resident = min(227 * 1024 // found["shared_bytes"], 65536 // (found["registers"] * found["threads"]))
        assert resident >= 3
        assert issue_share(case, found) <= 0.35


def issue_share(case: Case, found: dict[str, Any]) -> float:
    """Share of an H200's issue slots that the loop takes where K and V come as fast as a copy.

    Each of a multiprocessor's four schedulers issues one instruction per cycle, and a warp belongs to one of them.
    """
    tile_bytes = 2 * tiles_of(case).block_n * case.head_dim * getattr(torch, case.dtype).itemsize
    cycles = tile_bytes / (COPY_BYTES_PER_S / NUM_SMS / CLOCK_HZ)
    return float(found["loop"] * found["threads"] / 32 / 4 / cycles)


PAIRS = [(replace(case, page=0), case) for case in CASES if case.page == 16 and case.prefetch]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: name(pair[1]))
def test_a_paged_loop_is_hardly_longer_than_the_contiguous_one(pair: tuple[Case, Case]) -> None:
    contiguous, paged = (golden()[case] for case in pair)
    assert int(paged["loop"]) <= (1.08 if tiles_of(pair[1]).num_stages == 3 else 1.2) * int(contiguous["loop"])
    assert int(paged["shared_bytes"]) <= int(contiguous["shared_bytes"]) + 1024  # as many buffers; and table entries


def test_a_table_looked_up_inside_the_loop_costs_buffers() -> None:
    """What ``prefetch`` is for: K and V would wait for the table, so the compiler buffers them less deeply."""
    ahead, inside = (golden()[Case("decode", "sm_90", 16, prefetch)] for prefetch in (True, False))
    assert int(inside["shared_bytes"]) < 0.6 * int(ahead["shared_bytes"])
    assert int(inside["loop"]) > 1.08 * int(ahead["loop"])


def test_prefill_uses_the_tensor_cores_of_hopper() -> None:
    assert int(golden()[Case("prefill", "sm_90", 16)]["tensor_core"]) > 0


def test_all_layers_of_k_and_v_are_copied_in_one_launch() -> None:
    kv = torch.empty((40, 2, 64, 16, 8, 128), dtype=torch.bfloat16, device="meta")
    with compiling("sm_90") as found:
        device.copy_blocks(kv, torch.tensor([[0, 1], [2, 3]]))
    assert len(found) == 1


def test_one_kernel_serves_all_lengths_and_batches() -> None:
    k = torch.empty((4096, 8, 128), dtype=torch.bfloat16, device="meta")
    with compiling("sm_80") as found:
        for batch, width in product((1, 7, 16), (1, 15, 16, 250)):
            q = torch.empty((batch, 32, 128), dtype=torch.bfloat16, device="meta")
            lens = torch.empty(batch + 1, dtype=torch.int32, device="meta")[1:]
            table = torch.empty((batch, width), dtype=torch.int32, device="meta")
            device.decode(q, k, k, lens, table=table, tiles=Tiles(64, 4, 3))
    assert len(found) == 12
    assert len({each.hash for each in found}) == 1
