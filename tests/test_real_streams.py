"""Real requests with several streams: beams equal Hugging Face's, samples equal single runs, swapping loses nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="real runs need make install EXTRAS=dev,models")

import torch

from kvbench.allocators.base import Ability, Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.attention import cpu
from kvbench.cache import KVCache
from kvbench.clock import VirtualClock
from kvbench.core import KvbenchError, Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.models.loading import load
from kvbench.records import Record
from kvbench.reservation import Max, OnDemand, Oracle, Pow2, Reservation
from kvbench.runners.packed_model import PackedModel
from kvbench.runners.torch import Torch, random_prompts
from kvbench.sampling import SamplingParams
from kvbench.schedulers.iteration_level import IterationLevel, Restore
from tests.test_real_engine import MAX_LEN, SHAPES, Priced, model

VOCABULARY = 211


def system(name: str, num_slots: int) -> IterationLevel:
    """``swap4`` and ``recompute4``: paged blocks of 4 slots; ``copies4`` cannot share."""
    if name in ("orca_max", "orca_pow2", "orca_oracle", "first_fit"):
        allocator: Allocator = FirstFit(num_slots) if name == "first_fit" else Buddy(num_slots, 4, MAX_LEN)
        rules: dict[str, Reservation] = {"orca_max": Max(), "orca_pow2": Pow2()}
        reservation = rules.get(name, Oracle())
        return IterationLevel(allocator, reservation, MAX_LEN)
    block_size = int("".join(each for each in name if each.isdigit()))
    paged = Paged(num_slots, block_size, copy_on_write=not name.startswith("copies"))
    restore: Restore = "recompute" if name.startswith("recompute") else "swap"
    return IterationLevel(paged, OnDemand(), MAX_LEN, watermark=0.0, restore=restore)


def shares(scheduler: IterationLevel) -> bool:
    return Ability.FORK in scheduler.allocator.abilities and scheduler.reservation.grows


def run(
    name: str, scheduler: IterationLevel, requests: list[Request], params: SamplingParams | None = None
) -> tuple[Record, Torch]:
    loaded = model(name)
    shapes = loaded.shapes
    pool = KVCache(shapes.num_layers, scheduler.allocator.num_slots, shapes.num_kv_heads, shapes.head_dim)
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(torch.nan)
    packed = PackedModel(loaded.model, pool, cpu.attend)
    prompts = random_prompts(shapes.vocab_size, 0)
    runner = Torch(packed, pool, scheduler.allocator, prompts, params or SamplingParams())
    record = serve(Engine(scheduler, Priced(runner), VirtualClock(), Ledger(scheduler.allocator)), requests)
    assert not record.requests["rejected"].any()
    usage = scheduler.allocator.usage()
    prefix_len = max(request.prefix_len for request in requests)
    assert (usage.used, usage.shared, usage.swapped) == (-(-prefix_len // 4) * 4 if shares(scheduler) else 0, 0, 0)
    return record, runner


@cache
def some_requests(num_seqs: int, is_beam: bool) -> tuple[Request, ...]:
    rng = random.Random(5)
    return tuple(Request(i, 0.0, rng.randint(6, 20), rng.randint(8, 24), num_seqs, is_beam) for i in range(8))


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


PARAMS = SamplingParams(temperature=1.0, top_k=50, seed=11)


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
