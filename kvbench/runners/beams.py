"""Which beams survive a step of beam search, where no model says so: the process that a simulated run draws from.

Sharing depends on how often beams die, and that on how sure the model is of its next token. Each beam draws the law of
its next token: the probability of the j-th best is proportional to ``G_j ** -beta``, with ``G_j`` the j-th arrival of a
unit Poisson process. Of the ``width * width`` best continuations the ``width`` with the largest cumulative
log-probability survive, in place; the other beams are forked from survivors, as in the artifact of the PagedAttention
authors. The first tokens are the ``width`` best of one law. Large ``beta``: a confident model, few forks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from kvbench.beam_search import places
from kvbench.core import KvbenchError

NUM_TERMS = 24
"""Tokens of a law; the rest have no weight."""
NUM_CHAINS = 128
"""Independent searches drawn for each width; request i follows number i modulo this."""
CHUNK_STEPS = 64


class ScoreModel:
    """Searches of the score model, drawn when first needed.

    Args:
        beta: how steep the laws are, above 0. Fitted to Fig. 15 of the paper: 4 on Alpaca, 20 on ShareGPT; recorded
            searches of small models agree with 2 to 2.5.
        seed: of all draws.

    Raises:
        KvbenchError: ``beta`` is not above 0.
    """

    def __init__(self, beta: float, seed: int = 0) -> None:
        if not beta > 0:
            raise KvbenchError(f"runner.beams.beta={beta} is not above 0; give 4 (Alpaca) or 20 (ShareGPT)")
        self.beta = beta
        self.seed = seed
        self._searches: dict[int, _Searches] = {}
        self._drawn: dict[int, list[list[tuple[int, ...] | None]]] = {}
        """By width: what its searches have drawn, by step, then by search."""

    def parents(self, request: int, width: int, step: int) -> Seq[int] | None:
        """Beam ``i`` goes on from beam ``parents[i]``; None: all survive.

        Args:
            request: its id.
            width: number of beams.
            step: tokens generated before, at least 1.

        Raises:
            KvbenchError: more beams than a law has tokens.
        """
        try:  # asked for every search in every step
            return self._drawn[width][step - 1][request % NUM_CHAINS]
        except (KeyError, IndexError):
            self._draw(width, step)
            return self._drawn[width][step - 1][request % NUM_CHAINS]

    def _draw(self, width: int, num_steps: int) -> None:
        """Searches of this width for so many steps."""
        if width not in self._searches:
            if width > NUM_TERMS:
                raise KvbenchError(
                    f"workload.beam_width={width}: simulated beams are drawn from {NUM_TERMS} tokens; give at most that"
                )
            rng = np.random.Generator(np.random.Philox(key=[self.seed, width]))
            self._searches[width] = _Searches(width, self.beta, rng)
            self._drawn[width] = []
        while num_steps > len(self._drawn[width]):
            self._drawn[width] += self._searches[width].draw()


class _Searches:
    """The state of ``NUM_CHAINS`` searches of one width, side by side."""

    def __init__(self, width: int, beta: float, rng: np.random.Generator) -> None:
        self.width = width
        self.beta = beta
        self.rng = rng
        self.scores = self._laws(1, 1)[0, :, 0]

    def _laws(self, num_steps: int, num_beams: int) -> NDArray[np.float64]:
        """Log-probabilities of the ``width`` best tokens, ``[num_steps, NUM_CHAINS, num_beams, width]``, descending."""
        logs = np.log(self.rng.standard_exponential((num_steps, NUM_CHAINS, num_beams, NUM_TERMS)).cumsum(axis=3))
        logs *= -self.beta
        best = logs[..., : self.width]
        shares = np.exp(logs - logs[..., :1]).sum(axis=3, keepdims=True)
        normalised: NDArray[np.float64] = best - logs[..., :1] - np.log(shares)
        return normalised

    def draw(self) -> list[list[tuple[int, ...] | None]]:
        """The next ``CHUNK_STEPS`` steps: the parents of each search, None where all survive."""
        k = self.width
        steps: list[list[tuple[int, ...] | None]] = []
        for laws in self._laws(CHUNK_STEPS, k):
            candidates = (self.scores[:, :, None] + laws).reshape(NUM_CHAINS, k * k)
            best = np.argsort(-candidates, axis=1, kind="stable")[:, :k]
            scores = np.take_along_axis(candidates, best, axis=1)
            place = places(best // k)
            parents = np.empty_like(place)
            np.put_along_axis(parents, place, best // k, axis=1)
            np.put_along_axis(self.scores, place, scores - scores[:, :1], axis=1)
            stays = (parents == np.arange(k)).all(axis=1)
            steps.append(
                [None if stay else tuple(row) for stay, row in zip(stays.tolist(), parents.tolist(), strict=True)]
            )
        return steps
