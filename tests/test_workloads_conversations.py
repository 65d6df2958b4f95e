"""Conversations: pieces rejoined, rounds taken and served in turn."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core import KvbenchError
from kvbench.workloads.arrivals import AllAtOnce, Arrivals, Paper, Poisson
from kvbench.workloads.base import Load
from kvbench.workloads.chat import Chat, in_turn, take
from kvbench.workloads.turns import CUT_LEN, FILE, Piece, ShareGPTTurns, read_pieces, rejoin

Turn = tuple[str, int]
"""Role and tokens."""


def write(folder: Path, pieces: list[list[Turn]]) -> ShareGPTTurns:
    """Pieces whose turns are as long under both tokenizers."""
    rows = [f"{i},{t},{role},{n},{n}\n" for i, piece in enumerate(pieces) for t, (role, n) in enumerate(piece)]
    text = "conversation,turn,role,tokens_gpt2,tokens_llama2\n" + "".join(rows)
    (folder / FILE).write_bytes(gzip.compress(text.encode()))
    return ShareGPTTurns(folder)


def chat(conversations: ShareGPTTurns, **options: Any) -> Chat:
    defaults: dict[str, Any] = {"arrivals": AllAtOnce(), "max_model_len": 2048}
    return Chat("chat", conversations, **(defaults | options))


def lens(workload: Chat) -> list[tuple[int, int]]:
    return [(request.prompt_len, request.output_len) for request in workload.generate().requests]


def test_a_prompt_is_the_history_and_the_query(tmp_path: Path) -> None:
    turns = write(tmp_path, [[("human", 9), ("gpt", 19), ("human", 4), ("gpt", 0), ("human", 7)]])
    assert lens(chat(turns)) == [(10, 20), (35, 1)]  # each turn has a BOS more; a query without an answer is no round


def test_the_last_tokens_of_the_history_and_the_first_of_the_answer_are_kept(tmp_path: Path) -> None:
    turns = write(tmp_path, [[("human", 800), ("gpt", 1050), ("human", 2), ("gpt", 3)]])
    assert lens(chat(turns)) == [(801, 1016), (1024, 4)]
    assert lens(chat(turns, max_prompt_len=30, max_output_len=20)) == [(30, 20), (30, 4)]


def test_rounds_that_the_model_cannot_hold_are_dropped_or_refused(tmp_path: Path) -> None:
    turns = write(tmp_path, [[("human", 9), ("gpt", 89), ("human", 9), ("gpt", 9)], [("human", 1), ("gpt", 1)]])
    trace = chat(turns, max_model_len=100).generate()
    assert sorted((r.prompt_len, r.output_len) for r in trace.requests) == [(2, 2), (10, 90)]
    assert trace.num_dropped == 1
    with pytest.raises(KvbenchError, match="= 120 tokens, but the model allows 100"):
        chat(turns, max_model_len=100, invalid="error").generate()
    assert sorted(lens(chat(turns, max_model_len=115, invalid="clip"))) == [(2, 2), (10, 90), (110, 5)]


def piece(by_human: bool, *turn_lens: int, cut: bool = False) -> Piece:
    return Piece(by_human, list(turn_lens), cut)


def test_a_cut_piece_goes_on_with_one_whose_first_turn_continues_the_alternation() -> None:
    pieces = [piece(True, 1, 2, cut=True), piece(True, 3, cut=True), piece(False, 4, 5, 6), piece(False, 7, 8)]
    for seed in range(20):
        first, second = rejoin(pieces, np.random.default_rng(seed))
        # After an answer only a human's turn can come, after a query only an answer.
        assert first[:2] == [1, 2]
        assert first[2] in (1, 3)
        assert second[0] == 3
        assert tuple(second[1:]) in ((4, 5, 6), (7, 8))


def test_a_piece_that_was_not_cut_ends_its_conversation() -> None:
    pieces = [piece(True, 1, 2), piece(False, 3), piece(True, 4, 5, 6, 7)]
    assert list(rejoin(pieces, np.random.default_rng(0))) == [[1, 2], [4, 5, 6, 7]]


def test_a_file_of_cut_pieces_only_comes_to_an_end() -> None:
    (turn_lens,) = rejoin([piece(True, 1, 2, cut=True)], np.random.default_rng(0))
    assert turn_lens == [1, 2, 1, 2]


def test_a_question_that_nothing_answers_is_no_conversation() -> None:
    assert list(rejoin([piece(True, 1), piece(True, 2, cut=True)], np.random.default_rng(0))) == []


def test_how_pieces_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            [("human", CUT_LEN - 6), ("gpt", 5)],
            [("user", CUT_LEN - 5), ("chatgpt", 5)],
            [("system", 5), ("human", 5), ("gpt", 5)],
            [("human", 5), ("human", 5), ("gpt", 5)],
            [("gpt", 5), ("human", 5)],
        ],
    )
    pieces, num_dropped = read_pieces(tmp_path / FILE)
    assert num_dropped == 2
    assert pieces == [piece(True, CUT_LEN - 5, 6), piece(True, CUT_LEN - 4, 6, cut=True), piece(False, 6, 6)]
    assert [each.next_by_human for each in pieces] == [True, True, False]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("0,0,human,x,1", "line 2: invalid literal"),
        ("0,0,human,1,", "line 2: invalid literal"),
        ("0,0,human,-1,1", "line 2: -1 tokens are less than none"),
        ("0,0,human", "line 2: "),
        ("0,0,gpt,1,1", "no piece with a human's turn"),
        ("", "no piece with a human's turn"),
    ],
)
def test_a_broken_file_is_one_sentence(row: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(f"conversation,turn,role,tokens_gpt2,tokens_llama2\n{row}\n")
    with pytest.raises(KvbenchError, match=complaint) as caught:
        ShareGPTTurns(tmp_path).rounds()
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    for use in (ShareGPTTurns(tmp_path).rounds, ShareGPTTurns(tmp_path).inputs):
        with pytest.raises(KvbenchError, match=f"{FILE} does not exist, and nothing can stand in for it"):
            use()
    (tmp_path / FILE).write_text("conversation,turn,role\n")
    with pytest.raises(KvbenchError, match="has no column tokens_gpt2, tokens_llama2"):
        ShareGPTTurns(tmp_path).rounds()


CONVERSATIONS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@given(CONVERSATIONS, st.integers(1, 60), st.integers(0, 9))
def test_conversations_are_taken_until_they_have_as_many_rounds_as_arrive(
    num_rounds: list[int], wanted: int, seed: int
) -> None:
    conversation = np.repeat(np.arange(len(num_rounds)), num_rounds)
    taken = take(conversation, wanted, seed)
    assert sum(map(len, taken)) == wanted
    starts = (np.cumsum(num_rounds) - num_rounds).tolist()
    for each in taken:
        assert len(each) == num_rounds[starts.index(each.start)] or each is taken[-1]
    assert len({each.start for each in taken[: len(num_rounds)]}) == min(len(taken), len(num_rounds))
    more = take(conversation, wanted + 5, seed)
    assert [each.start for each in more[: len(taken)]] == [each.start for each in taken]


@given(CONVERSATIONS, st.floats(0, 1), st.integers(0, 9))
def test_rounds_come_once_and_in_the_order_of_their_conversation(num_rounds: list[int], prob: float, seed: int) -> None:
    ends = np.cumsum(num_rounds).tolist()
    conversations = [range(end - n, end) for n, end in zip(num_rounds, ends, strict=True)]
    order = in_turn(conversations, prob, seed).tolist()
    assert sorted(order) == list(range(ends[-1]))
    for each in conversations:
        assert [i for i in order if i in each] == list(each)


def test_a_small_probability_brings_long_histories_early() -> None:
    conversations = [range(10 * i, 10 * i + 10) for i in range(200)]
    depth = {
        prob: np.mean([in_turn(conversations, prob, seed)[:500] % 10 for seed in range(5)]) for prob in (0.0, 0.1, 0.5)
    }
    assert depth[0.5] < 1.4  # of 500 rounds about half are first ones
    assert depth[0.1] == pytest.approx(4.5, abs=0.6)  # about in balance
    assert depth[0.0] == pytest.approx(4.5, abs=0.1)
    assert in_turn(conversations[:3], 0.0, 0).tolist()[:10] in [list(each) for each in conversations[:3]]


def test_the_probability_changes_the_order_alone(tmp_path: Path) -> None:
    turns = write(tmp_path, [[("human", 10 * i), ("gpt", i), ("human", i), ("gpt", 2 * i)] for i in range(1, 30)])
    load: dict[str, Any] = {"arrivals": Paper(), "request_rate": 2.0, "duration_s": 20.0}
    often, seldom = (lens(chat(turns, new_conversation_prob=p, **load)) for p in (0.5, 0.1))
    assert often != seldom
    assert sorted(often) == sorted(seldom)
    assert lens(chat(turns, new_conversation_prob=0.5, **load)) == often
    assert sorted(lens(chat(turns, seed=1, **load))) != sorted(often)


def test_arrivals_are_those_of_the_rule(tmp_path: Path) -> None:
    turns = write(tmp_path, [[("human", 9), ("gpt", 19)], [("human", 9), ("gpt", 19), ("human", 9), ("gpt", 19)]])
    rules: list[Arrivals] = [Paper(), Poisson()]
    for rule in rules:
        workload = chat(turns, arrivals=rule, request_rate=5.0, duration_s=20.0, seed=3)
        expected, _ = rule.draw(Load(workload.request_rate, workload.duration_s), 1, 3)
        requests = workload.generate().requests
        assert [request.arrival_s for request in requests] == expected.tolist()
        assert [request.id for request in requests] == list(range(len(expected)))
    with pytest.raises(KvbenchError, match="no request arrives within"):
        chat(turns, arrivals=Paper(), request_rate=1e-6, duration_s=1.0).generate()


def test_a_trace_says_where_it_comes_from(tmp_path: Path) -> None:
    turns = write(tmp_path, [[("human", 9), ("gpt", 19)], [("system", 1), ("gpt", 19)]])
    trace = chat(turns, num_samples=2).generate()
    assert trace.source == "ShareGPT V3 conversations, rejoined from pieces"
    assert list(trace.inputs) == [FILE]
    assert trace.inputs[FILE].startswith("sha256:")
    assert (trace.num_dropped, trace.num_clipped) == (1, 0)
    assert [request.num_seqs for request in trace.requests] == [2]


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("new_conversation_prob", 1.5, "is no probability; give 0 to 1"),
        ("new_conversation_prob", float("nan"), "is no probability"),
        ("max_prompt_len", 0, "is not possible"),
        ("max_output_len", 0, "is not possible"),
        ("seed", -1, "is not possible"),
        ("seed", 2**32, "is not possible"),
        ("num_samples", 0, "is not possible"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_read(option: str, value: Any, complaint: str) -> None:
    with pytest.raises(KvbenchError, match=rf"workload\.{option}={value} {complaint}"):
        chat(ShareGPTTurns("nowhere"), **{option: value})


def test_sharegpt_rejoined_has_the_prompts_of_whole_conversations(data_file: Callable[[str], Path]) -> None:
    rounds = ShareGPTTurns(data_file(FILE).parent).rounds()
    prompt_len = np.minimum(rounds.prompt_len, 1024)
    assert len(prompt_len) > 60_000
    assert prompt_len.mean() == pytest.approx(751, abs=8)  # 568 in the pieces as they are
    assert (prompt_len == 1024).mean() == pytest.approx(0.59, abs=0.02)  # 0.30
    assert rounds.num_dropped < 200
    assert (np.diff(rounds.conversation) >= 0).all()
    assert (rounds.prompt_len >= 1).all()
    assert (rounds.output_len >= 1).all()
