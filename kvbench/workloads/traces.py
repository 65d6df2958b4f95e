"""Recorded workloads: requests replayed as a file has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from kvbench.core import KvbenchError
from kvbench.workloads.base import Decoding, FloatArray, Invalid, Load, Trace, one_of, positive, to_requests, whole
from kvbench.workloads.files import digest, is_present
from kvbench.workloads.rows import Rows, head, read_csv, read_json_lines
from kvbench.workloads.validity import enforce

ArrivalAs = Literal["seconds", "milliseconds", "timestamps"]
"""How a file states arrivals: numbers since the start of the trace, or dates with a time (UTC)."""


@dataclass(slots=True)
class Replay:
    """The requests of a file.

    Args:
        name: what tables call it.
        path: a CSV file with a header, or one JSON object per line (``*.jsonl``), either of them gzipped or not.
        max_model_len: tokens of prompt and output the model can hold together; longer requests are invalid.
        columns: what the file calls ``arrival``, ``prompt`` and ``output``; by default just so.
        arrival_as: how it states arrivals; those of ``timestamps`` count from the first.
        bucket_s: where arrivals were rounded to multiples of this, they are spread evenly at random over the bucket.
        request_rate: stretch or squeeze time so that this is the mean rate (requests/s); None keeps the recorded one.
        duration_s: keep what arrives before this, in seconds, after stretching.
        num_requests: keep at most so many, from the start.
        invalid: what happens to invalid rows (`kvbench.workloads.validity`).
        seed: for spreading; 0 or more.
        title: one phrase for tables and figures; the file's name where None.
        num_samples: parallel samples of each request.
        beam_width: beams of each request.
    """

    name: str
    path: str | Path | None
    max_model_len: int
    columns: Mapping[str, str] | None = None
    arrival_as: ArrivalAs = "seconds"
    bucket_s: float | None = None
    request_rate: float | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    invalid: Invalid = "error"
    seed: int = 0
    title: str | None = None
    num_samples: int = 1
    beam_width: int = 1

    def __post_init__(self) -> None:
        """Refuse a load out of range before anything is read. Raises `KvbenchError`."""
        Load(self.request_rate, self.duration_s, self.num_requests)
        Decoding(self.num_samples, self.beam_width)

    def generate(self) -> Trace:
        """See `kvbench.workloads.base.Workload`; also raises `KvbenchError` where nothing is left of the file."""
        load = Load(self.request_rate, self.duration_s, self.num_requests)
        decoding = Decoding(self.num_samples, self.beam_width)
        rows = self._read()
        valid = enforce(rows, self.invalid, self.max_model_len)
        arrival_s = self._stretch(self._spread(valid.arrival_s))
        until = len(arrival_s) if load.duration_s is None else int(np.searchsorted(arrival_s, load.duration_s))
        if until == 0:
            raise KvbenchError(
                f"no request of {self.path} arrives within workload.duration_s={self.duration_s}; "
                f"the first comes at {arrival_s[0]:.6g} s"
            )
        kept = slice(until if load.num_requests is None else min(until, load.num_requests))
        requests = to_requests(arrival_s[kept], valid.prompt_len[kept], valid.output_len[kept], decoding)
        if len(requests) < len(valid.kept):  # what became of rows after the last one kept is nobody's business
            valid = enforce(head(rows, int(valid.kept[kept].max()) + 1), self.invalid, self.max_model_len)
        return Trace(requests, self._source(), valid.num_dropped, valid.num_clipped, self.inputs())

    def inputs(self) -> dict[str, str]:
        """See `kvbench.workloads.base.Workload`."""
        path = self._path()
        return {path.name: digest(path)}

    def _path(self) -> Path:
        if self.path is None:
            raise KvbenchError(
                f"workload={self.name} needs workload.path=FILE, a CSV with the columns arrival,prompt,output"
            )
        path = Path(self.path).expanduser()
        if not is_present(path):
            remedy = "`make data` fetches the public sets into data_dir" if self.title else "correct workload.path"
            raise KvbenchError(f"{path} does not exist (workload={self.name}); {remedy}")
        return path

    def _read(self) -> Rows:
        one_of("arrival_as", self.arrival_as, ("seconds", "milliseconds", "timestamps"))
        parts = ("arrival", "prompt", "output")
        if unknown := set(self.columns or {}) - set(parts):
            raise KvbenchError(f"workload.columns names {', '.join(sorted(unknown))}; it may name {', '.join(parts)}")
        names = [(self.columns or {}).get(part, part) for part in parts]
        path = self._path()
        if ".jsonl" not in path.suffixes:
            return read_csv(path, names, timestamps=self.arrival_as == "timestamps")
        if self.arrival_as == "timestamps":
            raise KvbenchError("workload.arrival_as=timestamps is for CSV files; use seconds or milliseconds")
        return read_json_lines(path, names)

    def _spread(self, arrival: FloatArray) -> FloatArray:
        """Arrivals in seconds; those of a bucket spread over it, in the file's order."""
        arrival_s = arrival / 1000 if self.arrival_as == "milliseconds" else arrival
        if self.bucket_s is None:
            return arrival_s
        bucket_s = positive("bucket_s", self.bucket_s)
        inside = np.random.default_rng(whole("seed", self.seed, least=0)).random(len(arrival_s))
        # Sorting only reorders inside a bucket, because the buckets ascend.
        return np.sort((np.rint(arrival_s / bucket_s) + inside) * bucket_s)

    def _stretch(self, arrival_s: FloatArray) -> FloatArray:
        if self.request_rate is None:
            return arrival_s
        span = arrival_s[-1] - arrival_s[0]
        if span <= 0:
            raise KvbenchError(
                f"all requests of {self.path} arrive at once, which no workload.request_rate={self.request_rate} "
                "can stretch; set it to null"
            )
        factor = (len(arrival_s) - 1) / span / self.request_rate
        stretched: FloatArray = arrival_s * factor
        return stretched

    def _source(self) -> str:
        source = self.title or f"trace {self._path().name}"
        if self.bucket_s is not None:
            source += f", arrivals spread over {self.bucket_s:g} s"
        if self.request_rate is not None:
            source += ", time scaled"
        return source
