"""What is decided on the host before a launch: tile sizes, splits, scratch. Knows no triton.

Tiles are looked up, never tuned at run time: a tuned choice would differ from run to run, and between the two
placements that are to be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_SPLIT_LEN = 128
"""Tokens below which a part of a sequence is not worth a program of its own."""
FULL_WAVE = 0.85
"""How full a GPU must be on average over the waves of a launch for more splits not to pay."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut.

    Attributes:
        block_n: tokens that one step of the loop reads.
        num_warps: of a program.
        num_stages: depth of the pipeline: how many tiles are under way.
        block_m: query rows (tokens times heads of a group) of a prefill program.
    """

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 0


_NVIDIA = {
    # head dimensions up to, bytes of a number -> tiles
    (64, 2): Tiles(64, 4, 3),
    (80, 2): Tiles(128, 4, 2),  # computed as 128 wide: in longer tiles, what a tile costs of its own weighs less
    (128, 2): Tiles(64, 4, 3),
    (64, 4): Tiles(32, 4, 3),
    (128, 4): Tiles(16, 4, 3),
}
_AMD = {
    (64, 2): Tiles(64, 4, 2),
    (128, 2): Tiles(64, 4, 2),
    (64, 4): Tiles(32, 4, 2),
    (128, 4): Tiles(16, 4, 2),
}
_DECODE = {"sm_80": _NVIDIA, "sm_90": _NVIDIA, "gfx942": _AMD}
_NVIDIA_PREFILL = {(128, 2): Tiles(64, 8, 3, 128), (128, 4): Tiles(32, 8, 2, 32)}
_AMD_PREFILL = {(128, 2): Tiles(64, 8, 2, 128), (128, 4): Tiles(32, 8, 2, 32)}
_PREFILL = {"sm_80": _NVIDIA_PREFILL, "sm_90": _NVIDIA_PREFILL, "gfx942": _AMD_PREFILL}


def decode_tiles(head_dim: int, dtype: torch.dtype, arch: str) -> Tiles:
    """Tiles of ``decode``, the same for every placement.

    Raises:
        ValueError: a head dimension, a dtype or an architecture that there are none for.
    """
    return _look_up(_DECODE, head_dim, dtype, arch)


def prefill_tiles(head_dim: int, dtype: torch.dtype, arch: str) -> Tiles:
    """Tiles of ``prefill``, the same for every placement.

    Raises:
        ValueError: a head dimension, a dtype or an architecture that there are none for.
    """
    return _look_up(_PREFILL, head_dim, dtype, arch)


def plan_splits(lens: Sequence[int], num_kv_heads: int, num_sms: int, ctas_per_sm: int = 3) -> int:
    """Into how many parts ``decode`` should cut each sequence: the smallest power of two that keeps the GPU busy.

    Busy: the programs fill whole waves to ``FULL_WAVE``, and no part is longer than what each resident program has to
    do on average, so that one long sequence does not run on alone. No part is shorter than ``MIN_SPLIT_LEN``.

    Args:
        lens: tokens of each sequence.
        num_kv_heads: programs of a part.
        num_sms: of the GPU.
        ctas_per_sm: programs resident on one of them.
    """
    longest, slots = max(lens, default=0), num_sms * ctas_per_sm
    fair_len = max(sum(lens) * num_kv_heads / slots, MIN_SPLIT_LEN)

    def share(splits: int) -> float:
        programs = max(1, len(lens) * num_kv_heads * splits)
        return programs / (math.ceil(programs / slots) * slots)

    choices = [1 << i for i in range(max(1, longest // MIN_SPLIT_LEN).bit_length())]
    balanced = [splits for splits in choices if longest <= splits * fair_len] or choices[-1:]
    return next((splits for splits in balanced if share(splits) >= FULL_WAVE), max(balanced, key=share))


def workspace_len(batch: int, num_heads: int, head_dim: int, splits: int) -> int:
    """Float32 numbers of scratch that ``decode`` needs: each part's output and logarithm; 0 for one part."""
    return batch * num_heads * splits * (head_dim + 1) if splits > 1 else 0


def check_pairs(pairs: torch.Tensor) -> None:
    """See that a set of copies, ``[N, 2]`` source and target on the host, does not depend on its order.

    Raises:
        ValueError: a target is named twice, or is a source too.
    """
    src, dst = pairs.unbind(1)
    if len(dst.unique()) != len(dst):
        raise ValueError("a block is written twice in one copy_blocks")
    if (both := dst[torch.isin(dst, src)]).numel():
        raise ValueError(f"block {int(both[0])} is read and written in one copy_blocks")


def _look_up(tables: dict[str, dict[tuple[int, int], Tiles]], head_dim: int, dtype: torch.dtype, arch: str) -> Tiles:
    """Those of another NVIDIA GPU are those of sm_80, which ask least of it."""
    table = tables.get(arch) or (tables["sm_80"] if arch.startswith("sm_") else {})
    for (largest, num_bytes), tiles in table.items():
        if head_dim <= largest and dtype in DTYPES and dtype.itemsize == num_bytes:
            return tiles
    raise ValueError(
        f"no tiles for head_dim {head_dim} in {dtype} on {arch}; there are some for up to 128 in "
        f"{', '.join(map(str, DTYPES))} on {', '.join(tables)}"
    )
