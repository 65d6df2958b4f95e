"""Workloads made from a data set of lengths and a rule of arrival."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.core import KvbenchError
from kvbench.workloads.arrivals import Arrivals, drawn
from kvbench.workloads.base import Decoding, Invalid, Load, Trace, check_seed, to_requests, whole
from kvbench.workloads.lengths import Lengths
from kvbench.workloads.validity import enforce


@dataclass(slots=True)
class Synthetic:
    """Lengths of one data set, arriving under one rule.

    Args:
        name: what tables call it.
        lengths: the data set.
        arrivals: the rule; it says which of the next three it needs.
        max_model_len: tokens of prompt and output the model can hold together; longer pairs are invalid.
        request_rate: requests/s.
        duration_s: how long requests arrive, in seconds; the run goes on until all are served.
        num_requests: at most so many.
        invalid: what happens to invalid pairs of the data set (`kvbench.workloads.validity`); the trace's counts are
            pairs of the data set, not requests.
        seed: 0 or more; below 2**32.
        num_samples: parallel samples of each request.
        beam_width: beams of each request.
        prefix_len: tokens that stand before every prompt of the data set, the same ones for all requests: instructions
            and examples.
    """

    name: str
    lengths: Lengths
    arrivals: Arrivals
    max_model_len: int
    request_rate: float | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    invalid: Invalid = "drop"
    seed: int = 0
    num_samples: int = 1
    beam_width: int = 1
    prefix_len: int = 0

    def __post_init__(self) -> None:
        """Refuse a load out of range before anything is read. Raises `KvbenchError`."""
        Load(self.request_rate, self.duration_s, self.num_requests)
        Decoding(self.num_samples, self.beam_width)
        check_seed(self.seed)
        most = whole("max_model_len", self.max_model_len, least=2) - self.arrivals.strict - 2
        if whole("prefix_len", self.prefix_len, least=0) > most:
            raise KvbenchError(
                f"workload.prefix_len={self.prefix_len} leaves no room for a prompt and an output in the "
                f"{self.max_model_len} tokens of the model; give {most} or less"
            )

    def generate(self) -> Trace:
        """See `kvbench.workloads.base.Workload`."""
        load = Load(self.request_rate, self.duration_s, self.num_requests)
        decoding = Decoding(self.num_samples, self.beam_width)
        limit = self.max_model_len - self.prefix_len
        pairs = enforce(self.lengths.rows(), self.invalid, limit, self.arrivals.strict)
        arrival_s, chosen = drawn(self.arrivals, load, len(pairs.prompt_len), self.seed)
        prompt_len = self.prefix_len + pairs.prompt_len[chosen]
        return Trace(
            to_requests(arrival_s, prompt_len, pairs.output_len[chosen], decoding, self.prefix_len),
            self.lengths.source(),
            pairs.num_dropped,
            pairs.num_clipped,
            self.inputs(),
        )

    def inputs(self) -> dict[str, str]:
        """See `kvbench.workloads.base.Workload`."""
        return self.lengths.inputs()
