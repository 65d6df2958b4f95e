"""Real tokens: a Hugging Face model over K and V that lie where the allocator says. On a GPU: ``runners.cuda``.

One forward serves an iteration: the decodes, one token each, and the prefills, all their tokens, packed into one row
without padding; logits are computed for the last token of each sequence alone. Request-level batches are packed too, so
what their padding costs a padded engine is not paid here; a finished sequence is computed along until its batch ends.

A prompt that several streams share is computed once, and its last logits give each of them its first token. All beams
of all requests are searched together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.allocators.base import Ability, Allocator
from kvbench.attention.base import PackedBatch
from kvbench.beam_search import first_beams, next_beams
from kvbench.cache import KVCache
from kvbench.core import Batch, BlockCopy, KvbenchError, Request, Sequence, StepResult
from kvbench.models.packed_linear import weights_bytes
from kvbench.runners.footprint import keep_freed_memory
from kvbench.runners.packed_model import PackedModel
from kvbench.sampling import SamplingParams, SamplingRows, sample

SPARE_BLOCKS = 4
"""Columns of a batch's block tables beyond the longest, so that they need not be laid out anew whenever one grows."""
PREFIX_KEY = 2**62
"""Stands for a request's id where a shared prefix is drawn."""
Prompts = Callable[[Request], list[int]]
"""The token ids of a request's prompt, ``prompt_len`` of them."""


def random_prompts(vocab_size: int, seed: int) -> Prompts:
    """Uniformly random ids that depend on the request's id and ``seed`` alone: lengths are all that a trace knows.

    A prefix is the same for all requests.
    """

    def draw(key: int, count: int) -> list[int]:
        rng = np.random.Generator(np.random.Philox(key=[seed, key]))
        ids: list[int] = rng.integers(vocab_size, size=count).tolist()
        return ids

    def prompt(request: Request) -> list[int]:
        own = request.prompt_len - request.prefix_len
        prefix = draw(PREFIX_KEY, request.prefix_len) if request.prefix_len else []
        return prefix + (draw(request.id, own) if own else [])

    return prompt


@dataclass(slots=True, eq=False)
class Stream:
    """A sequence as the runner sees it.

    Attributes:
        tokens: prompt and output so far.
        params: how its tokens are chosen.
        slots: physical slot of each token, the still empty ones last; as of the last grant.
        blocks: the block table that follows from ``slots``.
        score: of a beam: the cumulative log-probability of its output.
    """

    tokens: list[int]
    params: SamplingParams
    slots: list[int]
    blocks: NDArray[np.int64]
    score: float = 0.0


@dataclass(slots=True, eq=False)
class Layout:
    """What of a batch stays the same from step to step, as long as the same sequences run, in service order.

    Attributes:
        seqs: the requests' first streams.
        computed: the B streams that are computed: all but those that share a prompt being computed.
        streams: theirs.
        rows: the index of each.
        origins: ``[B]``, the step less a sequence's length.
        where: ``[B, 1]``, the first slots of contiguous sequences, else ``[B, blocks]``, their block tables.
        drawn: the streams that get a token: all.
        source: for each of them whose logits are its; None: ``drawn`` is ``computed``.
        sampling: their parameters as columns.
    """

    seqs: list[Sequence]
    computed: list[Sequence]
    streams: list[Stream]
    rows: dict[Sequence, int]
    origins: NDArray[np.int64]
    where: NDArray[np.int64]
    drawn: list[Sequence]
    source: NDArray[np.int64] | None
    sampling: SamplingRows


class New(NamedTuple):
    """The new tokens of an iteration, on the host: those of the decodes first, then those of the prefills.

    Attributes:
        ids: ``[T]``.
        positions: ``[T]``, in their sequences.
        slots: ``[T]``, where their K and V go.
        query_start: ``[B + 1]``, the first of each sequence, and T.
        lengths: ``[B]``, of the sequences, the new tokens included.
    """

    ids: list[int]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    query_start: NDArray[np.int64]
    lengths: NDArray[np.int64]


class Torch:
    """Executes batches with a model, a cache and an attention kernel.

    Args:
        model: the packed forward of a model over a cache.
        cache: K and V of the pool that ``allocator`` manages.
        allocator: asked where sequences lie, never changed.
        prompts: token ids of a request's prompt.
        params: of every request; each has a seed of its own derived from this one.

    Attributes:
        outputs: request id -> the tokens it generated, once it has finished; those of its best output.
        samples: request id -> all its outputs, where it has several; beams with the best first.
        scores: request id -> the cumulative log-probabilities of its beams, in the same order.
        model_s: seconds spent in the model's forward.
        weights_bytes: what the model's weights take.
        may_stop_early: whether an output may end before its forced length.
        device_name: for tables.
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
        self.samples: dict[int, list[list[int]]] = {}
        self.scores: dict[int, list[float]] = {}
        self.model_s = 0.0
        self.weights_bytes: int | None = weights_bytes(model.model)
        self.may_stop_early = bool(params.stop_token_ids)
        num_threads = torch.get_num_threads()
        self.device_name = f"cpu, {num_threads} thread{'s' * (num_threads > 1)}"
        self._streams: dict[Sequence, Stream] = {}
        self._ended: dict[Sequence, None] = {}
        self._is_contiguous = Ability.GROW not in allocator.abilities
        self._stops = frozenset(params.stop_token_ids)
        self._host: KVCache | None = None
        self._moved: list[Sequence] = []  # requests whose streams may lie elsewhere than in the last iteration
        nothing = np.empty(0, np.int64)
        self._layout = Layout([], [], [], {}, nothing, nothing[:, None], [], None, SamplingRows.of([]))

    def warm_up(self) -> None:
        """Compile and touch what an iteration uses: a decode and a prefill in the first slots of the empty pool."""
        keep_freed_memory()
        size = self.allocator.block_size
        bases = self._tensor([0]) if self._is_contiguous else None
        tables = None if self._is_contiguous else self._tensor([[0, 1]])
        for count in (1, min(2, self.allocator.num_slots)):
            tokens = self._tensor(list(range(count)))
            start, length = self._tensor([0, count]), self._tensor([count])
            self.model(tokens, tokens, PackedBatch(start, length, tokens, bases, tables, size))

    def execute(self, batch: Batch) -> StepResult:
        """Swap, copy, compute, choose; finished are those that reached their length or met a stop token."""
        started = time.perf_counter()
        if batch.moves:
            self._swap(batch)
        swap_s = time.perf_counter() - started if batch.moves else 0.0
        for prefix in batch.prefixes:
            self._compute(prefix)
        if batch.copies:
            self._copy(batch.copies)
        if not batch.running:
            return StepResult(time.perf_counter() - started, (), None, swap_s)
        streams = self._streams
        for seq in (*batch.grown, *self._moved, *batch.returned):
            for stream in seq.streams if seq in batch.running else ():
                self._locate(streams[stream], stream)
        for seq in batch.prefills:
            self._admit(seq)
        for seq in [seq for seq in self._ended if seq not in batch.running]:
            del self._ended[seq]
            for stream in seq.streams:
                del streams[stream]
        layout = self._arrange(batch)
        new = self._pack(layout, batch.num_decodes + batch.num_siblings, batch.step)
        before_s = self.model_s
        logits, drawn = self._generate(layout, new)
        # Each new token is taken to cost the same, so this is an estimate where prefills run beside decodes.
        again = sum(seq.recompute_len for seq in batch.prefills)
        recompute_s = (self.model_s - before_s) * again / len(new.ids)
        tokens = dict(zip(layout.drawn, drawn, strict=True))
        parents = self._search(batch, layout, logits, tokens) if batch.num_beams or self._moved else None
        finished = self._append(layout.seqs, tokens)
        return StepResult(time.perf_counter() - started, finished, parents, swap_s, recompute_s)

    def _compute(self, prefix: Sequence) -> None:
        """Fill the slots of a prefix that others will share."""
        slots, size, length = self.allocator.slots(prefix), self.allocator.block_size, prefix.length
        tokens = np.arange(length)
        new = New(
            self.prompts(prefix.request), tokens, np.array(slots[:length]), np.array([0, length]), np.array([length])
        )
        self._fill(new, np.array([slots[::size]]) // size)

    def _fill(self, new: New, where: NDArray[np.int64]) -> None:
        """Compute, for what it leaves in the cache."""
        self._forward(new, where)

    def _forward(self, new: New, where: NDArray[np.int64]) -> torch.Tensor:
        """The logits after the last new token of each sequence; ``where`` as in ``Layout``."""
        addresses = self._tensor(where)
        batch = PackedBatch(
            self._tensor(new.query_start),
            self._tensor(new.lengths),
            self._tensor(new.slots),
            addresses[:, 0] if self._is_contiguous else None,
            None if self._is_contiguous else addresses,
            1 if self._is_contiguous else self.allocator.block_size,
        )
        return self.model(self._tensor(new.ids), self._tensor(new.positions), batch)

    def _generate(self, layout: Layout, new: New) -> tuple[torch.Tensor, list[int]]:
        """Compute, and choose a token for each of ``layout.drawn``; returns the logits of these, and the tokens."""
        started = time.perf_counter()
        logits = self._forward(new, layout.where)
        self.model_s += time.perf_counter() - started
        lengths = new.lengths
        if layout.source is not None:
            logits, lengths = logits[torch.from_numpy(layout.source)], lengths[layout.source]
        return logits, sample(logits, layout.sampling, lengths).tolist()

    def _copy(self, copies: Seq[BlockCopy]) -> None:
        self.cache.copy(copies)

    def _swap(self, batch: Batch) -> None:
        """Move blocks to the host pool, or back."""
        if self._host is None:
            num_layers, _, _, num_kv_heads, head_dim = self.cache.data.shape
            dtype = self.cache.data.dtype
            self._host = KVCache(num_layers, self.allocator.host_slots, num_kv_heads, head_dim, dtype)
        if batch.swapped:
            self._host.move(batch.moves, self.cache)
        else:
            self.cache.move(batch.moves, self._host)

    def _admit(self, seq: Sequence) -> None:
        """Note what its streams are, or where those that return lie now.

        Raises:
            KvbenchError: a beam search that is to stop early, or has more beams than there are tokens.
        """
        request = seq.request
        if request.is_beam and self._stops:
            raise KvbenchError("beams have a forced length: set runner.stops=false and give no stop_token_ids")
        if request.is_beam and request.num_seqs > (vocab_size := self.model.model.config.vocab_size):
            raise KvbenchError(f"workload.beam_width={request.num_seqs} is more than the {vocab_size} tokens there are")
        for index, stream in enumerate(seq.streams):
            if stream not in self._streams:
                params = self.params.for_request(request.id, index)
                self._streams[stream] = Stream(list(self.prompts(request)), params, [], np.empty(0, np.int64))
            self._locate(self._streams[stream], stream)

    def _locate(self, stream: Stream, seq: Sequence) -> None:
        """Ask where a sequence lies after it was granted slots."""
        slots = stream.slots = self.allocator.slots(seq)
        size = self.allocator.block_size
        stream.blocks = np.array(slots[::size]) // size

    def _arrange(self, batch: Batch) -> Layout:
        """The layout of the last iteration, brought up to date, if its sequences run again; else a new one."""
        layout, seqs = self._layout, list(batch.running)
        changed = () if self._is_contiguous else [seq for seq in (*batch.grown, *self._moved) if seq in batch.running]
        self._moved = [seq for seq in batch.prefills if seq.siblings]  # they fork in the next iteration
        if seqs == layout.seqs and layout.source is None and not (batch.prefills or batch.returned):
            for seq in changed:
                for each in seq.streams:
                    blocks = self._streams[each].blocks
                    if len(blocks) > layout.where.shape[1]:
                        break
                    layout.where[layout.rows[each], : len(blocks)] = blocks
                else:
                    continue
                break
            else:
                return layout
        sharing = {seq for seq in batch.prefills if seq.num_streams > seq.num_prefills}
        computed = [stream for seq in seqs for stream in ((seq,) if seq in sharing else seq.streams)]
        rows = {stream: row for row, stream in enumerate(computed)}
        drawn, source = computed, None
        if sharing:
            drawn = [stream for seq in seqs for stream in seq.streams]
            firsts = [seq if seq in sharing else stream for seq in seqs for stream in seq.streams]
            source = np.array([rows[stream] for stream in firsts])
        streams = [self._streams[stream] for stream in computed]
        if self._is_contiguous:
            where = np.array([[stream.slots[0]] for stream in streams])
        else:
            where = np.zeros((len(streams), max(len(stream.blocks) for stream in streams) + SPARE_BLOCKS), np.int64)
            for row, of in zip(where, streams, strict=True):
                row[: len(of.blocks)] = of.blocks
        origins = np.array([seq.origin for seq in seqs for _ in ((seq,) if seq in sharing else seq.streams)])
        sampling = SamplingRows.of([self._streams[stream].params for stream in drawn])
        self._layout = Layout(seqs, computed, streams, rows, origins, where, drawn, source, sampling)
        return self._layout

    def _pack(self, layout: Layout, num_decodes: int, step: int) -> New:
        """The new tokens, decodes first, as the scheduler runs them, and their addresses."""
        lengths = step - layout.origins
        where, size = layout.where, self.allocator.block_size
        newest = lengths[:num_decodes] - 1
        if self._is_contiguous:
            written = where[:num_decodes, 0] + newest
        else:
            written = where[np.arange(num_decodes), newest // size] * size + newest % size
        ids = [stream.tokens[-1] for stream in layout.streams[:num_decodes]]
        counts = np.ones(len(lengths), np.int64)
        positions, slots = [newest], [written]
        for row, stream in enumerate(layout.streams[num_decodes:], num_decodes):
            first, length = layout.computed[row].num_cached, len(stream.tokens)
            counts[row] = length - first
            ids += stream.tokens[first:]
            positions.append(np.arange(first, length))
            slots.append(np.array(stream.slots[first:length]))
        query_start = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])
        return New(ids, np.concatenate(positions), np.concatenate(slots), query_start, lengths)

    def _tensor(self, values: NDArray[np.int64] | list[int] | list[list[int]]) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.cache.data.device)

    def _search(
        self, batch: Batch, layout: Layout, logits: torch.Tensor, tokens: dict[Sequence, int]
    ) -> dict[Sequence, list[int]] | None:
        """Choose the tokens of all beams; returns the parents of the searches in which some beam did not survive."""
        row_of = {stream: row for row, stream in enumerate(layout.drawn)}
        by_width: dict[tuple[int, bool], list[Sequence]] = {}
        for seq in batch.running:
            if seq.request.is_beam and seq.siblings and seq not in self._ended:
                is_first = len(self._streams[seq].tokens) == seq.request.prompt_len
                by_width.setdefault((seq.num_streams, is_first), []).append(seq)
        searches: dict[Sequence, list[int]] = {}
        for (width, is_first), seqs in by_width.items():
            rows = torch.tensor([[row_of[stream] for stream in seq.streams] for seq in seqs], device=logits.device)
            if is_first:
                chosen, scores = first_beams(logits[rows[:, 0]], width)
                beams = np.broadcast_to(np.arange(width), chosen.shape)
            else:
                before = np.array([[self._streams[stream].score for stream in seq.streams] for seq in seqs])
                beams, chosen, scores = next_beams(logits[rows], before)
            for seq, parents, new, score in zip(seqs, beams.tolist(), chosen.tolist(), scores.tolist(), strict=True):
                streams = [self._streams[stream] for stream in seq.streams]
                histories = [streams[i].tokens for i in parents]
                for place, stream in enumerate(streams):
                    if parents[place] != place:
                        stream.tokens = list(histories[place])
                    stream.score = score[place]
                tokens.update(zip(seq.streams, new, strict=True))
                if parents != list(range(width)):
                    searches[seq] = parents
                    self._moved.append(seq)
        return searches or None

    def _append(self, seqs: list[Sequence], tokens: dict[Sequence, int]) -> list[Sequence]:
        """Give each stream its token; returns the requests that end with it."""
        finished = []
        for seq in seqs:
            stream = self._streams[seq]
            token = tokens[seq]
            stream.tokens.append(token)
            for sibling in seq.siblings:
                self._streams[sibling].tokens.append(tokens[sibling])
            if seq in self._ended:
                continue  # computed along until its batch ends
            if len(stream.tokens) == seq.final_len or (self._stops and self._all_stopped(seq)):
                seq.final_len = len(stream.tokens)
                self._ended[seq] = None
                self._note_outputs(seq)
                finished.append(seq)
        return finished

    def _all_stopped(self, seq: Sequence) -> bool:
        """Whether every stream of a request has met a stop token; those that have are computed along until then."""
        if not seq.siblings:
            return self._streams[seq].tokens[-1] in self._stops
        outputs = (self._streams[stream].tokens[seq.request.prompt_len :] for stream in seq.streams)
        return all(not self._stops.isdisjoint(output) for output in outputs)

    def _note_outputs(self, seq: Sequence) -> None:
        request = seq.request
        streams = [self._streams[stream] for stream in seq.streams]
        if request.is_beam:
            streams.sort(key=lambda stream: -stream.score)
            self.scores[request.id] = [stream.score for stream in streams]
        outputs = [self._until_stop(stream.tokens[request.prompt_len :]) for stream in streams]
        self.outputs[request.id] = outputs[0]
        if len(outputs) > 1:
            self.samples[request.id] = outputs

    def _until_stop(self, output: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(output) if token in self._stops), len(output))
        return output[: end + 1]
