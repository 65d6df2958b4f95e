"""Real requests with several streams: beams equal Hugging Face's, samples equal single runs, swapping loses nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.extras import NEEDS_MODELS
from tests.real_streams import PARAMS, VOCABULARY, run, some_requests, system

pytest.importorskip("torch", reason=NEEDS_MODELS)

import torch

from kvbench.core import KvbenchError, Request
from kvbench.models.loading import load
from kvbench.records import Record
from kvbench.runners.torch import random_prompts
from kvbench.sampling import SamplingParams
from tests.real_runs import MAX_LEN, SHAPES


@cache
def searched(name: str, width: int) -> dict[int, list[tuple[float, list[int]]]]:
    """What Hugging Face's beam search finds, request by request, with its own cache and attention."""
    loaded = load(SHAPES[name])
    loaded.model.set_attn_implementation("eager")
    prompts = random_prompts(VOCABULARY, 0)
    found = {}
    generate: Any = loaded.model.generate
    for request in some_requests(width, is_beam=True):
        ids = torch.tensor([prompts(request)])
        result = generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, length_penalty=0.0,
            do_sample=False, min_new_tokens=request.output_len, max_new_tokens=request.output_len, pad_token_id=0,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        outputs = result.sequences[:, request.prompt_len :].tolist()
        found[request.id] = list(zip(result.sequences_scores.tolist(), outputs, strict=True))
    return found


CASES = [(name, each, width) for name in SHAPES for each in ("swap4", "recompute4") for width in (2, 4, 6)]
CASES += [("tiny_llama", each, 4) for each in ("swap1", "copies4", "orca_max", "orca_pow2", "orca_oracle", "first_fit")]


def assert_preemption_costs_time(record: Record) -> None:
    """Where something was computed again or swapped, and only there."""
    steps = {name: column.astype(np.float64) for name, column in record.steps.items()}
    requests = {name: column.astype(np.float64) for name, column in record.requests.items()}
    moved = steps["swapped_in"] + steps["swapped_out"]
    for seconds, work in ((steps["swap_s"], moved), (steps["recompute_s"], steps["recomputed"])):
        assert ((seconds > 0) == (work > 0)).all()
    assert steps["num_preempted"].sum() == requests["num_preemptions"].sum()
    assert steps["recomputed"].sum() == requests["recomputed_tokens"].sum()
    assert ((requests["preempted_s"] > 0) <= (requests["num_preemptions"] > 0)).all()


@pytest.mark.parametrize(("name", "system_name", "width"), CASES)
def test_beam_search_equals_generate(name: str, system_name: str, width: int) -> None:
    shares = system_name.startswith(("swap", "recompute"))
    # As tight as it may be: a recomputed request shares nothing any more, so that all its beams must fit side by side.
    longest = max(request.final_len for request in some_requests(width, is_beam=True)) + 4
    num_slots = longest * (width if system_name.startswith("recompute") else width // 2 + 1)
    scheduler = system(system_name, num_slots if shares else width * MAX_LEN)
    record, runner = run(name, scheduler, list(some_requests(width, is_beam=True)))
    for id_, expected in searched(name, width).items():
        outputs = runner.samples[id_]
        assert outputs[0] == runner.outputs[id_]
        assert runner.scores[id_] == pytest.approx([score for score, _ in expected], abs=1e-4)
        assert outputs == [tokens for _, tokens in expected]
    if shares:
        assert record.steps["shared"].max() > 0
        assert (record.steps["copied"].sum() > 0) == (
            system_name != "swap1"
        )  # blocks of one slot are never shared in part
    if shares and width == 4 and name == "tiny_llama":
        assert record.requests["num_preemptions"].sum() > 0
        assert (record.steps["swapped_in"].sum() > 0) == system_name.startswith("swap")
        assert (record.requests["recomputed_tokens"].sum() > 0) == system_name.startswith("recompute")
        assert_preemption_costs_time(record)


@pytest.mark.parametrize("system_name", ["swap4", "recompute4", "copies4", "orca_pow2"])
def test_samples_equal_single_runs_with_their_seeds(system_name: str) -> None:
    requests = some_requests(3, is_beam=False)
    _, runner = run("tiny_llama", system(system_name, 4 * MAX_LEN), list(requests), PARAMS)
    for request in requests:
        for sample, output in enumerate(runner.samples[request.id]):
            single = replace(request, num_seqs=1, arrival_s=0.0)
            assert output == _alone(single, PARAMS.for_request(request.id, sample).seed)


def _alone(request: Request, seed: int) -> list[int]:
    """One request by itself, in a pool with room for all, sampled with exactly this seed."""

    class Seeded(SamplingParams):
        __slots__ = ()

        def for_request(self, request_id: int, sample: int = 0) -> SamplingParams:
            del request_id, sample
            return replace(PARAMS, seed=seed)

    _, runner = run("tiny_llama", system("swap4", 4 * MAX_LEN), [request], Seeded())
    return runner.outputs[request.id]


def test_swapped_streams_go_on_bit_for_bit() -> None:
    """The K and V after all swaps are those of a pool with room for everybody."""
    requests = list(some_requests(3, is_beam=False))
    outputs = []
    for num_slots in (4 * MAX_LEN, 40 * MAX_LEN):
        record, runner = run("tiny_llama", system("swap4", num_slots), requests, PARAMS)
        outputs.append(runner.samples)
        assert (record.steps["swapped_in"].sum() > 0) == (num_slots == 4 * MAX_LEN)
    assert outputs[0] == outputs[1]


def test_a_shared_prefix_equals_the_prefix_pasted_in() -> None:
    rng = random.Random(7)
    requests = [Request(i, 0.0, 18 + rng.randint(1, 9), rng.randint(20, 36), prefix_len=18) for i in range(8)]
    shared, pasted = (run("tiny_llama", system(name, MAX_LEN + 28), requests) for name in ("recompute4", "copies4"))
    assert shared[1].outputs == pasted[1].outputs
    assert shared[0].steps["shared"].max() >= 16
    assert 0 < shared[0].steps["prefill_tokens"][0] < pasted[0].steps["prefill_tokens"][0]
    assert shared[0].requests["num_preemptions"].sum() > 0


def test_beams_that_cannot_be_searched_are_refused() -> None:
    request = [Request(0, 0.0, 4, 4, num_seqs=2, is_beam=True)]
    with pytest.raises(KvbenchError, match="forced length"):
        run("tiny_llama", system("swap4", 4 * MAX_LEN), request, SamplingParams(stop_token_ids=(3,)))
    wide = [replace(request[0], num_seqs=VOCABULARY + 1)]
    with pytest.raises(KvbenchError, match=f"beam_width={VOCABULARY + 1} is more than the {VOCABULARY} tokens"):
        run("tiny_llama", system("swap4", 4 * MAX_LEN), wide)
