"""Requests that share a prefix: WMT16 and any other data set with ``prefix_len``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvbench.core import KvbenchError
from kvbench.workloads.arrivals import AllAtOnce, Paper
from kvbench.workloads.lengths import WMT16, Fixed
from kvbench.workloads.synthetic import Synthetic

NAME = "wmt16_en_de_lengths.csv"


def workload(prefix_len: int, max_model_len: int = 2048, **more: object) -> Synthetic:
    options = {"lengths": Fixed(7, 5), "arrivals": AllAtOnce(), "num_requests": 3} | more
    return Synthetic("x", max_model_len=max_model_len, prefix_len=prefix_len, **options)  # type: ignore[arg-type]


def test_the_prefix_is_part_of_the_prompt() -> None:
    for prefix_len in (0, 80):
        requests = workload(prefix_len).generate().requests
        assert [(r.prefix_len, r.prompt_len, r.output_len) for r in requests] == [(prefix_len, prefix_len + 7, 5)] * 3


def test_samples_share_the_prefix_too() -> None:
    (first, *_) = workload(80, num_samples=4).generate().requests
    assert (first.num_seqs, first.prefix_len) == (4, 80)


def test_a_longer_prefix_changes_nothing_else() -> None:
    one, five = (
        Synthetic("wmt16", WMT16("nowhere"), Paper(), 2048, 5.0, 60.0, prefix_len=prefix_len).generate()
        for prefix_len in (80, 341)
    )
    assert len(one.requests) > 100
    for short, long in zip(one.requests, five.requests, strict=True):
        assert long.prompt_len - short.prompt_len == 341 - 80
        assert (long.arrival_s, long.output_len) == (short.arrival_s, short.output_len)


def test_with_its_prefix_a_pair_may_not_fit_any_more() -> None:
    assert len(workload(8, max_model_len=20).generate().requests) == 3
    with pytest.raises(KvbenchError, match="none of the 1 rows"):
        workload(9, max_model_len=20).generate()


@pytest.mark.parametrize("prefix_len", [-1, 1.5, True])
def test_a_prefix_that_is_no_length_is_refused(prefix_len: int) -> None:
    with pytest.raises(KvbenchError, match=rf"workload\.prefix_len={prefix_len} is not possible"):
        workload(prefix_len)


def test_a_prefix_that_fills_the_model_is_refused() -> None:
    workload(18, max_model_len=20)
    with pytest.raises(KvbenchError, match=r"prefix_len=19 leaves no room .* 20 tokens of the model; give 18 or less"):
        workload(19, max_model_len=20)
    with pytest.raises(KvbenchError, match="give 17 or less"):
        workload(18, max_model_len=20, arrivals=Paper())  # which must stay below the limit


def test_the_sentences_get_the_tokens_that_ask_for_the_translation(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("source_tokens,reference_tokens\n6,9\n14,20\n")
    wmt16 = WMT16(tmp_path)
    rows = wmt16.rows()
    assert rows.prompt.values.tolist() == [8, 16]
    assert rows.output.values.tolist() == [9, 20]
    assert wmt16.source() == "WMT16 English-German"
    assert list(wmt16.inputs()) == [NAME]
    assert WMT16(tmp_path, pairs="fitted").inputs() == {}


def test_newstest2016(data_file: Callable[[str], Path]) -> None:
    rows = WMT16(data_file(NAME).parent, pairs="file").rows()
    assert len(rows) == 2_999
    assert round(float(rows.prompt.values.mean()), 2) == 29.32
    assert round(float(rows.output.values.mean()), 2) == 36.29


def test_the_stand_in_is_like_newstest2016(data_file: Callable[[str], Path]) -> None:
    real, drawn = (WMT16(data_file(NAME).parent, pairs=pairs).rows() for pairs in ("file", "fitted"))  # type: ignore[arg-type]
    assert len(real) == len(drawn)
    for ours, theirs in ((drawn.prompt.values, real.prompt.values), (drawn.output.values, real.output.values)):
        assert ours.mean() == pytest.approx(theirs.mean(), rel=0.05)
        for percent in (10, 50, 90):
            assert np.percentile(ours, percent) == pytest.approx(np.percentile(theirs, percent), rel=0.1)


def test_without_the_file_a_fit_stands_in_and_says_so(tmp_path: Path) -> None:
    wmt16 = WMT16(tmp_path)
    rows = wmt16.rows()
    assert len(rows) == 2_999
    assert rows.prompt.values.min() > 2
    assert rows.output.values.min() >= 1
    assert wmt16.source() == "WMT16 English-German, drawn from log-normal fits"
    assert wmt16.inputs() == {NAME: "absent: log-normal fits"}
    with pytest.raises(KvbenchError, match=rf"none of {NAME} is in data_dir=.*a fitted distribution stand in"):
        WMT16(tmp_path, pairs="file").rows()
    with pytest.raises(KvbenchError, match=r"lengths\.pairs=histogram is not possible; give one of auto, file, fitted"):
        WMT16(tmp_path, pairs="histogram").rows()  # type: ignore[arg-type]
