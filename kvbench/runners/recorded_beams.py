"""Which beams survived in searches that a real model made, replayed where no model computes.

``recorded_beams.npz`` is written by ``experiments/record_beams.py`` and says how it was made: for each model and width
an array ``[searches, steps, width]`` of the beam that each beam goes on from, after 1, 2, ... generated tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvbench.core import KvbenchError

PATH = Path(__file__).with_suffix(".npz")
Parents = NDArray[np.uint8]


class RecordedBeams:
    """Searches of one model, step by step as they were.

    Requests follow the recorded searches of their width in an order that ``seed`` draws, again and again. A request
    that is longer than its search begins anew with the search's first step.

    Args:
        model: whose searches, by its name in ``conf/model/``.
        seed: of the order.

    Raises:
        KvbenchError: a model of which nothing was recorded.
    """

    def __init__(self, model: str, seed: int = 0) -> None:
        found, _ = load(PATH)
        if model not in found:
            raise KvbenchError(f"runner.beams.model={model} was not recorded; choose one of {', '.join(found)}")
        self.model = model
        self.seed = seed
        self._recorded = found[model]
        self._searches: dict[int, list[list[tuple[int, ...] | None]]] = {}
        """By width, in the order of the requests: the parents of each step; None where all survive."""

    def parents(self, request: int, width: int, step: int) -> Seq[int] | None:
        """As ``kvbench.runners.beams.ScoreModel.parents``.

        Raises:
            KvbenchError: a width that was not recorded.
        """
        searches = self._searches.get(width) or self._shuffled(width)
        search = searches[request % len(searches)]
        return search[(step - 1) % len(search)]

    def _shuffled(self, width: int) -> list[list[tuple[int, ...] | None]]:
        if width not in self._recorded:
            raise KvbenchError(
                f"workload.beam_width={width}: searches of {self.model} were recorded with "
                f"{', '.join(map(str, self._recorded))} beams; choose one of them, or runner/beams=score_model"
            )
        recorded, all_survive = self._recorded[width], tuple(range(width))
        order = np.random.Generator(np.random.Philox(key=[self.seed, width])).permutation(len(recorded))
        steps = [[tuple(step) for step in search] for search in recorded[order].tolist()]
        searches = [[None if step == all_survive else step for step in search] for search in steps]
        self._searches[width] = searches
        return searches


def load(path: Path) -> tuple[dict[str, dict[int, Parents]], str]:
    """The recorded parents by model and width, and where they come from."""
    found: dict[str, dict[int, Parents]] = {}
    with np.load(path) as file:
        for name in file.files:
            model, _, width = name.rpartition("/")
            if model:
                found.setdefault(model, {})[int(width)] = file[name]
        return found, str(file["source"])


def store(path: Path, searches: Mapping[str, Mapping[int, Parents]], source: str) -> None:
    """Write what ``load`` reads; the same content gives the same bytes."""
    arrays = {f"{model}/{width}": parents for model, widths in searches.items() for width, parents in widths.items()}
    np.savez_compressed(path, allow_pickle=False, source=np.array(source), **arrays)
