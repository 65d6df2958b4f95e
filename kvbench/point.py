"""A point: one resolved configuration with its seed, and the key that identifies it."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.instantiate import locate

PACKAGE = Path(__file__).resolve().parent


NO_INFLUENCE = (
    "__main__.py",
    "ablation.py",
    "app.py",
    "bounds.py",
    "calibrate",
    "command.py",
    "compare.py",
    "composition.py",
    "estimate.py",
    "executors",
    "export.py",
    "figures",
    "fit",
    "folder.py",
    "live.py",
    "memory_map",
    "paper",
    "partition.py",
    "plan.py",
    "reference.py",
    "report",
    "results.py",
    "sweep.py",
    "tables.py",
    "testing",
    "verify.py",
)
"""Parts of the package that no number of a point depends on; a change there keeps finished points."""


NOT_IDENTIFYING = ("records", "data_dir")
"""Keys that say where to read and what to keep; what was read is identified by its digest."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is run, and resumed, as one.

    Attributes:
        config: plain containers, see ``kvbench.composition.Resolved.point``.
        inputs: file name -> digest, or what stands in for a file that is absent.
        key: SHA-256 over the configuration, the inputs and the sources that produce the numbers.
    """

    config: dict[str, Any]
    inputs: dict[str, str]
    key: str

    @property
    def folder(self) -> str:
        """Its folder's name: what it is, in a few words, and 8 digits of the key."""
        config = self.config
        load = config["workload"].get("request_rate")
        words = [config["system"], config["model"]["name"], config["choices"]["workload"]]
        if config.get("metric"):
            words += [config["metric"], f"{config['threshold']:g}"]
        elif load is not None:
            words += [f"{load:g}"]
        words += [f"seed{config['seed']}"] if config["seed"] else []
        words += [f"trial{config['trial']}"] if config.get("trial") else []
        slug = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", str(word)).strip("_") for word in words)
        return f"{slug[:100]}-{self.key[:8]}"


def identify(config: dict[str, Any], inputs: dict[str, str]) -> Point:
    """Compute the key of a configuration, given what its workload reads."""
    identity = {
        "config": _without(config, NOT_IDENTIFYING),
        "inputs": inputs,
        "sources": sources_digest(PACKAGE),
        "own_parts": {target: _module_digest(target) for target in sorted(set(_foreign_targets(config)))},
    }
    text = json.dumps(identity, sort_keys=True, default=str)
    return Point(config, inputs, hashlib.sha256(text.encode()).hexdigest())


def _without(node: Any, names: tuple[str, ...]) -> Any:
    if isinstance(node, Mapping):
        return {key: _without(value, names) for key, value in node.items() if key not in names}
    return node


def _foreign_targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if isinstance(target, str) and not target.startswith("kvbench."):
            yield target
        for value in node.values():
            yield from _foreign_targets(value)


@cache
def sources_digest(package: Path) -> str:
    """SHA-256 over every file of the package that a point's numbers may depend on: all but ``NO_INFLUENCE``."""
    paths = sorted(
        path
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.relative_to(package).parts[0] not in NO_INFLUENCE
    )
    return _digest_files(package, paths)


def _module_digest(target: str) -> str:
    """The same over a user's own package, or module if it is in none."""
    locate(target, "a part")
    top = sys.modules[target.partition(".")[0]]
    file = getattr(top, "__file__", None)
    if file is None:
        return "no file"
    path = Path(file)
    paths = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return _digest_files(path.parent, paths)


def _digest_files(root: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()
