"""Real tokens: a Hugging Face model over K and V that lie where the allocator says. The same for CPU and GPU.

One forward serves an iteration: the decodes, one token each, and the prefills, all their tokens, packed into one row
without padding; logits are computed for the last token of each sequence alone. Request-level batches are packed too, so
what their padding costs a padded engine is not paid here; a finished sequence is computed along until its batch ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.allocators.base import Ability, Allocator
from kvbench.attention.base import PackedBatch
from kvbench.attention.hf import PackedModel
from kvbench.cache import KVCache
from kvbench.core import Batch, Request, Sequence, StepResult
from kvbench.sampling import SamplingParams, SamplingRows, sample

Prompts = Callable[[Request], list[int]]
"""The token ids of a request's prompt, ``prompt_len`` of them."""


def random_prompts(vocab_size: int, seed: int) -> Prompts:
    """Uniformly random ids that depend on the request's id and ``seed`` alone: lengths are all that a trace knows."""

    def prompt(request: Request) -> list[int]:
        rng = np.random.Generator(np.random.Philox(key=[seed, request.id]))
        ids: list[int] = rng.integers(vocab_size, size=request.prompt_len).tolist()
        return ids

    return prompt


@dataclass(slots=True, eq=False)
class Stream:
    """A sequence as the runner sees it.

    Attributes:
        tokens: prompt and output so far.
        params: how its tokens are chosen.
        slots: physical slot of each token, the still empty ones last; as of the last grant.
        blocks: the block table that follows from ``slots``.
    """

    tokens: list[int]
    params: SamplingParams
    slots: list[int]
    blocks: NDArray[np.int64]


class Torch:
    """Executes batches with a model, a cache and an attention kernel.

    Args:
        model: the packed forward of a model over a cache.
        cache: K and V of the pool that ``allocator`` manages.
        allocator: asked where sequences lie, never changed.
        prompts: token ids of a request's prompt.
        params: of every request; each has a seed of its own derived from this one.

    Attributes:
        outputs: request id -> the tokens it generated, once it has finished.
        model_s: seconds spent in the model's forward.
    """

    def __init__(
        self, model: PackedModel, cache: KVCache, allocator: Allocator, prompts: Prompts, params: SamplingParams
    ) -> None:
        self.model = model
        self.cache = cache
        self.allocator = allocator
        self.prompts = prompts
        self.params = params
        self.outputs: dict[int, list[int]] = {}
        self.model_s = 0.0
        self._streams: dict[Sequence, Stream] = {}
        self._ended: dict[Sequence, None] = {}
        self._is_contiguous = Ability.GROW not in allocator.abilities
        self._stops = frozenset(params.stop_token_ids)
        self._rows: tuple[list[Sequence], SamplingRows] = ([], SamplingRows.of([]))

    def execute(self, batch: Batch) -> StepResult:
        """Copy, compute, choose; finished are those that reached their length or met a stop token."""
        started = time.perf_counter()
        if batch.copies:
            self.cache.copy(batch.copies)
        streams = self._streams
        for seq in batch.grown:
            self._locate(streams[seq], seq)
        for seq in batch.prefills:
            if seq not in streams:
                request = seq.request
                params = self.params.for_request(request.id)
                streams[seq] = Stream(self.prompts(request), params, [], np.empty(0, np.int64))
            self._locate(streams[seq], seq)
        seqs = list(batch.running)
        for seq in [seq for seq in self._ended if seq not in batch.running]:
            del self._ended[seq], streams[seq]
        packed, ids, positions = self._pack(seqs, batch.num_decodes, batch.step)
        forward = time.perf_counter()
        logits = self.model(ids, positions, packed)
        self.model_s += time.perf_counter() - forward
        chosen = sample(logits, self._sampling_rows(seqs), packed.context_len).tolist()
        finished = self._append(seqs, chosen)
        return StepResult(time.perf_counter() - started, finished)

    def _locate(self, stream: Stream, seq: Sequence) -> None:
        """Ask where a sequence lies after it was granted slots."""
        slots = stream.slots = self.allocator.slots(seq)
        size = self.allocator.block_size
        stream.blocks = np.array(slots[::size]) // size

    def _pack(
        self, seqs: list[Sequence], num_decodes: int, step: int
    ) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
        """Addresses, ids and positions of the new tokens: decodes first, as the scheduler runs them, then prefills."""
        streams = [self._streams[seq] for seq in seqs]
        lengths = np.array([step - seq.origin for seq in seqs])
        decoding = streams[:num_decodes]
        ids = [stream.tokens[-1] for stream in decoding]
        positions = [len(stream.tokens) - 1 for stream in decoding]
        where = [stream.slots[position] for stream, position in zip(decoding, positions, strict=True)]
        counts = np.ones(len(seqs), np.int64)
        for row, stream in enumerate(streams[num_decodes:], num_decodes):
            length = len(stream.tokens)
            counts[row] = length
            ids += stream.tokens
            positions += range(length)
            where += stream.slots[:length]
        query_start = np.zeros(len(seqs) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])
        bases, tables, block_size = self._addresses(streams)
        packed = PackedBatch(
            self._tensor(query_start), self._tensor(lengths), self._tensor(where), bases, tables, block_size
        )
        return packed, self._tensor(ids), self._tensor(positions)

    def _tensor(self, values: NDArray[np.int64] | list[int]) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.cache.data.device)

    def _addresses(self, streams: list[Stream]) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        """Bases of contiguous sequences, else their block tables, and the block size."""
        if self._is_contiguous:
            return self._tensor([stream.slots[0] for stream in streams]), None, 1
        tables = np.zeros((len(streams), max(len(stream.blocks) for stream in streams)), np.int64)
        for row, stream in zip(tables, streams, strict=True):
            row[: len(stream.blocks)] = stream.blocks
        return None, self._tensor(tables), self.allocator.block_size

    def _sampling_rows(self, seqs: list[Sequence]) -> SamplingRows:
        """The parameters as columns; the same object as long as the batch is."""
        if seqs != self._rows[0]:
            self._rows = seqs, SamplingRows.of([self._streams[seq].params for seq in seqs])
        return self._rows[1]

    def _append(self, seqs: list[Sequence], chosen: list[int]) -> list[Sequence]:
        """Give each sequence its token; returns those that end with it."""
        finished = []
        for seq, token in zip(seqs, chosen, strict=True):
            stream = self._streams[seq]
            stream.tokens.append(token)
            request = seq.request
            if seq in self._ended:
                continue  # computed along until its batch ends
            if len(stream.tokens) == seq.final_len or token in self._stops:
                seq.final_len = len(stream.tokens)
                self.outputs[request.id] = stream.tokens[request.prompt_len :]
                self._ended[seq] = None
                finished.append(seq)
        return finished
