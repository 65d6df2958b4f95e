"""The folder of a point: what is written when it has run, and whether what is there answers for it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from kvbench import __version__
from kvbench.memory_map.map import FILE as MAP_FILE
from kvbench.parts import is_real
from kvbench.point import PACKAGE, Point, sources_digest
from kvbench.results import write_json, write_text
from kvbench.schema import VERSION as SCHEMA

_PARQUET = b"PAR1"
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # half of a short point's time goes into the slow one


def finished_summary(
    point: Point, points_dir: Path, *, needs_steps: bool, needs_map: bool = False
) -> dict[str, Any] | None:
    """The row of a point that was finished before, or None if there is none that answers for it."""
    folder = points_dir / point.folder
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    tables = (("requests.parquet", True), ("steps.parquet", needs_steps), (MAP_FILE, needs_map))
    if manifest.get("key") != point.key or not all(_is_whole(folder / name) for name, needs in tables if needs):
        return None
    return dict(summary)


def _is_whole(table: Path) -> bool:
    """Whether a Parquet file is there to its end."""
    try:
        with table.open("rb") as file:
            file.seek(-len(_PARQUET), os.SEEK_END)
            return file.read() == _PARQUET
    except OSError:
        return False


def begin(point: Point, points_dir: Path) -> Path:
    """A folder to write into, which ``publish`` puts into place when it is complete."""
    path = points_dir / f".{point.folder}.{os.getpid()}.tmp"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def write_origin(folder: Path, point: Point, origin: dict[str, Any]) -> None:
    """Write ``config.yaml``, and ``manifest.json`` with what else says where the numbers come from."""
    write_text(folder / "config.yaml", yaml.dump(point.config, Dumper=_DUMPER, sort_keys=False))
    origin = {"key": point.key, "inputs": point.inputs, **origin}
    if is_real(point.config) and "torch" in sys.modules:
        origin["versions"] = origin["versions"] | _versions("torch", "transformers", "numba", "triton")
        origin["cpu"] = _cpu()
    write_json(folder / "manifest.json", origin)


def publish(folder: Path, point: Point, points_dir: Path) -> None:
    """Put a complete folder into the place of what was there before."""
    final = points_dir / point.folder
    if final.exists():
        shutil.rmtree(final)
    folder.rename(final)


def clean_up(points_dir: Path) -> None:
    """Remove what processes that no longer live left half written."""
    for path in points_dir.glob(".*.tmp"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def provenance(commit: str | None) -> dict[str, Any]:
    """What a manifest says of the machine and the software: provenance, never identity."""
    return {
        "schema": SCHEMA,
        "git_commit": commit,
        "versions": {"python": platform.python_version(), "kvbench": __version__, **_versions("numpy", "pyarrow")},
        "host": platform.node(),
        "platform": platform.platform(),
        "num_cores": os.cpu_count(),
        "sources": sources_digest(PACKAGE),
    }


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def _cpu() -> dict[str, Any]:
    """What computed a real run's tokens: the CPU, its vector instructions as torch names them, the threads used."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return {
        "name": _cpu_name(),
        "num_threads": torch.get_num_threads(),
        "capabilities": sorted(name for name, has in capabilities.items() if has is True),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
