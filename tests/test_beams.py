"""The survivors of simulated beam searches, and the places that real and simulated ones share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.beam_search import places
from kvbench.core import KvbenchError
from kvbench.runners.beams import NUM_CHAINS, NUM_TERMS, ScoreModel


@given(st.integers(1, 7).flatmap(lambda width: st.lists(st.integers(0, width - 1), min_size=width, max_size=width)))
def test_survivors_stay_in_place_and_the_others_fill_the_rest(parents: list[int]) -> None:
    place = places(np.array([parents]))[0].tolist()
    assert sorted(place) == list(range(len(parents)))
    for survivor in set(parents):
        assert place[parents.index(survivor)] == survivor  # its best continuation


def num_forks(model: ScoreModel, width: int, num_steps: int = 128) -> float:
    """Beams replaced in a step, on average."""
    drawn = [model.parents(request, width, step) for step in range(1, num_steps + 1) for request in range(NUM_CHAINS)]
    return sum(parent != i for parents in drawn for i, parent in enumerate(parents or ())) / len(drawn)


@pytest.mark.parametrize(("width", "recorded"), [(2, 0.21), (4, 0.63), (6, 1.15)])
def test_forks_are_as_frequent_as_in_searches_recorded_of_small_models(width: int, recorded: float) -> None:
    """Which agree with a beta of 2 to 2.5."""
    assert num_forks(ScoreModel(2.5), width) < recorded < num_forks(ScoreModel(1.9), width)


def test_the_same_seed_draws_the_same_whoever_asks_first() -> None:
    first, second = ScoreModel(4.0, seed=3), ScoreModel(4.0, seed=3)
    second.parents(9, 6, 200)
    second.parents(9, 2, 200)
    asked = [(request, step) for request in (0, 5, 131) for step in (1, 64, 65, 200)]
    assert [first.parents(r, 4, s) for r, s in asked] == [second.parents(r, 4, s) for r, s in asked]
    other = ScoreModel(4.0, seed=4)
    assert [first.parents(0, 4, s) for s in range(1, 99)] != [other.parents(0, 4, s) for s in range(1, 99)]


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(KvbenchError, match=r"runner\.beams\.beta=0.0 is not above 0"):
        ScoreModel(0.0)
    ScoreModel(4.0).parents(0, NUM_TERMS, 1)  # may be
    with pytest.raises(KvbenchError, match=f"beam_width={NUM_TERMS + 1}.*{NUM_TERMS} tokens"):
        ScoreModel(4.0).parents(0, NUM_TERMS + 1, 1)
