"""Conversations as a workload: every request is a round whose prompt holds what was said before."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from kvbench.core import KvbenchError
from kvbench.workloads.arrivals import Arrivals, drawn
from kvbench.workloads.base import Decoding, IntArray, Invalid, Load, Trace, check_seed, to_requests, whole
from kvbench.workloads.rows import from_arrays
from kvbench.workloads.turns import Conversations
from kvbench.workloads.validity import enforce

_TAKEN = 2
"""Second word of the seed of what is taken; `kvbench.workloads.arrivals` has the others."""


@dataclass(slots=True)
class Chat:
    """Rounds of conversations, arriving under one rule; nothing is kept in the cache between the rounds.

    So the PagedAttention authors' artifact does: conversations are taken until they hold as many rounds as requests
    arrive; each arrival then begins a new one with a given probability, or is the next round of one drawn among those
    that have begun. The probability changes the order alone: a smaller one brings long histories earlier. Which
    conversations are taken depends on the seed here; the authors took the first of their file.

    Args:
        name: what tables call it.
        conversations: the data set.
        arrivals: the rule; it says which of ``request_rate``, ``duration_s`` and ``num_requests`` it needs.
        max_model_len: tokens of prompt and output the model can hold together; longer rounds are invalid.
        max_prompt_len: of history and query the last so many tokens are the prompt.
        max_output_len: of the answer the first so many are the output.
        new_conversation_prob: 0 to 1; at 0 too a new one begins where none is left that has begun.
        request_rate: requests/s.
        duration_s: how long requests arrive, in seconds; the run goes on until all are served.
        num_requests: at most so many.
        invalid: what happens to rounds that the model cannot hold (`kvbench.workloads.validity`).
        seed: 0 or more; below 2**32.
        num_samples: parallel samples of each request.
        beam_width: beams of each request.
    """

    name: str
    conversations: Conversations
    arrivals: Arrivals
    max_model_len: int
    max_prompt_len: int = 1024
    max_output_len: int = 1016
    new_conversation_prob: float = 0.5
    request_rate: float | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    invalid: Invalid = "drop"
    seed: int = 0
    num_samples: int = 1
    beam_width: int = 1

    def __post_init__(self) -> None:
        """Refuse options out of range before anything is read. Raises `KvbenchError`."""
        Load(self.request_rate, self.duration_s, self.num_requests)
        Decoding(self.num_samples, self.beam_width)
        check_seed(self.seed)
        whole("max_prompt_len", self.max_prompt_len, least=1)
        whole("max_output_len", self.max_output_len, least=1)
        if not 0 <= self.new_conversation_prob <= 1:
            raise KvbenchError(
                f"workload.new_conversation_prob={self.new_conversation_prob} is no probability; give 0 to 1"
            )

    def generate(self) -> Trace:
        """See `kvbench.workloads.base.Workload`."""
        load = Load(self.request_rate, self.duration_s, self.num_requests)
        rounds = self.conversations.rounds()
        prompt_len = np.minimum(rounds.prompt_len, self.max_prompt_len)
        output_len = np.minimum(rounds.output_len, self.max_output_len)
        rows = from_arrays(self.conversations.source(), prompt_len, output_len)
        valid = enforce(rows, self.invalid, self.max_model_len, self.arrivals.strict)
        arrival_s, _ = drawn(self.arrivals, load, len(valid.kept), self.seed)
        taken = take(rounds.conversation[valid.kept], len(arrival_s), self.seed)
        order = in_turn(taken, self.new_conversation_prob, self.seed)
        return Trace(
            to_requests(
                arrival_s, valid.prompt_len[order], valid.output_len[order], Decoding(self.num_samples, self.beam_width)
            ),
            self.conversations.source(),
            rounds.num_dropped + valid.num_dropped,
            valid.num_clipped,
            self.inputs(),
        )

    def inputs(self) -> dict[str, str]:
        """See `kvbench.workloads.base.Workload`."""
        return self.conversations.inputs()


def take(conversation: IntArray, num_rounds: int, seed: int) -> list[range]:
    """Conversations in random order until they have so many rounds, as ranges of rounds; the last one is cut.

    With one seed, less rounds are the beginning of more. A data set that is too small is repeated.

    Args:
        conversation: of each round, ascending.
        num_rounds: at least 1.
        seed: decides the order.
    """
    starts = np.flatnonzero(np.diff(conversation, prepend=-1))
    ends = np.append(starts[1:], len(conversation))
    taken: list[range] = []
    for i in cycle(np.random.default_rng((seed, _TAKEN)).permutation(len(starts)).tolist()):
        taken.append(range(int(starts[i]), min(int(ends[i]), int(starts[i]) + num_rounds)))
        num_rounds -= len(taken[-1])
        if not num_rounds:
            return taken
    raise AssertionError("a data set has at least one round")


def in_turn(conversations: list[range], new_conversation_prob: float, seed: int) -> IntArray:
    """The order in which the rounds of conversations come: each conversation's own, the others in between at random."""
    rng = random.Random(seed)
    untouched = list(conversations)
    begun: list[list[int]] = []  # rounds that are left, the next one last
    order: list[int] = []
    for _ in range(sum(map(len, conversations))):
        begins = rng.random() < new_conversation_prob
        if (begins and untouched) or not begun:
            rounds = list(reversed(untouched.pop(rng.randrange(len(untouched)))))
            order.append(rounds.pop())
            if rounds:
                begun.append(rounds)
        else:
            i = rng.randrange(len(begun))
            order.append(begun[i].pop())
            if not begun[i]:
                del begun[i]
    return np.array(order, dtype=np.int64)
