"""Sampling against transformers' filters, its distribution, and that neighbours do not matter."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from kvbench.core import KvbenchError
from kvbench.sampling import SamplingParams, SamplingRows, probabilities, sample, uniforms
from tests.extras import NEEDS_MODELS

torch = pytest.importorskip("torch", reason=NEEDS_MODELS)
transformers = pytest.importorskip("transformers", reason=NEEDS_MODELS)

SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=0.8, top_k=1),
    SamplingParams(temperature=1.7, top_k=40),
    SamplingParams(temperature=1.0, top_k=10_000),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=2.5, top_p=0.999),
    SamplingParams(temperature=0.7, top_p=1e-9),
    SamplingParams(temperature=0.9, top_k=25, top_p=0.6),
]


def logits_of(num_rows: int, vocab_size: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_rows, vocab_size, generator=generator)


def mixed(num_rows: int, seed: int = 0) -> list[SamplingParams]:
    """Greedy and random requests of every kind, each with its own seed."""
    kinds = [SamplingParams(seed=seed), *(replace(each, seed=seed) for each in SETTINGS)]
    return [kinds[row % len(kinds)].for_request(row) for row in range(num_rows)]


def filtered_by_transformers(logits: Any, params: SamplingParams) -> Any:
    """What ``generate`` would draw from, by its own processors in its own order."""
    processors = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(params.temperature)])
    if params.top_k is not None:
        processors.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(params.top_p))
    return processors(None, logits).softmax(dim=-1)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab_size", [11, 512, 5003])
def test_filters_as_transformers_does(params: SamplingParams, vocab_size: int) -> None:
    logits = logits_of(16, vocab_size)
    before = logits.clone()
    ours = probabilities(logits, SamplingRows.of([params] * 16))
    theirs = filtered_by_transformers(logits, params)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours / ours.sum(dim=-1, keepdim=True), theirs, rtol=2e-5, atol=1e-9)
    assert torch.equal(logits, before)


def test_each_row_has_its_own_filters() -> None:
    logits = logits_of(len(SETTINGS), 700)
    together = probabilities(logits, SamplingRows.of(SETTINGS))
    for row, params in enumerate(SETTINGS):
        alone = probabilities(logits[row : row + 1], SamplingRows.of([params]))[0]
        assert torch.equal(together[row], alone), params


@pytest.mark.parametrize("params", [SETTINGS[0], SETTINGS[3], SETTINGS[5], SETTINGS[8]], ids=str)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square of 40,000 draws, half over the seeds and half over the positions; fixed, so it cannot flicker."""
    num_draws, vocab_size = 40_000, 60
    logits = logits_of(1, vocab_size, seed=5) / 2
    half = np.arange(num_draws // 2)
    rows = SamplingRows.of([params])
    rows = replace(
        rows.take(np.zeros(num_draws, np.intp)),
        seed=np.concatenate([half, np.full(len(half), 10**9)]).astype(np.uint64),
    )
    tokens = sample(logits.expand(num_draws, -1), rows, np.concatenate([np.full(len(half), 17), half]))
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    expected = num_draws * filtered_by_transformers(logits, params)[0].double().numpy()
    assert not counts[expected == 0].any()
    often, seldom = expected >= 5, (expected > 0) & (expected < 5)
    observed = np.append(counts[often], counts[seldom].sum())
    wanted = np.append(expected[often], expected[seldom].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    assert freedom >= 4
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab_size", [513, 50_272])
def test_tokens_do_not_depend_on_neighbours(vocab_size: int) -> None:
    """Also across the blocks in which large vocabularies are worked on, and with another number of threads."""
    num_rows = 40
    logits, params = logits_of(num_rows, vocab_size), mixed(num_rows)
    positions = 7 * np.arange(num_rows)
    together = sample(logits, SamplingRows.of(params), positions)
    order = np.random.default_rng(0).permutation(num_rows)
    shuffled = sample(logits[order], SamplingRows.of([params[row] for row in order]), positions[order])
    assert torch.equal(shuffled, together[order])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in range(num_rows):
            one = slice(row, row + 1)
            assert torch.equal(sample(logits[one], SamplingRows.of(params[one]), positions[one]), together[one])
    finally:
        torch.set_num_threads(threads)


def test_seed_and_position_decide() -> None:
    logits = logits_of(1, 1000).expand(64, -1)
    one = SamplingParams(temperature=2.0)
    same = sample(logits, SamplingRows.of([one] * 64), [3] * 64)
    by_position = sample(logits, SamplingRows.of([one] * 64), np.arange(64))
    by_request = sample(logits, SamplingRows.of([one.for_request(index) for index in range(64)]), [3] * 64)
    assert len(set(same.tolist())) == 1
    assert len(set(by_position.tolist())) > 30
    assert len(set(by_request.tolist())) > 30


def test_random_numbers_are_pinned_and_uniform() -> None:
    """0xE220... is SplitMix64's first number from state 0. A change would change what every run generates."""
    seeds, positions = [0, 0, 1, 2**64 - 1], [0, 1, 0, 12_345]
    by_hand = [
        _mix_by_hand(_mix_by_hand(seed) + (position + 1) * 0x9E3779B97F4A7C15)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert by_hand[0] == 0xE220A8397B1DCDAF
    assert uniforms(np.array(seeds, np.uint64), positions).tolist() == [(bits >> 11) / 2**53 for bits in by_hand]
    grid = uniforms(np.repeat(np.arange(300, dtype=np.uint64), 300), np.tile(np.arange(300), 300)).reshape(300, 300)
    assert grid.min() >= 0
    assert grid.max() < 1
    assert len(np.unique(grid)) == grid.size
    assert abs(grid.mean() - 0.5) < 0.004
    for shifted in (grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1]):
        assert abs(shifted.mean() - 0.25) < 0.004


def _mix_by_hand(bits: int) -> int:
    bits %= 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def test_ties_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    two = SamplingRows.of([SamplingParams(temperature=1.0, top_k=2)])
    assert (probabilities(logits, two) > 0).tolist() == [[False, True, True, True, True, False]]
    most = SamplingRows.of([SamplingParams(temperature=1.0, top_p=0.5)])
    assert (probabilities(logits, most) > 0).tolist() == [[False, True, True, True, True, False]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_temperature_0_is_greedy(dtype: str) -> None:
    logits = logits_of(20, 300).to(getattr(torch, dtype))
    params = [SamplingParams(seed=3), SamplingParams(top_k=5, top_p=0.1)] * 10
    tokens = sample(logits, SamplingRows.of(params), np.zeros(20))
    assert torch.equal(tokens, logits.argmax(dim=-1))
    assert tokens.dtype == torch.int64
    assert sample(torch.tensor([[0.0, 5.0, 5.0]]), SamplingRows.of(params[:1]), [0]).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_too(temperature: float) -> None:
    logits = 1000 * logits_of(8, 300)
    rows = SamplingRows.of([SamplingParams(temperature=temperature, seed=row) for row in range(8)])
    assert torch.equal(sample(logits, rows, np.arange(8)), logits.argmax(dim=-1))


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 64), -torch.inf)
    logits[0, [5, 63]] = 0.0
    rows = SamplingRows.of([SamplingParams(temperature=1.0)]).take(np.zeros(2000, np.intp))
    tokens = sample(logits.expand(2000, -1), rows, np.arange(2000))
    assert set(tokens.tolist()) == {5, 63}


@pytest.mark.parametrize(("number", "token"), [(0.0, 5), (0.5, 63), (float(np.nextafter(1, 0)), 63)])
def test_the_ends_of_the_random_numbers(monkeypatch: pytest.MonkeyPatch, number: float, token: int) -> None:
    logits = torch.full((1, 66), -torch.inf)
    logits[0, [5, 63]] = 0.0
    monkeypatch.setattr("kvbench.sampling.uniforms", lambda *_: np.array([number]))
    assert sample(logits, SamplingRows.of([SamplingParams(temperature=1.0)]), [0]).tolist() == [token]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(value: float, temperature: float) -> None:
    logits = logits_of(3, 50).half()
    logits[1, 30] = value
    with pytest.raises(KvbenchError, match=r"row 1 are not finite .*float16; give model.dtype=float32"):
        sample(logits, SamplingRows.of([SamplingParams(temperature=temperature)] * 3), [0, 0, 0])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 .* 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature=hot"),
        ({"top_k": 0}, "top_k=0 .* null for all"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"top_k": True}, "top_k=True"),
        ({"top_p": 0.0}, "top_p=0.0 .* above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"stop_token_ids": (2, -1)}, "stop_token_ids has -1"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids has '</s>'"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(KvbenchError, match=says):
        SamplingParams(**values)


def test_parameters_are_values() -> None:
    params = SamplingParams(temperature=1.0, stop_token_ids=[2, 3])  # type: ignore[arg-type]  # as YAML gives it
    assert params.stop_token_ids == (2, 3)
    assert hash(params) == hash(replace(params))
    assert params.for_request(1) == params.for_request(1)
    assert params.for_request(1).seed != params.for_request(2).seed != replace(params, seed=1).for_request(1).seed
    with pytest.raises(FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]
