"""``conf/costs/<name>.yaml`` of a machine: one entry for each model that was calibrated there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvbench.core import KvbenchError
from kvbench.results import write_text
from kvbench.runners.simulated import IterationCosts

HARDWARE = "local"
"""``conf/hardware/`` of the machine that kvbench runs on."""


def path_of(conf: Path, name: str) -> Path:
    """Where the costs of a name lie below ``conf``. Raises KvbenchError for a name that is no file's."""
    if not re.fullmatch(r"\w[\w-]*", name):
        raise KvbenchError(f"--name {name} names no file; use letters, digits, _ and - inside")
    return conf / "costs" / f"{name}.yaml"


def load(path: Path) -> dict[str, Any]:
    """The entries that a calibration left, by model; nothing where there is no file.

    Raises:
        KvbenchError: a file that no calibration wrote.
    """
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        models = dict(content["models"])
        calibrated = all("residuals" in entry for entry in models.values())
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        raise KvbenchError(f"{path} is no costs file; delete it, or choose another --name") from None
    if not calibrated:
        raise KvbenchError(f"{path} was not written by a calibration and stays; choose another --name")
    return models


def store(
    path: Path,
    model: str,
    coefficients: Mapping[str, Any],
    source: str,
    residuals: Mapping[str, Any],
    hardware: str = HARDWARE,
) -> None:
    """Add or replace the entry of a model.

    Args:
        path: the file; what it has of other models is kept.
        model: its name in ``conf/model/``.
        coefficients: arguments of ``IterationCosts``.
        source: where they come from.
        residuals: how good they are; no runner reads them.
        hardware: what computed; the costs of other hardware are in another file.

    Raises:
        KvbenchError: as ``load``; coefficients that are none; entries of other hardware.
    """
    IterationCosts(**coefficients)
    known = load(path)
    if others := {entry["hardware"] for entry in known.values()} - {hardware}:
        raise KvbenchError(f"{path} has costs of hardware={others.pop()}; choose another --name for {hardware}")
    entry = {"hardware": hardware, **coefficients, "source": source, "residuals": dict(residuals)}
    content = {
        "defaults": [{"override /hardware@_global_.hardware": hardware}, "_self_"],
        "name": path.stem,
        "models": {**known, model: entry},
    }
    head = "# Iteration costs of this machine, written by `python -m kvbench.calibrate` (docs/fidelity.md).\n"
    try:
        write_text(path, head + yaml.safe_dump(content, sort_keys=False, width=100))
    except OSError as error:
        raise KvbenchError(f"cannot write {path}: {error.strerror or error}") from None
