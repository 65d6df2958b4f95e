"""Write a file of ``conf/model/`` for a model of your own.

``python -m kvbench.models.describe WEIGHTS > conf/model/NAME.yaml``

``WEIGHTS`` is any form of ``kvbench.models.sources``; the weights themselves are not loaded.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM

from kvbench import command
from kvbench.models.families import check_supported, shapes_of
from kvbench.models.loading import read_config
from kvbench.models.sources import find


def describe(weights: str, name: str | None = None) -> dict[str, Any]:
    """The keys of ``kvbench.capacity.Model`` for weights that lie somewhere.

    Args:
        weights: as ``model.weights``.
        name: how the model is called; None: after the last part of ``weights``.

    Raises:
        KvbenchError: there are no such weights, or of an unsupported kind.
    """
    source = find(weights)
    config = read_config(source)
    check_supported(config, f"model.weights={weights}")
    with torch.device("meta"):
        num_parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    last = re.sub(r"\.(gguf|bin)$", "", weights.rstrip("/").rpartition("/")[2].partition("@")[0])
    shapes = shapes_of(config)
    return {
        "name": name or re.sub(r"\W+", "_", last).lower(),
        **shapes,
        "num_parameters": num_parameters,
        "dtype": "auto",
        "weights": weights,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Describe the weights that the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 after a user's mistake.
    """
    parser = argparse.ArgumentParser(prog="python -m kvbench.models.describe", description=describe.__doc__)
    parser.add_argument("weights", help="a folder, owner/name on the Hugging Face hub, a .gguf or .bin file")
    parser.add_argument("--name", help="how the model is called; after the weights unless given")
    options = parser.parse_args(argv)

    def action() -> int:
        yaml.safe_dump(describe(options.weights, options.name), sys.stdout, sort_keys=False)
        return 0

    return command.run("kvbench.models.describe", action)


if __name__ == "__main__":
    sys.exit(main())
