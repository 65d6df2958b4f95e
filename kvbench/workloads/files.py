"""Input files: opened plain or gzipped, identified by their digest, every failure a sentence."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TextIO, cast

from kvbench.core import KvbenchError

Signature = tuple[str, int, int]
"""Path, size and modification time: changes when the file does, so it can key a cache of what was read."""

_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeError)


def signature(path: Path) -> Signature:
    """The file's signature; raises `KvbenchError` where there is no such file."""
    try:
        status = path.stat()
    except OSError as error:
        raise KvbenchError(f"cannot read {path}: {error.strerror or error}") from error
    if not path.is_file():
        raise KvbenchError(f"cannot read {path}: it is not a file")
    return str(path), status.st_size, status.st_mtime_ns


def digest(path: Path) -> str:
    """``sha256:<hex>`` of the file as it lies on the disk; raises `KvbenchError` where it cannot be read."""
    return _digest(signature(path))


@lru_cache(maxsize=64)
def _digest(of: Signature) -> str:
    try:
        with Path(of[0]).open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise KvbenchError(f"cannot read {of[0]}: {error.strerror or error}") from error


def is_present(path: Path) -> bool:
    """Whether something of this name is there (a file that cannot be read is present, and an error later)."""
    return os.path.lexists(path)


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The contents, unzipped where they begin as gzip does; a failure while reading raises `KvbenchError`."""
    signature(path)
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if zipped:
                with gzip.GzipFile(fileobj=raw) as unzipped:
                    yield cast("IO[bytes]", unzipped)
            else:
                yield raw
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        remedy = "save it as UTF-8" if isinstance(error, UnicodeError) else "fetch or copy the file again"
        raise KvbenchError(f"cannot read {path}: {reason}; {remedy}") from error


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The same as UTF-8 text, with or without a byte-order mark, line ends as they are."""
    with open_bytes(path) as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        yield text
