"""Fetch public data sets into the data directory: ``python -m kvbench.workloads.download`` (``make data``).

kvbench runs without any of them. Every file is checked: against a sum known here, or, for the sets that have none,
against the sum of the first time it was fetched, which ``SHA256SUMS`` in the data directory remembers.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from tqdm import tqdm

from kvbench import __version__, command
from kvbench.core import KvbenchError
from kvbench.workloads.files import open_bytes
from kvbench.workloads.pickled import read_pickled_pairs

_NAME = "kvbench.workloads.download"
SUMS = "SHA256SUMS"
_CHUNK = 1 << 20
_TIMEOUT_S = 60


def file_sum(path: Path) -> str:
    """SHA-256 of the contents, unzipped, in hex."""
    with open_bytes(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def pairs_sum(path: Path) -> str:
    """SHA-256 of pickled pairs written as CSV with the header ``prompt_tokens,output_tokens``, in hex."""
    rows = read_pickled_pairs(path)
    lines = [f"{int(p)},{int(o)}\n" for p, o in zip(rows.prompt.values, rows.output.values, strict=True)]
    return hashlib.sha256("".join(["prompt_tokens,output_tokens\n", *lines]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Source:
    """A file to fetch.

    Attributes:
        name: what it is asked for by.
        url: where it lies.
        file: what it is called in the data directory; stored gzipped where that ends in ``.gz``.
        about: what it is, how large, under which terms.
        sha256: what ``check`` gives for the right file; None where that is not known beforehand.
        check: the sum that is compared.
    """

    name: str
    url: str
    file: str
    about: str
    sha256: str | None = None
    check: Callable[[Path], str] = file_sum


_GITHUB = "https://github.com"
_HUB = "https://huggingface.co/datasets"

USED: tuple[Source, ...] = (
    Source(
        "paper_pairs",
        f"{_GITHUB}/sosp-ae-39/sosp-ae-astra/raw/3180d2f8c2a2aa1729245f9b0cb75a854746e6a8/datasets/"
        "sharegpt_opt_text_completion_length.pkl",
        "sharegpt_opt_text_completion_length.pkl",
        "the PagedAttention paper's 84,226 ShareGPT lengths; 0.9 MB; no licence stated",
        "f4ba887196d6498aa351ca14d102884aca70d7f9a683d8e3dbb637cc32937658",
        pairs_sum,
    ),
    Source(
        "azure_2023_conv",
        f"{_GITHUB}/Azure/AzurePublicDataset/raw/790921015d50dd6aae7f7e47f39ba0e235ad6b08/data/"
        "AzureLLMInferenceTrace_conv.csv",
        "azure_2023_conv.csv.gz",
        "Azure conversation trace 2023; 0.7 MB; CC-BY 4.0 (Patel et al., Splitwise, ISCA 2024)",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    Source(
        "azure_2023_code",
        f"{_GITHUB}/Azure/AzurePublicDataset/raw/790921015d50dd6aae7f7e47f39ba0e235ad6b08/data/"
        "AzureLLMInferenceTrace_code.csv",
        "azure_2023_code.csv.gz",
        "Azure coding trace 2023; 0.3 MB; CC-BY 4.0 (Patel et al., Splitwise, ISCA 2024)",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
    Source(
        "mooncake",
        f"{_GITHUB}/kvcache-ai/Mooncake/raw/a2a4b18ac537fd798d50e6e9f57031ce86419a37/FAST25-release/traces/"
        "conversation_trace.jsonl",
        "mooncake_conversation.jsonl.gz",
        "Mooncake conversation trace; 3 MB; Apache-2.0 (Qin et al., FAST 2025)",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
)
"""What kvbench's own workloads read; fetched unless others are named."""

OTHERS: tuple[Source, ...] = (
    Source(
        "sharegpt_v3",
        f"{_HUB}/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/main/ShareGPT_V3_unfiltered_cleaned_split.json",
        "ShareGPT_V3_unfiltered_cleaned_split.json",
        "ShareGPT V3, text (workload.lengths.tokenizer=FOLDER counts it); 673 MB",
        "35f0e213ce091ed9b9af2a1f0755e9d39f9ccec34ab281cd4ca60d70f6479ba4",
    ),
    Source(
        "alpaca",
        f"{_HUB}/tatsu-lab/alpaca/resolve/main/data/train-00000-of-00001-a09b74b3ef9c3b56.parquet",
        "alpaca.parquet",
        "Alpaca, text; 24 MB; CC-BY-NC 4.0",
    ),
    Source(
        "wmt16_de_en",
        f"{_HUB}/wmt/wmt16/resolve/main/de-en/test-00000-of-00001.parquet",
        "wmt16_de_en_test.parquet",
        "WMT16 German-English test set, text; under 1 MB",
    ),
    Source(
        "azure_2024_conv",
        f"{_GITHUB}/Azure/AzurePublicDataset/releases/download/dataset-llm-2024/AzureLLMInferenceTrace_conv_1week.csv",
        "azure_2024_conv_1week.csv",
        "Azure conversation trace 2024, a week of 27 million requests; 1.1 GB; CC-BY 4.0",
        "a0cc9b969a9bbf0fd811802cbf4323edd3a209ace791e3799ad4f9207f213941",
    ),
    Source(
        "azure_2024_code",
        f"{_GITHUB}/Azure/AzurePublicDataset/releases/download/dataset-llm-2024/AzureLLMInferenceTrace_code_1week.csv",
        "azure_2024_code_1week.csv",
        "Azure coding trace 2024, a week of 17 million requests; 0.7 GB; CC-BY 4.0",
        "71de5c55cbc35f8f1ed0b6b7806b4cd1e9764b0058469725a6aac98023a1448f",
    ),
    Source(
        "burstgpt",
        f"{_GITHUB}/HPMLL/BurstGPT/releases/download/v2.0/BurstGPT_without_fails_1.csv",
        "burstgpt_without_fails_1.csv",
        "BurstGPT, successful requests of the first two months; 51 MB; CC-BY 4.0",
        "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4",
    ),
    Source(
        "qwen_bailian",
        f"{_GITHUB}/alibaba-edu/qwen-bailian-usagetraces-anon/raw/main/qwen_traceB_blksz_16.jsonl",
        "qwen_traceB_blksz_16.jsonl",
        "Qwen-Bailian trace B, two hours of API calls; Apache-2.0",
        "68e3f98e2d601d60d0abf4b89bc8a3654372abab7b1cde6373a13d0054379d59",
    ),
)
"""Further public sets; fetched where they are named, or with ``all``."""


class UnreachableError(KvbenchError):
    """No network; asking for the next file is of no use."""


def fetch(source: Source, data_dir: Path) -> str:
    """Bring one file into the data directory, or check the one that is there; says which.

    A file appears under its name only when it is complete and checked.

    Raises:
        UnreachableError: the host cannot be reached.
        KvbenchError: it refuses, breaks off or sends another file than expected; or the file that is there is another.
    """
    path = data_dir / source.file
    if path.exists():
        _verify(source, path, data_dir, "delete it to fetch it again, or move it away")
        return "already there, checked"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        part = data_dir / f".{source.file}.{os.getpid()}.part"
        try:
            _download(source, part)
            accept = "" if source.sha256 else f"; to accept that, remove its line from {data_dir / SUMS}"
            _verify(source, part, data_dir, f"nothing was kept. It may have changed at {source.url}{accept}")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise KvbenchError(f"cannot write {path}: {error.strerror or error}") from error
    return f"fetched, {path.stat().st_size / 1e6:.1f} MB"


def _download(source: Source, part: Path) -> None:
    request = urllib.request.Request(source.url, headers={"User-Agent": f"kvbench/{__version__}"})
    try:
        with (
            urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer,
            part.open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if source.file.endswith(".gz") else raw as file,
        ):
            size = int(answer.headers.get("Content-Length") or 0)
            received = 0
            with tqdm(desc=source.name, total=size or None, unit="B", unit_scale=True, leave=False) as progress:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    received += len(chunk)
                    progress.update(len(chunk))
    except urllib.error.HTTPError as error:
        raise KvbenchError(f"{source.name}: {source.url} answered {error.code} {error.reason}") from error
    except (urllib.error.URLError, TimeoutError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnreachableError(
            f"{source.name}: cannot reach {source.url.split('/')[2]} ({reason}). kvbench runs without these files; "
            "to have them, fetch them where there is a network and set KVBENCH_DATA_DIR to that folder"
        ) from error
    except (HTTPException, ConnectionError) as error:
        raise KvbenchError(f"{source.name}: the connection broke off ({error!r}); try again") from error
    if size and received != size:
        raise KvbenchError(f"{source.name}: the connection broke off after {received} of {size} bytes; try again")


def _verify(source: Source, path: Path, data_dir: Path, remedy: str) -> None:
    """Compare a file's sum with the one known, or with that of the first time; remembers it then."""
    found = source.check(path)
    remembered = _remembered(data_dir)
    expected = source.sha256 or remembered.get(source.file)
    if expected is not None and found != expected:
        raise KvbenchError(f"{source.file} has the sum {found[:16]}…, not {expected[:16]}…; {remedy}")
    if source.sha256 is None and source.file not in remembered:
        lines = [f"{value}  {name}\n" for name, value in sorted({**remembered, source.file: found}.items())]
        part = data_dir / f".{SUMS}.{os.getpid()}.part"
        part.write_text("".join(lines), encoding="utf-8")
        part.replace(data_dir / SUMS)


def _remembered(data_dir: Path) -> dict[str, str]:
    """File name -> sum, from ``SHA256SUMS`` as ``sha256sum`` writes it."""
    path = data_dir / SUMS
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name: value for value, _, name in (line.partition("  ") for line in lines) if name}


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch what the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, 1 if any file could not be had, 2 after a user's mistake.
    """
    names = {source.name: source for source in (*USED, *OTHERS)}
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.workloads.download",
        description="Fetch public data sets, checked by their sums; without names, those that kvbench itself reads.",
        epilog="sets: " + "; ".join(f"{source.name} ({source.about})" for source in names.values()),
    )
    parser.add_argument("names", nargs="*", metavar="set", help="a set's name, or all")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("KVBENCH_DATA_DIR") or "data"))
    options = parser.parse_args(argv)

    def action() -> int:
        if unknown := set(options.names) - {*names, "all"}:
            raise KvbenchError(f"no set is called {', '.join(sorted(unknown))}; there are {', '.join(names)}, all")
        asked = list(names) if "all" in options.names else options.names or [source.name for source in USED]
        return _fetch_all([names[name] for name in asked], options.data_dir)

    return command.run(_NAME, action, "files that are fetched stay; the same command fetches the rest")


def _fetch_all(sources: Sequence[Source], data_dir: Path) -> int:
    """Fetch as many as can be had; returns the exit status."""
    status = 0
    for source in sources:
        try:
            print(f"{source.name}: {fetch(source, data_dir)} ({data_dir / source.file})", flush=True)
        except KvbenchError as error:
            status = 1
            print(f"{_NAME}: {error}", file=sys.stderr)
            if isinstance(error, UnreachableError):
                break
    return status


if __name__ == "__main__":
    sys.exit(main())
