"""Prices an iteration instead of computing it. Imports no tensor library.

The cost of one iteration, in milliseconds, with sums over its decodes (context) and its prefills (length L):

    a + b * sum(context) + c(number of requests) + p * sum(L) + q * sum(L^2)

Source of the form: DistServe's regression for vLLM, extended to iterations that mix prompts and decodes; c has two
segments because sampling and bookkeeping per request grow with the batch. It belongs to requests, not to sequences: the
engine that the paper measured calls its sampler once per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2

from kvbench.core import Batch, KvbenchError, Sequence, StepResult

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
        context_factors: block size -> factor on ``b_ms`` (an attention kernel reads small blocks slower); between
            listed sizes it is interpolated in log2, beyond them the nearest holds; empty: 1.
        packed: the engine computes request-level batches without padding, as kvbench's own does.
    """

    a_ms: float
    b_ms: float
    c_ms: float
    p_ms: float
    q_ms: float
    c_large_ms: float | None = None
    c_knee: int = 40
    context_factors: Mapping[int, float] = field(default_factory=dict)
    packed: bool = False

    def __post_init__(self) -> None:
        """Refuse negative coefficients. Raises KvbenchError."""
        for name in ("a_ms", "b_ms", "c_ms", "p_ms", "q_ms", "c_knee"):
            value = getattr(self, name)
            if not value >= 0:
                raise KvbenchError(f"costs: {name}={value} is negative; a cost is 0 or more")

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


class Simulated:
    """Ends a sequence after its recorded output length and charges each iteration its cost.

    Args:
        costs: the coefficients.
        block_size: of paged placement, where the kernel's speed depends on it.
    """

    device_name = "simulated"
    may_stop_early = False
    weights_bytes: int | None = None

    def __init__(self, costs: IterationCosts, block_size: int = 16) -> None:
        self._a, self._c, self._p, self._q = costs.a_ms, costs.c_ms, costs.p_ms, costs.q_ms
        self._b = costs.b_ms * costs.context_factor(block_size)
        self._c_large = costs.c_ms if costs.c_large_ms is None else costs.c_large_ms
        self._knee = costs.c_knee
        self._packed = costs.packed
        self._endings: dict[int, dict[Sequence, None]] = {}  # step -> those whose last token is due in it

    def execute(self, batch: Batch) -> StepResult:
        """Price the batch; finished are those that reach their recorded length in it."""
        num_requests = batch.num_decodes + len(batch.prefills)
        above = num_requests - self._knee
        per_request = self._c * num_requests if above <= 0 else self._c * self._knee + self._c_large * above
        context_len, padded_len = batch.context_len, batch.prefill_len
        if self._packed:
            context_len, padded_len = _packed_context_len(batch), 0
        ms = self._a + self._b * context_len + per_request
        if batch.prefills:
            prefill_len = square_len = 0
            for seq in batch.prefills:
                length = padded_len or seq.length
                prefill_len += length
                square_len += length * length
                last = seq.origin + seq.final_len - 1
                endings = self._endings.get(last)
                if endings is None:
                    self._endings[last] = {seq: None}
                else:
                    endings[seq] = None  # may be there already: preempted and admitted again without a step between
            ms += self._p * prefill_len
            ms += self._q * square_len
        endings = self._endings.pop(batch.step, None)
        if endings is None:
            return StepResult(ms / 1e3, ())
        # A preempted sequence leaves a stale entry: valid only if it runs and this is its last step.
        running, step = batch.running, batch.step
        finished = [seq for seq in endings if seq in running and seq.origin + seq.final_len - 1 == step]
        return StepResult(ms / 1e3, finished)


def _packed_context_len(batch: Batch) -> int:
    """Tokens that the decodes attend to, without padding; the finished sequences of a request-level batch count."""
    step = batch.step
    tokens = sum(step - seq.origin for seq in batch.running)
    return tokens - sum(seq.length for seq in batch.prefills)
