"""When requests arrive, and which lengths they get."""

from __future__ import annotations

import math
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.core import KvbenchError
from kvbench.workloads.arrivals import AllAtOnce, Arrivals, Gamma, OnOff, Paper, Poisson
from kvbench.workloads.base import Load
from kvbench.workloads.lengths import Alpaca, Fixed, Lengths, ShareGPT
from kvbench.workloads.synthetic import Synthetic

LIMIT = 2048
Row = tuple[float, int, int]


def make(arrivals: Arrivals, lengths: Lengths | None = None, **options: Any) -> Synthetic:
    return Synthetic("test", lengths or ShareGPT("absent", pairs="histogram"), arrivals, LIMIT, **options)


def rows(workload: Synthetic) -> list[Row]:
    trace = workload.generate()
    assert [request.id for request in trace.requests] == list(range(len(trace.requests)))
    return [(request.arrival_s, request.prompt_len, request.output_len) for request in trace.requests]


def papers_trace(pairs: list[tuple[int, int]], rate: float, duration: int, seed: int) -> list[Row]:
    """The artifact's procedure, step by step, with the generators it seeds globally."""
    random.seed(seed)
    np.random.seed(seed)
    stamps = []
    for i, count in enumerate(np.random.poisson(lam=rate * 0.01, size=duration * 100)):
        stamps += [i * 0.01] * int(count)
    short = [pair for pair in pairs if sum(pair) < LIMIT]
    chosen: list[tuple[int, int]] = []
    while len(chosen) < len(stamps):
        chosen += short
    chosen = chosen[: len(stamps)]
    random.shuffle(chosen)
    return [(stamp, prompt, output) for stamp, (prompt, output) in zip(stamps, chosen, strict=True)]


@pytest.mark.parametrize(("rate", "duration", "seed"), [(2.0, 100, 0), (0.3, 50, 7), (90.0, 20, 1)])
def test_the_papers_generator_to_the_last_bit(tmp_path: Path, rate: float, duration: int, seed: int) -> None:
    pairs = [(i, 2000) for i in range(1, 60)]  # the last dozen too long; repeated at the highest rate
    (tmp_path / "sharegpt_opt_text_completion_length.pkl").write_bytes(pickle.dumps(pairs))
    workload = make(Paper(), ShareGPT(tmp_path), request_rate=rate, duration_s=duration, seed=seed)
    assert rows(workload) == papers_trace(pairs, rate, duration, seed)
    assert workload.generate().num_dropped == 12


def test_the_papers_generator_on_the_papers_pairs(data_file: Callable[[str], Path]) -> None:
    lengths = ShareGPT(data_file("sharegpt_lengths.csv.gz").parent, pairs="file")
    table = lengths.rows()
    pairs = [(int(p), int(o)) for p, o in zip(table.prompt.values, table.output.values, strict=True)]
    trace = rows(make(Paper(), lengths, request_rate=2.0, duration_s=3600))
    assert trace == papers_trace(pairs, 2.0, 3600, 0)
    assert sorted(row[1:] for row in trace) == sorted([p for p in pairs if sum(p) < LIMIT][: len(trace)])


def test_the_papers_generator_goes_the_same_way_without_its_pairs() -> None:
    lengths = ShareGPT("absent")
    table = lengths.rows()
    pairs = [(int(p), int(o)) for p, o in zip(table.prompt.values, table.output.values, strict=True)]
    workload = make(Paper(), lengths, request_rate=2.0, duration_s=900)
    assert rows(workload) == papers_trace(pairs, 2.0, 900, 0)
    trace = workload.generate()
    assert trace.source == "ShareGPT, drawn from the paper's histogram"
    assert "absent: the paper's joint histogram" in trace.inputs.values()


def test_the_number_of_requests_cuts_the_papers_trace() -> None:
    whole = rows(make(Paper(), request_rate=2.0, duration_s=100))
    assert rows(make(Paper(), request_rate=2.0, duration_s=100, num_requests=50)) == whole[:50]
    assert rows(make(Paper(), request_rate=2.0, duration_s=100, num_requests=10**6)) == whole


RENEWAL: list[Arrivals] = [Poisson(), Gamma(0.5), Gamma(4.0), OnOff(0.25, 50.0)]


@pytest.mark.parametrize("arrivals", RENEWAL)
def test_two_rates_see_the_same_requests_in_scaled_time(arrivals: Arrivals) -> None:
    slow = rows(make(arrivals, request_rate=1.0, num_requests=1000, seed=3))
    fast = rows(make(arrivals, request_rate=4.0, num_requests=1000, seed=3))
    assert [row[1:] for row in slow] == [row[1:] for row in fast]
    assert [row[0] / 4 for row in slow] == [row[0] for row in fast]
    assert slow != rows(make(arrivals, request_rate=1.0, num_requests=1000, seed=4))


@pytest.mark.parametrize("arrivals", RENEWAL)
def test_two_durations_see_the_same_beginning(arrivals: Arrivals) -> None:
    long = rows(make(arrivals, request_rate=2.0, duration_s=2000))
    short = rows(make(arrivals, request_rate=2.0, duration_s=100))
    assert 0 < len(short) < len(long)
    assert short == long[: len(short)]
    assert short[-1][0] < 100 <= long[len(short)][0]
    assert rows(make(arrivals, request_rate=2.0, duration_s=100, num_requests=20)) == long[:20]
    assert rows(make(arrivals, request_rate=2.0, duration_s=100, num_requests=10**6)) == short


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [(Poisson(), 1.0), (Gamma(1.0), 1.0), (Gamma(0.5), 0.5), (Gamma(3.0), 3.0), (OnOff(0.5, 4.0), math.sqrt(2))],
)
def test_gaps_have_the_mean_and_the_variation_asked_for(arrivals: Arrivals, cv: float) -> None:
    times = np.array([row[0] for row in rows(make(arrivals, Fixed(1, 1), request_rate=5.0, num_requests=40_000))])
    gaps = np.diff(times, prepend=0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_lengths_and_gaps_do_not_share_a_stream() -> None:
    trace = rows(make(Poisson(), request_rate=1.0, num_requests=20_000))
    gaps = np.diff([row[0] for row in trace], prepend=0)
    assert np.corrcoef(gaps, [row[1] for row in trace])[0, 1] == pytest.approx(0, abs=0.03)
    assert np.mean([row[1] for row in trace]) == pytest.approx(161.3, rel=0.05)


def test_all_at_once_takes_every_pair_once() -> None:
    lengths = ShareGPT("absent", pairs="histogram")
    table = lengths.rows()
    trace = rows(make(AllAtOnce(), lengths))
    assert {row[0] for row in trace} == {0.0}
    assert [row[1] for row in trace] == table.prompt.values.tolist()
    assert [row[2] for row in trace] == table.output.values.tolist()
    some = rows(make(AllAtOnce(), lengths, num_requests=100))
    assert len(some) == 100
    assert some[:50] == rows(make(AllAtOnce(), lengths, num_requests=50))
    assert some[:50] != trace[:50]


def test_the_whole_data_set_of_figure_11(data_file: Callable[[str], Path]) -> None:
    lengths = ShareGPT(data_file("sharegpt_lengths.csv.gz").parent, pairs="file")
    trace = rows(make(AllAtOnce(), lengths))
    assert len(trace) == 79_731
    assert round(float(np.mean([row[1] for row in trace])), 2) == 161.31
    assert round(float(np.mean([row[2] for row in trace])), 2) == 337.99


def test_clip_shortens_and_error_names_the_pair(tmp_path: Path) -> None:
    (tmp_path / "sharegpt_opt_text_completion_length.pkl").write_bytes(pickle.dumps([(1, 1), (2000, 48), (9, 3000)]))
    lengths = ShareGPT(tmp_path)
    trace = make(AllAtOnce(), lengths, invalid="clip").generate()
    assert [r.final_len for r in trace.requests] == [2, 2048, 2048]
    assert (trace.num_dropped, trace.num_clipped) == (0, 1)
    trace = make(Paper(), lengths, request_rate=5.0, duration_s=9, invalid="clip").generate()
    assert {r.final_len for r in trace.requests} == {2, 2047}
    with pytest.raises(
        KvbenchError, match=r"entry 3: prompt 9 \+ output 3000 = 3009 tokens, but the model allows 2048"
    ):
        make(AllAtOnce(), lengths, invalid="error").generate()
    with pytest.raises(KvbenchError, match="the model allows 2047"):
        make(Paper(), lengths, request_rate=5.0, duration_s=9, invalid="error").generate()


MISTAKES: list[tuple[Arrivals, dict[str, Any], str]] = [
    (Paper(), {"request_rate": 0, "duration_s": 1}, r"workload\.request_rate=0 is not possible"),
    (Paper(), {"request_rate": -1.5, "duration_s": 1}, r"workload\.request_rate=-1\.5 is not possible"),
    (Paper(), {"request_rate": math.nan, "duration_s": 1}, r"workload\.request_rate=nan is not possible"),
    (Paper(), {"request_rate": math.inf, "duration_s": 1}, r"workload\.request_rate=inf is not possible"),
    (Paper(), {"request_rate": "fast", "duration_s": 1}, r"workload\.request_rate=fast is not possible"),
    (Paper(), {"request_rate": True, "duration_s": 1}, r"workload\.request_rate=True is not possible"),
    (Poisson(), {"request_rate": 1, "duration_s": 0}, r"workload\.duration_s=0 is not possible"),
    (Poisson(), {"request_rate": 1, "duration_s": -5}, r"workload\.duration_s=-5 is not possible"),
    (Poisson(), {"request_rate": 1, "duration_s": 1e9}, r"workload\.duration_s=1000000000\.0 is more than 1000000"),
    (Poisson(), {"request_rate": 1, "num_requests": 0}, r"workload\.num_requests=0 is not possible"),
    (Poisson(), {"request_rate": 1, "num_requests": 1.5}, r"workload\.num_requests=1\.5 is not possible"),
    (Poisson(), {"request_rate": 1, "num_requests": 10**8}, r"workload\.num_requests=100000000 is more than"),
    (Gamma(0), {"request_rate": 1, "duration_s": 9}, r"workload\.arrivals\.cv=0 is not possible"),
    (OnOff(0, 5), {"request_rate": 1, "duration_s": 9}, r"workload\.arrivals\.on_share=0 is not possible"),
    (OnOff(1, 5), {"request_rate": 1, "duration_s": 9}, r"workload\.arrivals\.on_share=1 is never off"),
    (OnOff(0.5, 0.5), {"request_rate": 1, "duration_s": 9}, r"workload\.arrivals\.burst=0\.5 is less than a request"),
    (Gamma(-1), {"request_rate": 1, "duration_s": 9}, r"workload\.arrivals\.cv=-1 is not possible"),
    (Gamma(math.nan), {"request_rate": 1, "duration_s": 9}, r"workload\.arrivals\.cv=nan is not possible"),
    (Paper(), {"duration_s": 9}, r"paper arrivals need a rate; give workload\.request_rate"),
    (Paper(), {"request_rate": 1, "num_requests": 5}, r"need a duration; give workload\.duration_s"),
    (Poisson(), {"duration_s": 9}, "poisson arrivals need a rate"),
    (Gamma(2), {"request_rate": 1}, "gamma arrivals have no end; give workload.duration_s or workload.num_requests"),
    (AllAtOnce(), {"request_rate": 1}, r"have no request_rate; set workload\.request_rate=null"),
    (AllAtOnce(), {"duration_s": 1}, r"have no duration_s; set workload\.duration_s=null"),
    (Paper(), {"request_rate": 1e5, "duration_s": 3600}, "makes more than 10000000 requests"),
    (Poisson(), {"request_rate": 1e5, "duration_s": 3600}, "makes more than 10000000 requests"),
    (Paper(), {"request_rate": 1e-6, "duration_s": 1}, r"no request arrives within workload\.duration_s=1 "),
    (Poisson(), {"request_rate": 1e-6, "duration_s": 1}, r"no request arrives within workload\.duration_s=1 "),
    (Poisson(), {"request_rate": 1, "duration_s": 1, "seed": -1}, r"workload\.seed=-1 is not possible"),
    (Paper(), {"request_rate": 1, "duration_s": 1, "seed": 2**32}, r"workload\.seed=4294967296 is not possible"),
    (Poisson(), {"request_rate": 1, "duration_s": 1, "invalid": "skip"}, r"workload\.invalid=skip is not possible"),
]


@pytest.mark.parametrize(("arrivals", "options", "message"), MISTAKES)
def test_mistakes_are_one_sentence(arrivals: Arrivals, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KvbenchError, match=message) as caught:
        make(arrivals, **options).generate()
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_that_holds_nothing_of_the_data_set() -> None:
    workload = Synthetic("test", Fixed(100, 100), AllAtOnce(), 128, num_requests=1)
    with pytest.raises(KvbenchError, match=r"none of the 1 rows of .* can be served, .* = 200 tokens"):
        workload.generate()


def test_same_seed_same_trace_and_no_global_generator_is_touched() -> None:
    random.seed(5)
    np.random.seed(5)
    options: dict[str, Any] = {"request_rate": 3.0, "duration_s": 60}
    for arrivals in (Paper(), Poisson(), Gamma(2.0)):
        assert rows(make(arrivals, **options)) == rows(make(arrivals, **options))
    touched = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    assert touched == (random.random(), np.random.rand())


def test_an_hour_of_alpaca_takes_well_under_a_second() -> None:
    workload = Synthetic("alpaca", Alpaca("absent"), Paper(), LIMIT, request_rate=30.0, duration_s=3600)
    start = time.process_time()
    assert len(workload.generate().requests) == pytest.approx(108_000, rel=0.01)
    assert time.process_time() - start < 1.0


def test_generating_imports_neither_pandas_nor_hydra() -> None:
    code = """
import sys
from kvbench.workloads import arrivals, download, lengths, synthetic, traces
synthetic.Synthetic("t", lengths.ShareGPT("absent"), arrivals.Paper(), 2048, 1.0, 60).generate()
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pandas", "hydra", "omegaconf", "torch", "transformers", "yaml"} & set(done.stdout.split())


def test_load_is_checked_where_it_is_made() -> None:
    assert Load(1.0, 2.0, 3).num_requests == 3
    with pytest.raises(KvbenchError):
        Load(request_rate=-1)
