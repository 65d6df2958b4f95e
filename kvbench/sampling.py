"""Chooses tokens: greedy, or drawn after temperature, top-k and top-p, each request by its own parameters and seed.

The random number for a token is a function of the request's seed and the token's position, nothing else, and every row
of the logits is treated by itself: what a request generates depends neither on its neighbours nor on preemption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbench.core import KvbenchError

if TYPE_CHECKING:
    from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CPU_BLOCK = 2**20
"""Logits of the rows that are worked on at a time: what stays in the cache takes a third of the time."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen. Filters apply in the order of the fields, as in transformers.

    Attributes:
        temperature: the logits are divided by it; 0 chooses the most probable token (the first of several), whatever
            the filters, which always keep it.
        top_k: only the k most probable tokens, and those as probable as the last of them; None: all.
        top_p: then only the most probable tokens that together have this probability, and those as probable as the
            last of them; 1: all.
        seed: of the request's random numbers, below 2**64.
        stop_token_ids: tokens that end the output.

    Raises:
        KvbenchError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every value; a list of stop tokens becomes a tuple."""
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise KvbenchError(f"temperature={self.temperature} is not possible; give a finite number, 0 or more")
        if self.top_k is not None and not (_is_whole(self.top_k) and self.top_k >= 1):
            raise KvbenchError(f"top_k={self.top_k} is not possible; give a whole number from 1 on, or null for all")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise KvbenchError(f"top_p={self.top_p} is not possible; give a number above 0 and at most 1")
        if not (_is_whole(self.seed) and 0 <= self.seed < 2**64):
            raise KvbenchError(f"seed={self.seed} is not possible; give a whole number from 0 to 2**64 - 1")
        if not isinstance(self.stop_token_ids, list | tuple):
            raise KvbenchError(f"stop_token_ids={self.stop_token_ids!r} is no list; give [id, id, ...]")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if not (_is_whole(token) and token >= 0):
                raise KvbenchError(f"stop_token_ids has {token!r}; give ids of tokens, 0 or more")

    def for_request(self, request_id: int, sample: int = 0) -> SamplingParams:
        """The same with a seed of the request's own, derived from ``seed`` and its id, and so for each sample of it."""
        seed = _random_bits(np.array([self.seed], np.uint64), [request_id])
        return replace(self, seed=int(_random_bits(seed, [sample])[0] if sample else seed[0]))


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """The parameters of a batch as columns, one row per sequence; kept as long as the batch is the same.

    Attributes:
        temperature: [B] float32.
        top_k: [B] int64, 0 for all tokens.
        top_p: [B] float64.
        seed: [B] uint64.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    seed: NDArray[np.uint64]

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingRows:
        """Collect the columns."""
        return cls(
            np.array([each.temperature for each in params], np.float32),
            np.array([each.top_k or 0 for each in params], np.int64),
            np.array([each.top_p for each in params], np.float64),
            np.array([each.seed for each in params], np.uint64),
        )

    def take(self, index: NDArray[np.intp]) -> SamplingRows:
        """The rows with these numbers."""
        return SamplingRows(self.temperature[index], self.top_k[index], self.top_p[index], self.seed[index])


def sample(logits: Tensor, rows: SamplingRows, positions: ArrayLike) -> Tensor:
    """Choose the next token of every sequence.

    A token is drawn by inverting the cumulative distribution at one uniform number.

    Args:
        logits: [B, V], any floating type, on any device.
        rows: the parameters of the B sequences.
        positions: [B] tokens before the new one in its sequence, prompt included.

    Returns:
        [B] int64 on the device of the logits.

    Raises:
        KvbenchError: the largest logit of a row is not finite, so no choice would mean anything.
    """
    best, tokens = most_probable(logits)
    if not bool(best.isfinite().all()):
        raise not_finite(int((~best.isfinite()).nonzero()[0, 0]), str(logits.dtype))
    draw(tokens, logits, rows, positions)
    return tokens


def not_finite(row: int, dtype: str) -> KvbenchError:
    """What to say where the largest logit of a row is not finite."""
    return KvbenchError(
        f"the logits of row {row} are not finite as the model overflows in {dtype.removeprefix('torch.')}; "
        "give model.dtype=float32"
    )


def draw(tokens: Tensor, logits: Tensor, rows: SamplingRows, positions: ArrayLike) -> None:
    """Replace the tokens of the sequences that have a temperature; the host waits for no device.

    Args:
        tokens: [B] int64 on the device of the logits.
        logits: as for ``sample``, all as they should be.
        rows: as for ``sample``.
        positions: as for ``sample``, on the host.
    """
    import torch

    drawn = np.flatnonzero(rows.temperature > 0)
    if not drawn.size:
        return
    numbers = uniforms(rows.seed, positions)
    rows_per_block = max(_CPU_BLOCK // logits.shape[1], 1) if logits.device.type == "cpu" else len(drawn)
    for start in range(0, len(drawn), rows_per_block):
        block = drawn[start : start + rows_per_block]
        index = _on(logits, block)
        cumulative = probabilities(logits[index], rows.take(block)).cumsum(dim=-1, dtype=torch.float64)
        aims = _on(logits, numbers[block])[:, None] * cumulative[:, -1:]
        # The first token whose cumulative probability exceeds the aim; never one of probability 0.
        tokens[index] = torch.searchsorted(cumulative, aims, right=True)[:, 0]


def _on(logits: Tensor, values: NDArray[Any]) -> Tensor:
    """Values of the host on the device of the logits."""
    import torch

    return torch.from_numpy(values).to(logits.device, non_blocking=True)


def most_probable(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit [B] of every row, a NaN if there is one, and the first token that has it [B]."""
    import torch

    if logits.device.type != "cpu":
        best, tokens = logits.max(dim=-1)
        return best, tokens
    # NumPy compares with vector instructions, ten times as fast as torch, but knows no bfloat16.
    rows = (logits.float() if logits.dtype.itemsize < 4 else logits).numpy()
    tokens = torch.from_numpy(rows.argmax(axis=-1))
    return logits.gather(1, tokens[:, None])[:, 0], tokens


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Probabilities after temperature, top-k and top-p, up to a factor for each row.

    Args:
        logits: [B, V].
        rows: their parameters, each with a temperature above 0.

    Returns:
        [B, V] float32; 0 for what the filters remove.
    """
    import torch

    def column(values: NDArray[Any]) -> Tensor:
        return _on(logits, values)[:, None]

    logits = logits.float()
    vocab_size = logits.shape[1]
    is_limited = (rows.top_k > 0) & (rows.top_k < vocab_size)
    if is_limited.any():
        top_k = np.where(is_limited, rows.top_k, 1)
        lowest = logits.topk(int(top_k.max()), dim=-1).values.gather(1, column(top_k - 1))
        lowest = torch.where(column(is_limited), lowest, -torch.inf)
        logits = torch.where(logits < lowest, -torch.inf, logits)
    # The largest is subtracted first, so that a small temperature overflows towards probability 0 alone.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / column(rows.temperature)
    weights = torch.softmax(scaled, dim=-1)
    cut = np.flatnonzero(rows.top_p < 1)
    if cut.size:
        index = _on(logits, cut)
        least = _nucleus(weights[index], column(rows.top_p)[index])
        weights[index] = torch.where(weights[index] < least, 0.0, weights[index])
    return weights


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """The least probability [B, 1] among the most probable tokens that together have ``top_p`` [B, 1]."""
    import torch

    if weights.device.type == "cpu":  # NumPy sorts with vector instructions, nine times as fast as torch
        largest = torch.from_numpy(-np.sort(-weights.numpy(), axis=-1))
    else:
        largest = weights.sort(dim=-1, descending=True).values
    cumulative = largest.cumsum(dim=-1, dtype=torch.float64)
    num_kept = (cumulative - largest < top_p).sum(dim=-1, keepdim=True)
    return largest.gather(1, num_kept - 1)


def uniforms(seeds: NDArray[np.uint64], positions: ArrayLike) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair of seed and position: multiples of 2**-53."""
    return (_random_bits(seeds, positions) >> np.uint64(11)) * np.float64(2.0**-53)


def _random_bits(seeds: NDArray[np.uint64], positions: ArrayLike) -> NDArray[np.uint64]:
    """Number ``position`` of the SplitMix64 generator whose state is the hashed seed (Steele, Lea, Flood 2014)."""
    counter = np.asarray(positions).astype(np.uint64) + np.uint64(1)
    return _mix(_mix(seeds) + counter * _GOLDEN)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: a permutation of 64-bit numbers; each bit changes half of the others."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
