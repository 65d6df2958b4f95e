"""Lengths: the real pairs where they are, the paper's histograms where not, and files that must not be trusted."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvbench.core import KvbenchError
from kvbench.workloads import histograms, lengths
from kvbench.workloads.base import IntArray
from kvbench.workloads.lengths import Alpaca, Fixed, Scaled, ShareGPT
from kvbench.workloads.pickled import read_pickled_pairs
from kvbench.workloads.validity import enforce

LIMIT = 2048
PICKLE = "sharegpt_opt_text_completion_length.pkl"


def drawn(kind: type[ShareGPT] | type[Alpaca]) -> tuple[IntArray, IntArray]:
    rows = kind("nowhere", pairs="histogram").rows()
    return rows.prompt.values.astype(np.int64), rows.output.values.astype(np.int64)


def test_the_joint_histogram_is_the_papers() -> None:
    joint = histograms.SHAREGPT_JOINT
    assert joint.counts.shape == (41, 41)
    assert len(joint.edges) == 42
    assert joint.counts.sum() == 79_731
    assert histograms.SHAREGPT_PROMPT.counts.sum() == 79_731
    assert histograms.SHAREGPT_OUTPUT.counts.sum() == 79_731
    # The fourth output bin of the marginal ends at 63.75, so both know how many outputs are below 64.
    assert joint.counts[:, : list(joint.edges).index(64)].sum() == histograms.SHAREGPT_OUTPUT.counts[:4].sum()


def test_pairs_drawn_from_the_joint_histogram_have_its_counts_exactly() -> None:
    joint = histograms.SHAREGPT_JOINT
    prompt, output = drawn(ShareGPT)
    assert (np.histogram2d(prompt, output, bins=(joint.edges, joint.edges))[0] == joint.counts).all()
    assert (prompt + output).max() <= LIMIT
    assert prompt.min() >= 1
    assert output.min() >= 1


def test_pairs_drawn_from_the_joint_histogram_have_the_papers_moments() -> None:
    prompt, output = drawn(ShareGPT)
    assert prompt.mean() == pytest.approx(161.31, rel=0.01)
    assert output.mean() == pytest.approx(337.99, rel=0.01)
    assert prompt.std() == pytest.approx(299.27, rel=0.02)
    assert output.std() == pytest.approx(283.88, rel=0.02)
    assert np.corrcoef(prompt, output)[0, 1] == pytest.approx(0.041, abs=0.01)


def test_alpacas_marginals_are_the_papers_and_its_pairs_independent() -> None:
    prompt, output = drawn(Alpaca)
    assert len(prompt) == len(output) == 52_002
    for values, histogram in ((prompt, histograms.ALPACA_PROMPT), (output, histograms.ALPACA_OUTPUT)):
        assert (np.histogram(values, bins=histogram.edges)[0] == histogram.counts).all()
    assert prompt.mean() == pytest.approx(19.31, rel=0.005)
    assert output.mean() == pytest.approx(58.45, rel=0.005)
    assert (prompt.min(), output.min()) == (6, 1)
    assert np.corrcoef(prompt, output)[0, 1] == pytest.approx(0, abs=0.02)


def test_what_is_drawn_is_in_no_order() -> None:
    for values in (*drawn(ShareGPT), *drawn(Alpaca)):
        half = len(values) // 2
        assert values[:half].mean() == pytest.approx(values[half:].mean(), rel=0.05)
        assert np.corrcoef(values[:-1], values[1:])[0, 1] == pytest.approx(0, abs=0.02)


def test_the_papers_pairs(data_file: Callable[[str], Path]) -> None:
    rows = ShareGPT(data_file("sharegpt_lengths.csv.gz").parent, pairs="file").rows()
    assert len(rows) == 84_226
    for strict, count, prompt_mean, output_mean in (
        (True, 79_725, 161.184, 337.997),
        (False, 79_731, 161.310, 337.988),
    ):
        valid = enforce(rows, "drop", LIMIT, strict)
        assert len(valid.prompt_len) == count
        assert valid.num_dropped == 84_226 - count
        assert round(float(valid.prompt_len.mean()), 3) == prompt_mean
        assert round(float(valid.output_len.mean()), 3) == output_mean


def test_the_embedded_histograms_are_those_of_the_papers_pairs(data_file: Callable[[str], Path]) -> None:
    valid = enforce(ShareGPT(data_file("sharegpt_lengths.csv.gz").parent, pairs="file").rows(), "drop", LIMIT)
    joint = histograms.SHAREGPT_JOINT
    counts = np.histogram2d(valid.prompt_len, valid.output_len, bins=(joint.edges, joint.edges))[0]
    assert (counts == joint.counts).all()
    for values, histogram in (
        (valid.prompt_len, histograms.SHAREGPT_PROMPT),
        (valid.output_len, histograms.SHAREGPT_OUTPUT),
    ):
        assert (np.histogram(values, bins=histogram.edges)[0] == histogram.counts).all()


def test_the_alpaca_sample_gets_its_bos(data_file: Callable[[str], Path]) -> None:
    alpaca = Alpaca(data_file("alpaca_sample_lengths.csv.gz").parent)
    rows = alpaca.rows()
    assert len(rows) == 9_229
    assert round(float(rows.prompt.values.mean()), 2) == 18.95
    assert round(float(rows.output.values.mean()), 2) == 58.92
    assert (rows.output.values == 1).sum() >= 4
    assert enforce(rows, "error", LIMIT).num_dropped == 0
    assert alpaca.source() == "Alpaca, a sample of its pairs"
    assert list(alpaca.inputs()) == ["alpaca_sample_lengths.csv.gz"]


def sharegpt_csv(folder: Path, pairs: list[tuple[int, int]]) -> Path:
    path = folder / "sharegpt_lengths.csv.gz"
    text = "prompt_tokens,output_tokens\n" + "".join(f"{p},{o}\n" for p, o in pairs)
    path.write_bytes(gzip.compress(text.encode()))
    return path


def taken(kind: ShareGPT | Alpaca) -> list[tuple[float, float]]:
    rows = kind.rows()
    return list(zip(rows.prompt.values.tolist(), rows.output.values.tolist(), strict=True))


def test_which_pairs_are_taken_is_said(tmp_path: Path) -> None:
    sharegpt = ShareGPT(tmp_path / "absent")
    assert sharegpt.source() == "ShareGPT, drawn from the paper's histogram"
    assert sharegpt.inputs() == {
        "sharegpt_lengths.csv.gz": "absent: the paper's joint histogram",
        PICKLE: "absent: the paper's joint histogram",
    }
    assert len(sharegpt.rows()) == 79_731
    with pytest.raises(KvbenchError, match=r"none of sharegpt_lengths\.csv\.gz, .*pkl is in data_dir=.*absent; .*auto"):
        ShareGPT(tmp_path / "absent", pairs="file").rows()

    (tmp_path / PICKLE).write_bytes(pickle.dumps([(3, 4)]))
    sharegpt = ShareGPT(tmp_path)
    assert list(sharegpt.inputs()) == [PICKLE]
    assert taken(sharegpt) == [(3, 4)]

    path = sharegpt_csv(tmp_path, [(1, 2)])
    assert taken(sharegpt) == taken(ShareGPT(tmp_path, pairs="file")) == [(1, 2)]
    assert sharegpt.source() == "ShareGPT pairs of the authors' artifact"
    assert sharegpt.inputs() == {path.name: f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"}

    sharegpt = ShareGPT(tmp_path, pairs="histogram")
    assert len(sharegpt.rows()) == 79_731
    assert sharegpt.inputs() == {}
    with pytest.raises(KvbenchError, match=r"lengths\.pairs=exact is not possible; give one of auto, file, histogram"):
        ShareGPT(tmp_path, pairs="exact").source()  # type: ignore[arg-type]


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    sharegpt = ShareGPT(tmp_path)
    path = sharegpt_csv(tmp_path, [(1, 2)])
    before = sharegpt.inputs()
    assert taken(sharegpt) == [(1, 2)]
    sharegpt_csv(tmp_path, [(1, 3)])
    os.utime(path, ns=(1, 1))
    assert taken(sharegpt) == [(1, 3)]
    assert sharegpt.inputs() != before


def test_an_unreadable_file_is_no_reason_to_take_the_histogram(tmp_path: Path) -> None:
    (tmp_path / "sharegpt_lengths.csv.gz").write_bytes(b"\x1f\x8bbroken")
    with pytest.raises(KvbenchError, match=r"cannot read .*sharegpt_lengths\.csv\.gz"):
        ShareGPT(tmp_path).rows()
    (tmp_path / "sharegpt_lengths.csv.gz").unlink()
    (tmp_path / "sharegpt_lengths.csv.gz").symlink_to(tmp_path / "gone")
    with pytest.raises(KvbenchError, match="No such file"):
        ShareGPT(tmp_path).rows()


def test_alpacas_pickle_holds_token_ids(tmp_path: Path) -> None:
    (tmp_path / "alpaca_opt_text_completion.pkl").write_bytes(pickle.dumps([([2, 5, 7], [2]), ((2, 8), [2, 9, 1])]))
    alpaca = Alpaca(tmp_path)
    assert taken(alpaca) == [(3, 1), (2, 3)]
    assert alpaca.source() == "Alpaca pairs of the authors' artifact"


def test_fixed_lengths() -> None:
    assert [c.values.tolist() for c in (Fixed(3, 4).rows().prompt, Fixed(3, 4).rows().output)] == [[3], [4]]
    assert Fixed(3, 4).source() == "invented: 3 prompt and 4 output tokens each"
    with pytest.raises(KvbenchError, match=r"workload\.lengths\.output_len=0 is not possible"):
        Fixed(3, 0).rows()


def test_scaled_lengths_are_rounded_up_and_say_so(tmp_path: Path) -> None:
    sharegpt_csv(tmp_path, [(1, 8), (9, 2048), (16, 17)])
    whole = ShareGPT(tmp_path)
    eighth = Scaled(whole, 0.125)
    rows = eighth.rows()
    assert rows.prompt.values.tolist() == [1, 2, 2]
    assert rows.output.values.tolist() == [1, 256, 3]
    assert taken(whole) == [(1, 8), (9, 2048), (16, 17)]  # what is kept for other points is not touched
    assert eighth.source() == "ShareGPT pairs of the authors' artifact, lengths times 0.125"
    assert eighth.inputs() == whole.inputs()
    assert Scaled(Fixed(3, 4), 2).rows().output.values.tolist() == [8]


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan")])
def test_a_factor_that_is_no_positive_number_is_refused(factor: float) -> None:
    with pytest.raises(KvbenchError, match=rf"workload\.lengths\.factor={factor} is not possible"):
        Scaled(Fixed(3, 4), factor).rows()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    pairs = [(i, 70_000 - i) for i in range(1, 2000)]
    (tmp_path / PICKLE).write_bytes(pickle.dumps(pairs, protocol))
    assert taken(ShareGPT(tmp_path)) == pairs


def test_the_pickle_and_the_csv_of_the_paper_are_the_same_pairs(
    data_file: Callable[[str], Path], tmp_path: Path
) -> None:
    from_csv = taken(ShareGPT(data_file("sharegpt_lengths.csv.gz").parent, pairs="file"))
    (tmp_path / PICKLE).write_bytes(pickle.dumps([(int(p), int(o)) for p, o in from_csv], 2))
    assert taken(ShareGPT(tmp_path)) == from_csv


class Evil:
    """Pickles into a call that leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps([(1, 1), Evil(tmp_path / "mark")], protocol)
    (tmp_path / PICKLE).write_bytes(data)
    with pytest.raises(KvbenchError, match=r"is not a pickled list of .*it holds") as caught:
        ShareGPT(tmp_path).rows()
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "mark").exists()
    pickle.loads(data)
    assert (tmp_path / "mark").exists(), "the pickle was harmless, so refusing it proves nothing"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle",
        pickle.dumps([(1, 2)] * 99)[:-20],
        pickle.dumps({"a": 1}),
        pickle.dumps(["ab", "cd"]),
        pickle.dumps([(1, "2")]),
        pickle.dumps([(1, 2, 3)]),
        pickle.dumps([1, 2]),
        pickle.dumps([(1.5, 2)]),
        pickle.dumps([(True, 2)]),
        pickle.dumps([(10**30, 2)]),
        pickle.dumps(np.ones((2, 2))),
        pickle.dumps([]),
        b"\x80\x02\x82\x01.",  # an entry of the extension registry
        b"\x80\x02]r" + struct.pack("<I", 2**32 - 1) + b".",  # a memo of 64 GB
        b"(" * 99,
        b"\x80\x04\x95" + b"\xff" * 8 + b"].",
    ],
)
def test_an_unreadable_pickle_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / PICKLE).write_bytes(data)
    with pytest.raises(KvbenchError, match=PICKLE) as caught:
        read_pickled_pairs(tmp_path / PICKLE)
    assert len(str(caught.value).splitlines()) == 1


TEXT = "ShareGPT_V3_unfiltered_cleaned_split.json"
CONVERSATIONS = [
    {"id": "a", "conversations": [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}, {}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "alone"}]},
    {"id": "d", "conversations": []},
    {"id": "e", "conversations": [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": ""}]},
]


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, and a stand-in for transformers that counts words and a BOS."""
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / TEXT).write_text(json.dumps(CONVERSATIONS))

    def encode(texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[2, *range(len(text.split()))] for text in texts]}

    module: Any = ModuleType("transformers")
    module.AutoTokenizer = SimpleNamespace(from_pretrained=lambda folder, local_files_only: encode)
    monkeypatch.setitem(sys.modules, "transformers", module)
    lengths._read_text.cache_clear()
    return folder


def test_text_is_counted_with_a_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    sharegpt = ShareGPT(tmp_path, tokenizer=tokenizer)
    assert taken(sharegpt) == [(3, 2), (4, 1)]
    assert sharegpt.source() == "ShareGPT V3, first rounds, counted with the tokenizer words"
    assert list(sharegpt.inputs()) == [TEXT, "words/tokenizer.json"]


def test_text_is_not_counted_without_what_it_needs(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KvbenchError, match=f"{TEXT} does not exist"):
        ShareGPT(tmp_path / "absent", tokenizer=tokenizer).rows()
    with pytest.raises(KvbenchError, match="a tokenizer has nothing to do where pairs=histogram"):
        ShareGPT(tmp_path, pairs="histogram", tokenizer=tokenizer).rows()
    with pytest.raises(KvbenchError, match="is not a folder"):
        ShareGPT(tmp_path, tokenizer=tmp_path / "none").rows()
    with pytest.raises(KvbenchError, match="is not a folder"):
        ShareGPT(tmp_path, tokenizer=tmp_path / "none").inputs()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(KvbenchError, match="needs transformers: make install EXTRAS=dev,models"):
        ShareGPT(tmp_path, tokenizer=tokenizer).rows()


@pytest.mark.parametrize("text", ["", "{", "7", "[7]", "[]", '[{"conversations": [{"from": "human", "value": 7}]}]'])
def test_text_that_is_no_sharegpt(tmp_path: Path, tokenizer: Path, text: str) -> None:
    (tmp_path / TEXT).write_text(text)
    with pytest.raises(KvbenchError, match=TEXT):
        ShareGPT(tmp_path, tokenizer=tokenizer).rows()


def test_a_broken_tokenizer_is_one_sentence(tmp_path: Path, tokenizer: Path) -> None:
    def fail(folder: str, local_files_only: bool) -> None:
        raise OSError("bad\nfolder")

    sys.modules["transformers"].AutoTokenizer = SimpleNamespace(from_pretrained=fail)  # type: ignore[attr-defined]
    with pytest.raises(KvbenchError, match=r"no tokenizer could be loaded from .*words: bad$"):
        ShareGPT(tmp_path, tokenizer=tokenizer).rows()
