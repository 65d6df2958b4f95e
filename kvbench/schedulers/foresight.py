"""The room that running sequences will need in every coming step, for admission that knows when each of them ends."""

from __future__ import annotations

from kvbench.core import Fit, KvbenchError, Sequence


class Foresight:
    """Blocks that will be held, step by step, by sequences that run to their recorded end.

    A request is admitted if from its first step to its last there is room for all. The pool's peak lies where somebody
    ends, so nothing less than looking at every step, or at every end, is exact (LightLLM's and Past-Future's rule for
    admission, with true lengths instead of predicted ones). One block stays free, as preemption begins without one.

    Args:
        num_blocks: of the pool.
        block_size: in slots.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._held: dict[int, int] = {}
        self._next = 0

    def fit(self, step: int, seq: Sequence) -> Fit:
        """Whether there is room if a request starts now.

        Raises:
            KvbenchError: it has several streams, or shares a prefix; what those hold is not foreseen.
        """
        if seq.siblings or seq.request.prefix_len:
            raise KvbenchError(
                "reservation=clairvoyant foresees requests with one output and no shared prefix; use another"
            )
        own = self._own(seq)
        if max(own) >= self._num_blocks:
            return Fit.NEVER
        held = self._held
        fits = all(held.get(at, 0) + blocks < self._num_blocks for at, blocks in enumerate(own, step))
        return Fit.OK if fits else Fit.LATER

    def book(self, step: int, seq: Sequence) -> None:
        """It starts now."""
        held = self._held
        for past in range(self._next, step):
            held.pop(past, None)
        self._next = step
        for at, blocks in enumerate(self._own(seq), step):
            held[at] = held.get(at, 0) + blocks

    def _own(self, seq: Sequence) -> list[int]:
        """What it holds in each of its steps; the token of its last step is not stored."""
        size = self._block_size
        return [-(-length // size) for length in range(seq.length, seq.final_len)]
