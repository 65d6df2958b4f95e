"""Stills, films and the command that draws them, on small runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from kvbench.app import main as kvbench
from kvbench.core import KvbenchError
from kvbench.figures import memory_map
from kvbench.figures.film import FRAMES_PER_S
from kvbench.figures.memory_map import PURPOSES, SHARED, Group, colors, groups, shares, still
from kvbench.memory_map import Purpose
from kvbench.memory_map.__main__ import draw, main
from kvbench.partition import Part
from kvbench.results import Results
from tests.drawn import assert_nothing_is_cut, texts

FEW = ["workload.num_requests=6", "executor=serial"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two panels of the experiment, with six requests each."""
    folder = tmp_path_factory.mktemp("memory_map")
    assert kvbench(["+experiment=memory_map", "panel=systems,samples", *FEW, f"results_dir={folder}"]) == 0
    return Results(folder / "memory_map")


def group(results: Results, panel: str) -> Group:
    (found,) = (each for each in groups([results]) if each.name == f"memory_map_{panel}")
    return found


def test_the_experiment_draws_its_panels(results: Results) -> None:
    figures = memory_map.draw(results)
    assert list(figures) == ["memory_map_systems", "memory_map_samples"]
    for stem, figure in figures.items():
        assert (results.path / f"{stem}.png").is_file()  # what the command drew
        said = " ".join(text.get_text() for text in texts(figure))
        assert "Simulated (costs: paper_engine)" in said
        assert ("Orca (Oracle)" in said) == (stem == "memory_map_systems")
        assert ("several streams share" in said) == (stem == "memory_map_samples")
        assert ("copied to" in said) == (stem == "memory_map_samples")
        assert_nothing_is_cut(figure)
    table = memory_map.table(results)
    assert table is not None
    assert max(map(len, table.splitlines())) <= 124


def test_bars_are_the_means_of_the_maps(results: Results) -> None:
    for each in groups([results]):
        for run in each.runs:
            found, memory = shares(run), run.memory
            assert sum(found.values()) == pytest.approx(100)
            times = np.linspace(0, run.loaded_s, 601)
            picture = colors(memory, memory.step_at((times[1:] + times[:-1]) / 2), "purpose")
            parts: dict[Purpose | None, Part] = {**dict(PURPOSES.items()), None: SHARED}
            for purpose, share in found.items():
                color = (255 * np.array(to_rgb(parts[purpose].color)) + 0.5).astype(np.uint8)
                assert 100 * (picture == color).all(axis=-1).mean() == pytest.approx(share, abs=0.7), purpose
    (_, vllm) = group(results, "samples").runs
    assert shares(vllm)[None] > 5


def test_maxima_waste_what_the_paper_s_figure_2_shows(results: Results) -> None:
    orca_max, orca_oracle, vllm = (shares(run) for run in group(results, "systems").runs)
    assert orca_max[Purpose.OVERRESERVED] > orca_max[Purpose.TOKEN_STATES]
    assert orca_oracle[Purpose.OVERRESERVED] == 0 < orca_oracle[Purpose.PADDING]
    assert vllm[Purpose.OVERRESERVED] == 0
    assert vllm[Purpose.RESERVED] + vllm[Purpose.PADDING] < 5


def test_owners_have_colours_of_their_own(results: Results) -> None:
    run = group(results, "systems").runs[0]
    memory = run.memory
    step = int(np.argmax(run.steps["num_running"]))
    picture, owners = colors(memory, [step], "owner")[:, 0], memory.owners([step])[:, 0]
    purposes = memory.purposes([step])[:, 0]
    by_owner = {
        owner: {tuple(pixel) for pixel in picture[(owners == owner) & (purposes == Purpose.TOKEN_STATES)].tolist()}
        for owner in set(owners.tolist()) - {-2}
    }
    assert len(by_owner) == 2
    assert all(len(found) == 1 for found in by_owner.values())
    assert len(set.union(*by_owner.values())) == 2
    assert_nothing_is_cut(still([run], "owner"))


def test_other_requests_are_not_side_by_side(results: Results, tmp_path: Path) -> None:
    assert [len(each.runs) for each in groups([results])] == [3, 2]
    command = ["workload=fixed", *FEW, "memory_map=true", f"results_dir={tmp_path}"]
    assert kvbench([*command, "name=one", "kv_cache_seqs=1"]) == 0
    assert kvbench([*command, "name=two", "kv_cache_seqs=1", "system=orca_oracle"]) == 0
    assert kvbench([*command, "name=three", "kv_cache_seqs=2"]) == 0
    folders = [Results(tmp_path / name) for name in ("one", "two", "three")]
    assert [(each.name, len(each.runs)) for each in groups(folders)] == [("memory_map_1", 2), ("memory_map_2", 1)]


def test_the_command_writes_stills_and_a_film(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["workload=fixed", "workload.num_samples=2", "kv_cache_seqs=0.5", "memory_map=true", "name=few"]
    assert kvbench([*command, *FEW, "workload.request_rate=4", f"results_dir={tmp_path}"]) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "few"), "--to", str(tmp_path / "drawn"), "--seconds", "0.4"]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert all(path.is_file() and path.parent == tmp_path / "drawn" for path in written)
    assert {path.stem for path in written} == {"memory_map", "memory_map_owners"}
    assert {path.suffix for path in written} >= {".pdf", ".svg", ".png", ".gif"}
    with Image.open(tmp_path / "drawn" / "memory_map.gif") as film:
        frames = []
        for index in range(getattr(film, "n_frames", 1)):
            film.seek(index)
            frames.append(np.asarray(film.convert("RGB"), np.int16))
    assert len(frames) == 0.4 * FRAMES_PER_S
    assert all(np.abs(one - other).max() > 50 for one, other in pairwise(frames))


def test_mistakes_are_told(tmp_path: Path, results: Results, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no summary.csv" in capsys.readouterr().err
    assert kvbench(["workload=fixed", *FEW, f"results_dir={tmp_path}", "name=plain"]) == 0
    assert main([str(tmp_path / "plain")]) == 2
    assert "run it with memory_map=true" in capsys.readouterr().err
    with pytest.raises(KvbenchError, match="plays 0 seconds or more"):
        draw([results.path], seconds=-1)
