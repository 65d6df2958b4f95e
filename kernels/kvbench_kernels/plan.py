"""What is decided on the host before a launch: tile sizes, splits, scratch. Knows no triton.

Tiles are looked up, never tuned at run time: a tuned choice would differ from run to run, and between the two
placements that are to be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIN_SPLIT_LEN = 128
"""Tokens below which a part of a sequence is not worth a program of its own."""
FULL_WAVE = 0.85
"""How full a GPU must be on average over the waves of a launch for more splits not to pay."""


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


_DECODE = {
    # head_dim (up to), bytes of a number -> tiles; sm_90 and sm_80 differ in nothing that these need
    (64, 2): Tiles(64, 4, 3),
    (128, 2): Tiles(64, 4, 3),
    (64, 4): Tiles(32, 4, 3),
    (128, 4): Tiles(32, 4, 3),
}


def decode_tiles(head_dim: int, dtype: torch.dtype, arch: str) -> Tiles:
    """Tiles of ``decode``; the same for every placement."""
    return _DECODE[64 if head_dim <= 64 else 128, dtype.itemsize]


def prefill_tiles(head_dim: int, dtype: torch.dtype, arch: str) -> Tiles:
    """Tiles of ``prefill``; the same for every placement."""
    return Tiles(64, 8, 3, 128)
