"""Conversations: how long their turns are, and the rounds of query and answer that they make."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from kvbench.core import KvbenchError
from kvbench.workloads.base import IntArray
from kvbench.workloads.files import Signature, digest, is_present, open_text, signature

FILE = "sharegpt_turn_lengths.csv.gz"
COLUMNS = ("conversation", "role", "tokens_gpt2", "tokens_llama2")
CUT_LEN = 1_900
"""Llama-2 tokens from which on a piece is taken for cut: the file's conversations were cut at about 2,048."""
_HUMANS = frozenset({"human", "user"})
_MODELS = frozenset({"gpt", "chatgpt", "bing", "bard"})
_JOIN_SEED = 0
"""A rejoined data set is a fixed thing, as a real one is; the workload's seed decides what of it arrives when."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of conversations, those of one conversation in order and next to each other.

    Attributes:
        conversation: number of each round's conversation, from 0 without gaps.
        prompt_len: tokens of everything said before in the conversation, and of the query.
        output_len: tokens of the answer.
        num_dropped: pieces of the file that were left out.
    """

    conversation: IntArray
    prompt_len: IntArray
    output_len: IntArray
    num_dropped: int = 0


class Conversations(Protocol):
    """A data set of conversations."""

    def rounds(self) -> Rounds:
        """All of them, in the data set's own order; raises `KvbenchError` where they cannot be read."""
        ...

    def source(self) -> str:
        """What they are, one phrase for tables and figures."""
        ...

    def inputs(self) -> dict[str, str]:
        """The files read, as in `kvbench.workloads.base.Trace.inputs`."""
        ...


class Piece(NamedTuple):
    """Part of a conversation in which human and model take turns.

    Attributes:
        by_human: whether the first turn is a human's.
        turn_lens: tokens of each turn.
        is_cut: whether the conversation probably went on.
    """

    by_human: bool
    turn_lens: list[int]
    is_cut: bool

    @property
    def next_by_human(self) -> bool:
        """Whether a human's turn would come next."""
        return self.by_human == (len(self.turn_lens) % 2 == 0)


@dataclass(slots=True)
class ShareGPTTurns:
    """Conversations of ShareGPT V3, put together again from the pieces into which they were cut.

    The published file has pieces of about 2,048 Llama-2 tokens in random order. So a piece that a human begins begins a
    conversation here, and as long as its last piece is about as long as that, another follows, drawn among those whose
    first turn continues the alternation: right in the mean, though the pieces do not belong together. Pieces in which
    human and model do not take turns are left out.

    Args:
        data_dir: where to look for ``sharegpt_turn_lengths.csv.gz``, a row for each turn:
            ``conversation,role,tokens_gpt2,tokens_llama2`` (further columns are ignored). GPT-2's vocabulary is OPT's,
            which puts one BOS before every turn.
    """

    data_dir: str | Path

    def rounds(self) -> Rounds:
        """See `Conversations`."""
        return _rejoined(signature(self._path()))

    def source(self) -> str:
        """See `Conversations`."""
        return "ShareGPT V3 conversations, rejoined from pieces"

    def inputs(self) -> dict[str, str]:
        """See `Conversations`."""
        return {FILE: digest(self._path())}

    def _path(self) -> Path:
        path = Path(self.data_dir) / FILE
        if not is_present(path):
            raise KvbenchError(
                f"{path} does not exist, and nothing can stand in for it: count the turns of ShareGPT V3 "
                f"(`make data` has the text) with GPT-2's and Llama-2's tokenizers into the columns {','.join(COLUMNS)}"
            )
        return path


@lru_cache(maxsize=1)
def _rejoined(of: Signature) -> Rounds:
    pieces, num_dropped = read_pieces(Path(of[0]))
    conversations = list(rejoin(pieces, np.random.default_rng(_JOIN_SEED)))
    if not conversations:
        raise KvbenchError(f"{of[0]} has no piece with a human's turn and a model's answer; fetch or copy it again")
    said = [np.cumsum(turn_lens) for turn_lens in conversations]
    return Rounds(
        np.repeat(np.arange(len(said)), [len(each) // 2 for each in said]),
        np.concatenate([each[: len(each) // 2 * 2 : 2] for each in said]),
        np.concatenate([np.array(turn_lens[1::2]) for turn_lens in conversations]),
        num_dropped,
    )


def rejoin(pieces: list[Piece], rng: np.random.Generator) -> Iterator[list[int]]:
    """Lengths of the turns of one conversation for each piece that a human begins, if it has a round at least.

    Of the pieces, one that is needed again is used again.
    """
    pools = {by_human: [piece for piece in pieces if piece.by_human is by_human] for by_human in (True, False)}
    for first in pools[True]:
        turn_lens = list(first.turn_lens)
        last = first
        for _ in pieces:  # a file of cut pieces only would go on for ever
            pool = pools[last.next_by_human]
            if not (last.is_cut and pool):
                break
            last = pool[rng.integers(len(pool))]
            turn_lens += last.turn_lens
        if len(turn_lens) > 1:
            yield turn_lens


def read_pieces(path: Path) -> tuple[list[Piece], int]:
    """The pieces of a file in which human and model take turns, and how many there are of the others.

    Raises:
        KvbenchError: unreadable, no such columns, or a count that is none.
    """
    pieces: list[Piece] = []
    num_dropped = 0
    with open_text(path) as file:
        reader = csv.reader(file)
        try:
            header = [name.strip() for name in next(reader, [])]
            if missing := [name for name in COLUMNS if name not in header]:
                raise KvbenchError(f"{path} has no column {', '.join(missing)}; it needs {','.join(COLUMNS)}")
            number, role, gpt2, llama2 = (header.index(name) for name in COLUMNS)
            for _, turns in groupby(filter(None, reader), key=lambda row: row[number]):
                rows = list(turns)
                speakers = [row[role] in _HUMANS for row in rows]
                known = all(row[role] in _HUMANS or row[role] in _MODELS for row in rows)
                if not known or any(before == after for before, after in pairwise(speakers)):
                    num_dropped += 1
                    continue
                lens = [_count(row[gpt2]) + 1 for row in rows]
                pieces.append(Piece(speakers[0], lens, sum(_count(row[llama2]) for row in rows) >= CUT_LEN))
        except (ValueError, IndexError, csv.Error) as error:
            raise KvbenchError(f"{path}, line {reader.line_num}: {error}; fetch or copy the file again") from error
    return pieces, num_dropped


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError(f"{text} tokens are less than none")
    return count
