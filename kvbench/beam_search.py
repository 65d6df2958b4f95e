"""One step of beam search: the best continuations of all beams, and whose places they take.

The rules of the PagedAttention authors' artifact: of the ``width * vocabulary`` candidates the ``width`` with the
largest cumulative log-probability survive; there is no length penalty and no early end. Real and simulated runs share
the places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


def first_beams(logits: Tensor, width: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The first tokens of searches: the best of one law.

    Args:
        logits: ``[searches, vocabulary]``, after the prompts.
        width: beams of each search.

    Returns:
        Tokens and cumulative log-probabilities, ``[searches, width]``, best first.
    """
    best = logits.float().log_softmax(dim=-1).topk(width, dim=-1)
    return best.indices.cpu().numpy(), best.values.double().cpu().numpy()


def next_beams(
    logits: Tensor, scores: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """The next tokens of searches.

    Args:
        logits: ``[searches, width, vocabulary]``.
        scores: ``[searches, width]``, the beams' cumulative log-probabilities.

    Returns:
        By place, ``[searches, width]`` each: the beam it continues, the token and the new score.
    """
    import torch

    num_searches, width, vocab_size = logits.shape
    totals = logits.float().log_softmax(dim=-1) + torch.from_numpy(scores).to(logits.device, torch.float32)[:, :, None]
    best = totals.view(num_searches, -1).topk(width, dim=-1)
    candidates = best.indices.cpu().numpy()
    place = places(candidates // vocab_size)
    parents, tokens, new_scores = (np.empty_like(candidates), np.empty_like(candidates), np.empty_like(scores))
    np.put_along_axis(parents, place, candidates // vocab_size, axis=1)
    np.put_along_axis(tokens, place, candidates % vocab_size, axis=1)
    np.put_along_axis(new_scores, place, best.values.double().cpu().numpy(), axis=1)
    return parents, tokens, new_scores


def places(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where survivors go, so that a beam stays where it is and only those without a continuation are replaced.

    Args:
        parents: ``[searches, width]``, the beam that each survivor continues, best first.

    Returns:
        The place of each: the best continuation of a beam takes its place, the others those of the beams that have
        none, in order.
    """
    num_searches, width = parents.shape
    rows = np.arange(num_searches)
    place = np.full((num_searches, width), -1)
    taken = np.zeros((num_searches, width), bool)
    for i in range(width):
        first = ~taken[rows, parents[:, i]]
        place[first, i] = parents[first, i]
        taken[rows, parents[:, i]] = True
    left = np.argsort(taken, axis=1, kind="stable")  # places of dropped beams first, in order
    used = np.zeros(num_searches, np.int64)
    for i in range(width):
        extra = place[:, i] < 0
        place[extra, i] = left[extra, used[extra]]
        used += extra
    return place
