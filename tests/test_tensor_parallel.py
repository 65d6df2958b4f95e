"""Several ranks generate what one does: two processes on this CPU, each with half of the heads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.extras import NEEDS_MODELS

pytest.importorskip("torch", reason=NEEDS_MODELS)

import torch

from kvbench.clock import VirtualClock
from kvbench.core import KvbenchError, Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.records import Record
from kvbench.runners.cuda import Queued, open_runner
from kvbench.runners.ranks import close
from kvbench.sampling import SamplingParams
from kvbench.schedulers.base import Scheduler
from tests import real_streams, test_cuda_runner
from tests.real_runs import MAX_LEN, SHAPES, Priced, generated, model, some_requests, system


@pytest.fixture(autouse=True, scope="module")
def few_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    close()
    torch.set_num_threads(num_threads)


def run(
    name: str, scheduler: Scheduler, requests: list[Request], params: SamplingParams, num_ranks: int = 2
) -> tuple[Record, Queued]:
    runner = open_runner(
        SHAPES[name], scheduler.allocator, 0, "cpu", params, max_graph_batch=4, tensor_parallel=num_ranks
    )
    record = serve(Engine(scheduler, Priced(runner), VirtualClock(), Ledger(scheduler.allocator)), requests)
    assert not record.requests["rejected"].any()
    return record, runner


@pytest.mark.parametrize(("name", "system_name"), [("tiny_opt", "orca_pow2"), ("tiny_llama", "vllm4")])
def test_two_ranks_generate_what_hugging_face_does(name: str, system_name: str) -> None:
    _, runner = run(name, system(system_name, 3 * MAX_LEN), list(some_requests()), SamplingParams())
    assert {key: tuple(tokens) for key, tokens in runner.outputs.items()} == generated(name)
    whole = sum(parameter.nbytes for parameter in model(name).model.parameters())
    assert runner.weights_bytes is not None
    assert whole < runner.weights_bytes < 2 * whole
    assert runner.cache.data.shape[3] == SHAPES[name].num_kv_heads // 2


def test_two_ranks_share_copy_and_swap_alike() -> None:
    requests = list(real_streams.some_requests(4, is_beam=True))
    params = SamplingParams()
    found = []
    for serve_requests in (run, test_cuda_runner.run):
        scheduler = real_streams.system("swap4", 3 * MAX_LEN)
        record, runner = serve_requests("tiny_llama", scheduler, requests, params)
        assert record.steps["swapped_in"].sum() > 0
        found.append(runner.samples)
    assert found[0] == found[1]


@pytest.mark.parametrize(("num_ranks", "named"), [(4, "does not divide model.num_kv_heads=2"), (0, "computes nothing")])
def test_heads_that_cannot_be_divided_are_refused(num_ranks: int, named: str) -> None:
    with pytest.raises(KvbenchError, match=named):
        run("tiny_llama", system("vllm4", 64), [], SamplingParams(), num_ranks)
