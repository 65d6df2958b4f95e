"""Prices an iteration instead of computing it. Imports no tensor library.

The cost of one iteration, in milliseconds, with sums over its decodes (context) and its prefills (length L):

    a + b * sum(context) + c(number of requests) + p * sum(L) + q * sum(L^2)

Source of the form: DistServe's regression for vLLM, extended to iterations that mix prompts and decodes; c has two
segments because sampling and bookkeeping per request grow with the batch. It belongs to requests, not to sequences: the
engine that the paper measured calls its sampler once per request. On top come

    s * (further streams of the requests) + beams * (those of them that are beams) + copies + swaps

A copy reads and writes what is copied; a swap pays for each piece, the K or the V of one block in one layer, and for
the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import log2
from typing import Protocol

from kvbench.core import Batch, BlockCopy, KvbenchError, Sequence, StepResult

NOT_COEFFICIENTS = ("name", "hardware", "source", "residuals")
"""Keys of an entry of a costs file that are no arguments of ``IterationCosts``: what it is of, and how good it is."""


@dataclass(slots=True, frozen=True)
class IterationCosts:
    """Coefficients of one engine, model and machine; see the module for the formula.

    Attributes:
        a_ms: per iteration: reading the weights once, launches, the engine's own time.
        b_ms: per token of context a decode attends to.
        c_ms: per request, up to ``c_knee`` requests.
        c_large_ms: per request beyond; None: ``c_ms``.
        p_ms: per prefill token.
        q_ms: per squared prefill length: attention among the prompt's own tokens.
        s_ms: per stream of a request beyond its first.
        beam_ms: per beam of a request beyond its first, on top of ``s_ms``.
        copy_gb_per_s: speed of copies within the memory, what is read and what is written counted; None: they are free.
        prefix_weight: of a token of context in a shared prefix, whose reads hit a cache.
        swap_out_call_us: per piece that is copied to the host.
        swap_out_gb_per_s: None: the bytes are free.
        swap_in_call_us: per piece that is copied back.
        swap_in_gb_per_s: None: the bytes are free.
        context_factors: block size -> factor on ``b_ms`` (an attention kernel reads small blocks slower); between
            listed sizes it is interpolated in log2, beyond them the nearest holds; empty: 1.
        packed: the engine computes request-level batches without padding, as kvbench's own does.
        weights_ms: of ``a_ms``, what reading the weights takes.
        alone_ms: per token of a prompt that is computed alone. It and ``weights_ms`` price, by ``prompt_alone_ms``, an
            iteration that computes one preempted request again and nothing else; 0: as any other iteration. A prompt
            that is computed for the first time is never priced so, though an idle engine has nothing beside it: the
            coefficients were fitted to runs in which it costs what it costs beside others.
    """

    a_ms: float
    b_ms: float
    c_ms: float
    p_ms: float
    q_ms: float
    c_large_ms: float | None = None
    c_knee: int = 40
    s_ms: float = 0.0
    beam_ms: float = 0.0
    copy_gb_per_s: float | None = None
    prefix_weight: float = 1.0
    swap_out_call_us: float = 0.0
    swap_out_gb_per_s: float | None = None
    swap_in_call_us: float = 0.0
    swap_in_gb_per_s: float | None = None
    context_factors: Mapping[int, float] = field(default_factory=dict)
    packed: bool = False
    weights_ms: float = 0.0
    alone_ms: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative coefficients, and speeds of 0. Raises KvbenchError."""
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if name == "context_factors" or value is None:
                continue
            if not value >= 0:
                raise KvbenchError(f"costs: {name}={value} is negative; a cost is 0 or more")
            if name.endswith("_gb_per_s") and not value > 0:
                raise KvbenchError(f"costs: {name}={value} is no speed; give more than 0, or null for free")

    def context_factor(self, block_size: int) -> float:
        """The factor on ``b_ms`` for paged placement with this block size."""
        sizes = sorted(self.context_factors)
        if not sizes:
            return 1.0
        if block_size <= sizes[0] or block_size >= sizes[-1]:
            return self.context_factors[sizes[0] if block_size <= sizes[0] else sizes[-1]]
        above = next(size for size in sizes if size >= block_size)
        below = max(size for size in sizes if size <= block_size)
        if above == below:
            return self.context_factors[above]
        weight = (log2(block_size) - log2(below)) / (log2(above) - log2(below))
        return (1 - weight) * self.context_factors[below] + weight * self.context_factors[above]

    def swap_ms(self, num_pieces: int, num_bytes: int, *, out: bool) -> float:
        """Milliseconds of copying so many pieces, so many bytes together, to the host (``out``) or back."""
        call_us, gb_per_s = self.swap_in_call_us, self.swap_in_gb_per_s
        if out:
            call_us, gb_per_s = self.swap_out_call_us, self.swap_out_gb_per_s
        ms = num_pieces * call_us / 1e3
        return ms + num_bytes / gb_per_s / 1e6 if gb_per_s else ms

    def prompt_alone_ms(self, length: int, count: int = 1, num_cached: int = 0) -> float:
        """Milliseconds of an iteration that computes one prompt and nothing else.

        It computes it for each of ``count`` streams, but for the first ``num_cached`` tokens that are there already.
        Computing hides behind reading the weights, or the other way round, so the larger of the two counts; their sum,
        as in the iterations of a run, is a quarter too much for a few hundred tokens.

        Raises:
            KvbenchError: the costs do not say what reading the weights and computing take.
        """
        if not (self.weights_ms and self.alone_ms):
            raise KvbenchError("costs: the price of a prompt alone needs weights_ms and alone_ms")
        overhead_ms = self.a_ms - self.weights_ms + self.c_ms
        num_tokens, squares = count * length - num_cached, count * length * length - num_cached * num_cached
        return overhead_ms + max(self.weights_ms, self.alone_ms * num_tokens + self.q_ms * squares)


class Beams(Protocol):
    """Which beams of a search survive a step."""

    def parents(self, request: int, width: int, step: int) -> Seq[int] | None:
        """As ``kvbench.runners.beams.ScoreModel.parents``."""
        ...


class Simulated:
    """Ends a sequence after its recorded output length and charges each iteration its cost.

    Args:
        costs: the coefficients.
        block_size: of paged placement, where the kernel's speed depends on it.
        bytes_per_slot: K and V of a token in all layers, for the price of copies and swaps.
        num_layers: of the model: a block is swapped in ``2 * num_layers`` pieces.
        beams: who survives, where there are beams.
        kernel_factor: the speed of the attention kernel depends on the block size, by ``costs.context_factors``.
        swap_merges: neighbouring blocks are swapped as one piece; the paper's engine did not.
        swap_overlaps: swaps run beside the iteration, which waits for them only if they take longer; the paper's engine
            did not.
    """

    device_name = "simulated"
    may_stop_early = False
    weights_bytes: int | None = None

    def __init__(
        self,
        costs: IterationCosts,
        block_size: int = 16,
        bytes_per_slot: int = 0,
        num_layers: int = 0,
        beams: Beams | None = None,
        *,
        kernel_factor: bool = True,
        swap_merges: bool = False,
        swap_overlaps: bool = False,
    ) -> None:
        self._a, self._c, self._p, self._q = costs.a_ms, costs.c_ms, costs.p_ms, costs.q_ms
        self._b = costs.b_ms * (costs.context_factor(block_size) if kernel_factor else 1.0)
        self._c_large = costs.c_ms if costs.c_large_ms is None else costs.c_large_ms
        self._knee = costs.c_knee
        self._costs = costs
        self._bytes_per_slot = bytes_per_slot
        self._num_layers = num_layers
        self._beams = beams
        self._merges = swap_merges
        self._overlaps = swap_overlaps
        self._searches: dict[Sequence, None] = {}  # requests with beams, from their prompt on
        self._packed = costs.packed
        self._endings: dict[int, dict[Sequence, None]] = {}  # step -> those whose last token is due in it

    def coefficients(self) -> tuple[float, ...]:
        """What iterations of single streams cost: a, b, c, c_large, p, q, alone, weights and the knee of c."""
        costs = self._costs
        fixed = (costs.alone_ms, costs.weights_ms, self._knee)
        return self._a, self._b, self._c, self._c_large, self._p, self._q, *fixed

    def execute(self, batch: Batch) -> StepResult:
        """Price the batch; finished are those that reach their recorded length in it."""
        num_requests = batch.num_decodes + len(batch.prefills)
        above = num_requests - self._knee
        per_request = self._c * num_requests if above <= 0 else self._c * self._knee + self._c_large * above
        context_len, padded_len = batch.context_len, batch.prefill_len
        if self._packed and not batch.num_siblings:  # only batches of single streams are ever padded
            context_len, padded_len = _packed_context_len(batch), 0
        ms = self._a + self._b * context_len + per_request
        wide = batch.num_siblings > 0
        recompute_ms = 0.0
        if batch.prefills:
            again: Sequence | None = None
            prefill_len = square_len = 0
            for seq in batch.prefills:
                length = padded_len or seq.length
                prefill_len += length
                square_len += length * length
                if seq.num_cached:
                    prefill_len -= seq.num_cached
                    square_len -= seq.num_cached * seq.num_cached
                if seq.siblings:
                    wide = True
                    prefill_len += length * (seq.num_prefills - 1)
                    square_len += length * length * (seq.num_prefills - 1)
                if seq.num_preemptions:
                    again = seq
                    recompute_ms += self._recompute_ms(seq)
                last = seq.origin + seq.final_len - 1
                endings = self._endings.get(last)
                if endings is None:
                    self._endings[last] = {seq: None}
                else:
                    endings[seq] = None  # may be there already: preempted and admitted again without a step between
            ms += self._p * prefill_len
            ms += self._q * square_len
            if again and num_requests == 1 and self._costs.alone_ms:
                mixed_ms, ms = ms, self._costs.prompt_alone_ms(again.length, again.num_prefills, again.num_cached)
                recompute_ms += ms - mixed_ms
            recompute_ms = max(0.0, recompute_ms)
        parents: dict[Sequence, Seq[int]] | None = None
        swap_s = 0.0
        if wide or batch.moves or batch.prefix_len or batch.copies:
            ms, parents = self._streams(batch, ms)
            if batch.moves:
                before_ms, ms = ms, self._with_swaps(batch, ms)
                swap_s = (ms - before_ms) / 1e3
        endings = self._endings.pop(batch.step, None)
        if endings is None:
            return StepResult(ms / 1e3, (), parents, swap_s, recompute_ms / 1e3)
        # A preempted sequence leaves a stale entry: valid only if it runs and this is its last step.
        running, step = batch.running, batch.step
        finished = [seq for seq in endings if seq in running and seq.origin + seq.final_len - 1 == step]
        return StepResult(ms / 1e3, finished, parents, swap_s, recompute_ms / 1e3)

    def _recompute_ms(self, seq: Sequence) -> float:
        """What computing a sequence again takes beyond decoding it beside the others."""
        length, count, cached = seq.length, seq.num_prefills, seq.num_cached
        computed_ms = self._p * (count * length - cached) + self._q * (count * length * length - cached * cached)
        return computed_ms - self._b * (count * length - (1 - self._costs.prefix_weight) * cached)

    def _streams(self, batch: Batch, ms: float) -> tuple[float, dict[Sequence, Seq[int]] | None]:
        """What several streams for a request and copies add to an iteration; and which beams survive it."""
        costs = self._costs
        if not batch.running:
            ms = 0.0
        num_siblings, num_beams = batch.num_siblings, batch.num_beams
        for seq in batch.prefills:
            if seq.siblings:
                num_siblings += seq.num_prefills - 1
                if seq.request.is_beam:
                    num_beams += len(seq.siblings)
                    self._searches[seq] = None
        for seq in batch.returned:  # filed before they left: the steps that they were out come on top
            self._endings.setdefault(seq.origin + seq.final_len - 1, {})[seq] = None
        ms += costs.s_ms * num_siblings + costs.beam_ms * num_beams
        if batch.prefix_len:
            ms -= self._b * (1 - costs.prefix_weight) * batch.prefix_len
        if batch.copies and costs.copy_gb_per_s:
            num_bytes = 2 * self._bytes_per_slot * sum(copy.num_slots for copy in batch.copies)
            ms += num_bytes / costs.copy_gb_per_s / 1e6
        return ms, self._survivors(batch) if self._searches else None

    def _with_swaps(self, batch: Batch, ms: float) -> float:
        """What the iteration takes with the swaps before it, or beside it."""
        moves = batch.moves
        num_pieces = 2 * self._num_layers * (num_runs(moves) if self._merges else len(moves))
        num_bytes = self._bytes_per_slot * sum(move.num_slots for move in moves)
        swap_ms = self._costs.swap_ms(num_pieces, num_bytes, out=bool(batch.swapped))
        return max(ms, swap_ms) if self._overlaps else ms + swap_ms

    def _survivors(self, batch: Batch) -> dict[Sequence, Seq[int]] | None:
        """The parents of every search that computes a step; a prompt's first tokens have none."""
        if self._beams is None:
            raise KvbenchError("beam search in simulation needs to know which beams survive; give runner.beams")
        parents: dict[Sequence, Seq[int]] = {}
        running, step, ask = batch.running, batch.step, self._beams.parents
        gone = []
        for seq in self._searches:
            if seq in running:
                request = seq.request
                num_generated = step - seq.origin - request.prompt_len
                if num_generated and (survivors := ask(request.id, request.num_seqs, num_generated)):
                    parents[seq] = survivors
            else:
                gone.append(seq)
        for seq in gone:
            if seq.finish_s >= 0:
                del self._searches[seq]
        return parents or None


def num_runs(moves: Seq[BlockCopy]) -> int:
    """How many pieces remain when moves are merged whose sources and targets both follow each other."""
    ordered = sorted(moves)
    return 1 + sum(
        (move.src, move.dst) != (before.src + before.num_slots, before.dst + before.num_slots)
        for before, move in pairwise(ordered)
    )


def _packed_context_len(batch: Batch) -> int:
    """Tokens that the decodes attend to, without padding; the finished sequences of a request-level batch count."""
    step = batch.step
    tokens = sum(step - seq.origin for seq in batch.running)
    return tokens - sum(seq.length for seq in batch.prefills)
