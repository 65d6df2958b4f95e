"""What a workload is, and the checks of its options that all workloads share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvbench import instantiate
from kvbench.core import KvbenchError, Request

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_REQUESTS = 10_000_000
"""More requests than this are taken for a slip in a rate or a duration (a request takes about 200 bytes)."""

MAX_DURATION_S = 1_000_000
"""Longer than this (11 days) is a slip too."""

Invalid = Literal["error", "drop", "clip"]
"""What to do with rows that cannot be served as they stand; `kvbench.workloads.validity` has the rules."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of one run.

    Attributes:
        requests: in order of arrival, ``id`` counting from 0.
        source: where the lengths come from, one phrase for tables and figures.
        num_dropped: rows of the source that were left out because they were invalid or too long.
        num_clipped: rows of the source that were repaired (``invalid=clip``).
        inputs: file name -> ``sha256:<hex>``, or ``absent: <what stood in>``.
    """

    requests: list[Request]
    source: str
    num_dropped: int
    num_clipped: int
    inputs: dict[str, str]


class Workload(Protocol):
    """A recipe for a trace; the same recipe gives the same trace."""

    def generate(self) -> Trace:
        """The trace; raises `KvbenchError` for options or files that give none."""
        ...

    def inputs(self) -> dict[str, str]:
        """`Trace.inputs` without generating anything: part of what identifies a result."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """How much arrives: a rate (requests/s), for how long (s), at most how many requests; None where not asked for.

    Raises:
        KvbenchError: an option is not a positive finite number, or not a whole number of requests.
    """

    request_rate: float | None = None
    duration_s: float | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        if self.request_rate is not None:
            positive("request_rate", self.request_rate)
        if self.duration_s is not None:
            positive("duration_s", self.duration_s)
            if self.duration_s > MAX_DURATION_S:
                raise KvbenchError(f"workload.duration_s={self.duration_s} is more than {MAX_DURATION_S}, the limit")
        if self.num_requests is not None:
            whole("num_requests", self.num_requests, least=1)
            if self.num_requests > MAX_REQUESTS:
                raise KvbenchError(f"workload.num_requests={self.num_requests} is more than {MAX_REQUESTS}, the limit")


def positive(option: str, value: object) -> float:
    """The value as a float; raises `KvbenchError` unless it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise KvbenchError(f"workload.{option}={value} is not possible; give a finite number greater than 0")
    return float(value)


def whole(option: str, value: object, least: int) -> int:
    """The value as an int; raises `KvbenchError` unless it is a whole number of at least ``least``."""
    return instantiate.whole(f"workload.{option}", value, least)


def one_of(option: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises `KvbenchError` unless the value is one of those allowed."""
    if value not in allowed:
        raise KvbenchError(f"workload.{option}={value} is not possible; give one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class Decoding:
    """How many outputs a request has.

    Attributes:
        num_samples: parallel samples.
        beam_width: beams of one search; not with samples.

    Raises:
        KvbenchError: one of them below 1, or both above.
    """

    num_samples: int = 1
    beam_width: int = 1

    def __post_init__(self) -> None:
        samples, width = whole("num_samples", self.num_samples, 1), whole("beam_width", self.beam_width, 1)
        if samples > 1 and width > 1:
            raise KvbenchError(
                f"workload.num_samples={samples} with workload.beam_width={width}: a request has samples or beams; "
                "leave one at 1"
            )

    @property
    def name(self) -> str:
        """For tables."""
        return "parallel" if self.num_samples > 1 else "beam" if self.beam_width > 1 else "single"


def check_seed(seed: int) -> None:
    """Refuse a seed that some generator cannot have. Raises KvbenchError."""
    if whole("seed", seed, least=0) >= 2**32:
        raise KvbenchError(f"workload.seed={seed} is not possible; give a whole number below 2**32")


def to_requests(
    arrival_s: FloatArray,
    prompt_len: IntArray,
    output_len: IntArray,
    decoding: Decoding | None = None,
    prefix_len: int = 0,
) -> list[Request]:
    """One request per element of three arrays of equal length; arrivals ascend.

    Every prompt begins with the same ``prefix_len`` tokens, which its length includes.
    """
    columns = (arrival_s.tolist(), prompt_len.tolist(), output_len.tolist())
    requests = list(map(Request, range(len(arrival_s)), *columns))
    if decoding is not None and decoding.name != "single":
        for request in requests:
            request.num_seqs = max(decoding.num_samples, decoding.beam_width)
            request.is_beam = decoding.beam_width > 1
    if prefix_len:
        for request in requests:
            request.prefix_len = prefix_len
    return requests
