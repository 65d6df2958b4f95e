"""How long requests are: the data sets' own pairs where they are at hand, the paper's histograms where not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from kvbench.core import KvbenchError
from kvbench.workloads import histograms
from kvbench.workloads.base import IntArray, one_of, whole
from kvbench.workloads.conversations import read_first_rounds
from kvbench.workloads.files import Signature, digest, is_present, signature
from kvbench.workloads.pickled import read_pickled_pairs
from kvbench.workloads.rows import Column, Rows, from_arrays, read_csv

PairsFrom = Literal["auto", "file", "histogram"]
"""Which pairs: those of a file (an error where it is absent), of the histogram, or of a file if there is one."""
FittedPairsFrom = Literal["auto", "file", "fitted"]
"""The same where no histogram but a fitted distribution can stand in."""

_HISTOGRAM_SEED = 0
"""A drawn data set is a fixed thing, as the real one is; the workload's seed decides which of its pairs arrive when."""


Reader = Callable[[Path], Rows]


class Lengths(Protocol):
    """A data set of pairs (prompt length, output length)."""

    def rows(self) -> Rows:
        """All pairs in the data set's own order, unchecked; raises `KvbenchError` where they cannot be read."""
        ...

    def source(self) -> str:
        """What these pairs are, one phrase for tables and figures."""
        ...

    def inputs(self) -> dict[str, str]:
        """The files read, as in `kvbench.workloads.base.Trace.inputs`."""
        ...


def _read_sharegpt(path: Path) -> Rows:
    return read_csv(path, ("prompt_tokens", "output_tokens"))


def _read_alpaca(path: Path) -> Rows:
    rows = read_csv(path, ("prompt_tokens_gpt2", "output_tokens_gpt2"))
    prompt, output = (Column(part.name, part.values + 1, part.texts) for part in (rows.prompt, rows.output))
    return replace(rows, prompt=prompt, output=output)


def _read_wmt16(path: Path) -> Rows:
    rows = read_csv(path, ("source_tokens", "reference_tokens"))
    source = rows.prompt
    return replace(rows, prompt=Column(source.name, source.values + _ARROW_LEN, source.texts))


_SHAREGPT_TEXT = "ShareGPT_V3_unfiltered_cleaned_split.json"
_SHAREGPT: dict[str, Reader] = {
    "sharegpt_lengths.csv.gz": _read_sharegpt,
    "sharegpt_opt_text_completion_length.pkl": read_pickled_pairs,
}
_ALPACA: dict[str, Reader] = {
    "alpaca_opt_text_completion.pkl": read_pickled_pairs,
    "alpaca_sample_lengths.csv.gz": _read_alpaca,
}
_WMT16: dict[str, Reader] = {"wmt16_en_de_lengths.csv": _read_wmt16}
_ARROW_LEN = 2
"""Tokens that ask for the translation after the source: `` =>`` under Llama's tokenizer."""


@dataclass(slots=True)
class ShareGPT:
    """First rounds of ShareGPT conversations, in tokens of the OPT tokenizer.

    Args:
        data_dir: where to look for, in this order, ``sharegpt_lengths.csv.gz`` (``prompt_tokens,output_tokens``) and
            ``sharegpt_opt_text_completion_length.pkl``, both the 84,226 pairs of the paper's artifact.
        pairs: whether to take a file's pairs or draw 79,731 from the paper's joint histogram.
        tokenizer: folder of a tokenizer; then the text of ``ShareGPT_V3_unfiltered_cleaned_split.json`` is counted.
    """

    data_dir: str | Path
    pairs: PairsFrom = "auto"
    tokenizer: str | Path | None = None

    def rows(self) -> Rows:
        """See `Lengths`."""
        if self.tokenizer is not None:
            return _read_text(signature(self._text()), str(self.tokenizer))
        path = _find(self, _SHAREGPT)
        return _read(_SHAREGPT[path.name], signature(path)) if path else _draw_sharegpt()

    def source(self) -> str:
        """See `Lengths`."""
        if self.tokenizer is not None:
            return f"ShareGPT V3, first rounds, counted with the tokenizer {Path(self.tokenizer).name}"
        if _find(self, _SHAREGPT):
            return "ShareGPT pairs of the authors' artifact"
        return "ShareGPT, drawn from the paper's histogram"

    def inputs(self) -> dict[str, str]:
        """See `Lengths`."""
        if self.tokenizer is not None:
            return {_SHAREGPT_TEXT: digest(self._text())} | _tokenizer_files(Path(self.tokenizer))
        return _inputs(self, _SHAREGPT, "the paper's joint histogram")

    def _text(self) -> Path:
        if self.pairs == "histogram":
            raise KvbenchError("a tokenizer has nothing to do where pairs=histogram; leave one of them out")
        path = Path(self.data_dir) / _SHAREGPT_TEXT
        if not is_present(path):
            raise KvbenchError(
                f"{path} does not exist, which the tokenizer is for; fetch it or leave the tokenizer out"
            )
        return path


@dataclass(slots=True)
class Alpaca:
    """Instructions and answers of Alpaca, in tokens of the OPT tokenizer with its BOS.

    Args:
        data_dir: where to look for, in this order, the artifact's ``alpaca_opt_text_completion.pkl`` (52,002 pairs) and
            ``alpaca_sample_lengths.csv.gz``, a sample of 9,229 with columns ``prompt_tokens_gpt2,output_tokens_gpt2``:
            GPT-2's vocabulary is OPT's, which puts one BOS before every text, so an empty output is 1 token.
        pairs: whether to take a file's pairs or draw 52,002 from the paper's two histograms, paired at random.
    """

    data_dir: str | Path
    pairs: PairsFrom = "auto"

    def rows(self) -> Rows:
        """See `Lengths`."""
        path = _find(self, _ALPACA)
        return _read(_ALPACA[path.name], signature(path)) if path else _draw_alpaca()

    def source(self) -> str:
        """See `Lengths`."""
        path = _find(self, _ALPACA)
        if path is None:
            return "Alpaca, drawn from the paper's two histograms, paired at random"
        if path.suffix == ".pkl":
            return "Alpaca pairs of the authors' artifact"
        return "Alpaca, a sample of its pairs"

    def inputs(self) -> dict[str, str]:
        """See `Lengths`."""
        return _inputs(self, _ALPACA, "the paper's two histograms, paired at random")


@dataclass(slots=True)
class WMT16:
    """English sentences of newstest2016 and their German references, in Llama-2 tokens: translation on request.

    A prompt is the source with the two tokens that ask for the translation; instructions and examples before it are a
    prefix that all requests share (``workload.prefix_len``). As long as the reference is the output.

    Args:
        data_dir: where to look for ``wmt16_en_de_lengths.csv``, 2,999 rows ``source_tokens,reference_tokens``.
        pairs: whether to take the file's pairs or draw as many from log-normal distributions with their moments: of the
            source, and of reference over source.
    """

    data_dir: str | Path
    pairs: FittedPairsFrom = "auto"

    def rows(self) -> Rows:
        """See `Lengths`."""
        path = _find(self, _WMT16, "fitted")
        return _read(_WMT16[path.name], signature(path)) if path else _draw_wmt16()

    def source(self) -> str:
        """See `Lengths`."""
        return "WMT16 English-German" + ("" if _find(self, _WMT16, "fitted") else ", drawn from log-normal fits")

    def inputs(self) -> dict[str, str]:
        """See `Lengths`."""
        return _inputs(self, _WMT16, "log-normal fits", "fitted")


@dataclass(slots=True)
class Fixed:
    """Every request alike: ``prompt_len`` and ``output_len`` tokens."""

    prompt_len: int
    output_len: int

    def rows(self) -> Rows:
        """See `Lengths`; a data set of one pair."""
        prompt_len = whole("lengths.prompt_len", self.prompt_len, least=1)
        output_len = whole("lengths.output_len", self.output_len, least=1)
        return from_arrays(self.source(), np.array([prompt_len]), np.array([output_len]))

    def source(self) -> str:
        """See `Lengths`."""
        return f"invented: {self.prompt_len} prompt and {self.output_len} output tokens each"

    def inputs(self) -> dict[str, str]:
        """See `Lengths`; none."""
        return {}


@dataclass(slots=True)
class Scaled:
    """Another data set with every length multiplied, for models and machines smaller than those it was made for.

    Args:
        lengths: the data set.
        factor: above 0; products are rounded up, so a length of 1 or more never becomes 0.
    """

    lengths: Lengths
    factor: float

    def rows(self) -> Rows:
        """See `Lengths`; raises `KvbenchError` where the factor is not a positive number, too."""
        if not 0 < self.factor < math.inf:
            raise KvbenchError(f"workload.lengths.factor={self.factor} is not possible; give a number above 0")
        rows = self.lengths.rows()
        prompt, output = (
            replace(part, values=np.ceil(part.values * self.factor)) for part in (rows.prompt, rows.output)
        )
        return replace(rows, prompt=prompt, output=output)

    def source(self) -> str:
        """See `Lengths`."""
        return f"{self.lengths.source()}, lengths times {self.factor:g}"

    def inputs(self) -> dict[str, str]:
        """See `Lengths`; those of the data set."""
        return self.lengths.inputs()


def _find(lengths: ShareGPT | Alpaca | WMT16, files: dict[str, Reader], stand_in: str = "histogram") -> Path | None:
    """The first of the files that is there, None where something stands in for them."""
    one_of("lengths.pairs", lengths.pairs, ("auto", "file", stand_in))
    if lengths.pairs == stand_in:
        return None
    folder = Path(lengths.data_dir)
    for name in files:
        if is_present(folder / name):
            return folder / name
    if lengths.pairs == "file":
        name = "the paper's histogram" if stand_in == "histogram" else "a fitted distribution"
        raise KvbenchError(
            f"none of {', '.join(files)} is in data_dir={folder}; fetch it with `make data` where it is public, or let "
            f"{name} stand in with workload.lengths.pairs=auto"
        )
    return None


def _inputs(
    lengths: ShareGPT | Alpaca | WMT16, files: dict[str, Reader], said: str, stand_in: str = "histogram"
) -> dict[str, str]:
    path = _find(lengths, files, stand_in)
    if path is not None:
        return {path.name: digest(path)}
    if lengths.pairs == stand_in:
        return {}
    return dict.fromkeys(files, f"absent: {said}")


def _tokenizer_files(folder: Path) -> dict[str, str]:
    kinds = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "spiece*")
    found = sorted({path for kind in kinds for path in folder.glob(kind) if path.is_file()})
    if not found:
        raise KvbenchError(f"the tokenizer {folder} is not a folder with tokenizer.json or vocab.json in it")
    return {f"{folder.name}/{path.name}": digest(path) for path in found}


@lru_cache(maxsize=4)
def _read(reader: Reader, of: Signature) -> Rows:
    """A file's pairs; kept, since every point of a sweep wants them."""
    return reader(Path(of[0]))


@lru_cache(maxsize=1)
def _read_text(of: Signature, tokenizer: str) -> Rows:
    return read_first_rounds(Path(of[0]), Path(tokenizer))


@lru_cache(maxsize=1)
def _draw_sharegpt() -> Rows:
    prompt, output = histograms.SHAREGPT_JOINT.draw(np.random.default_rng(_HISTOGRAM_SEED))
    return from_arrays("ShareGPT's histogram", prompt, output)


@lru_cache(maxsize=1)
def _draw_alpaca() -> Rows:
    rng = np.random.default_rng(_HISTOGRAM_SEED)
    prompt: IntArray = histograms.ALPACA_PROMPT.draw(rng)
    return from_arrays("Alpaca's histograms", prompt, histograms.ALPACA_OUTPUT.draw(rng))


@lru_cache(maxsize=1)
def _draw_wmt16() -> Rows:
    rng = np.random.default_rng(_HISTOGRAM_SEED)
    num_pairs = 2_999
    source = rng.lognormal(3.157, 0.569, num_pairs)  # moments of the logarithms of newstest2016's pairs
    reference = source * rng.lognormal(0.279, 0.173, num_pairs)
    prompt_len, output_len = (np.maximum(np.rint(each), 1).astype(np.int64) for each in (source, reference))
    return from_arrays("fits to WMT16", prompt_len + _ARROW_LEN, output_len)
