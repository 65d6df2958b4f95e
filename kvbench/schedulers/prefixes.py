"""Shared prefixes: in the pool once, from the first request that begins with them on, and for good."""

from __future__ import annotations

from kvbench.allocators.base import Allocator
from kvbench.core import BlockCopy, Fit, Request, Sequence


class Prefixes:
    """The prefixes that were asked for, by length: two requests with prefixes of one length share it.

    Args:
        allocator: one that can fork, if any request has a prefix that is to be shared.
        keep: slots that stay free when a prefix is granted its own.

    Attributes:
        token_states: tokens in the pool that belong to no running stream: those of the prefixes, once each, and what
            requests that are swapped out go on sharing with them.
        fresh: prefixes that are in the pool since the last batch, which has to compute them.
    """

    def __init__(self, allocator: Allocator, keep: int) -> None:
        self.token_states = 0
        self.fresh: list[Sequence] = []
        self._allocator = allocator
        self._keep = keep
        self._by_len: dict[int, Sequence] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of all prefixes."""
        return sum(self._by_len)

    def fit(self, seq: Sequence, slots: int) -> Fit:
        """Whether a request finds room for what it does not share with its prefix: the last block, unless it is full.

        The prefix is put into the pool if it is not there yet. Notes in ``seq`` how much is shared.
        """
        prefix_len = seq.request.prefix_len
        fit = self._register(prefix_len)
        if fit is Fit.OK:
            seq.num_cached = prefix_len
            fit = self._allocator.can_allocate(slots - self._full_blocks(prefix_len), self._keep)
        return fit

    def share(self, seq: Sequence, copies: list[BlockCopy]) -> int:
        """Grant a request that fits what it asked for, its prefix included; returns the slots it has."""
        self._allocator.fork(self._by_len[seq.num_cached], seq, seq.num_cached)
        return self._allocator.extend(seq, seq.requested, copies)

    def swapped_out(self, seq: Sequence) -> None:
        """The streams of a request leave the pool, but for what they share with a prefix."""
        self.token_states += self._stay(seq)

    def swapped_in(self, seq: Sequence) -> None:
        """They are back, or will never be."""
        self.token_states -= self._stay(seq)

    def _stay(self, seq: Sequence) -> int:
        return seq.num_streams * self._full_blocks(seq.num_cached)

    def _full_blocks(self, length: int) -> int:
        """Slots of the blocks that so many tokens fill."""
        size = self._allocator.block_size
        return length // size * size

    def _register(self, prefix_len: int) -> Fit:
        """Grant a prefix its slots if it has none."""
        if prefix_len in self._by_len:
            return Fit.OK
        fit = self._allocator.can_allocate(prefix_len, self._keep)
        if fit is Fit.OK:
            request = Request(-1, 0.0, prefix_len, 1, prefix_len=prefix_len)
            prefix = self._by_len[prefix_len] = Sequence(request, prefix_len, prefix_len)
            prefix.granted = self._allocator.allocate(prefix, prefix_len)
            self.token_states += prefix_len
            self.fresh.append(prefix)
        return fit
