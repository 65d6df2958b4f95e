"""Deterministic runs against the committed numbers of results/reference/."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kvbench.app import main
from kvbench.core import KvbenchError
from kvbench.reference import EXPERIMENTS, MEASURED, OF_THE_MACHINE, REPLAYS, TARGET, keep, regenerate

SUBSETS = {
    "smoke": [],
    "fig_memory_waste": [],
    "fig_batched_requests": ["panel=a"],
    "fig_throughput": ["panel=c", "system=orca_max"],
}


def rows_of(folder: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows of a summary by what identifies them; the folder's name changes with the sources."""
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("panel", "system", "model", "workload", "request_rate", "duration_s", "repeat")
    found = {tuple(row[name] for name in names): row for row in rows}
    assert len(found) == len(rows)
    return found


def assert_equal(measured: Path, reference: Path) -> None:
    expected = rows_of(reference)
    rows = rows_of(measured)
    assert rows
    for key, row in rows.items():
        for name, value in expected[key].items():
            if name in ("point", *OF_THE_MACHINE):
                continue
            try:
                number = float(value)
            except ValueError:
                assert row[name] == value, (key, name)
            else:
                assert float(row[name]) == pytest.approx(number, rel=1e-9, abs=1e-12), (key, name)


@pytest.mark.parametrize("experiment", SUBSETS)
def test_runs_without_data_give_the_committed_numbers(experiment: str, tmp_path: Path) -> None:
    command = [f"+experiment={experiment}", f"results_dir={tmp_path}", f"data_dir={tmp_path}", *SUBSETS[experiment]]
    assert main(command) == 0
    assert_equal(tmp_path / experiment, TARGET / experiment)


def test_the_replay_of_the_papers_trace_gives_the_committed_numbers(tmp_path: Path, data_file) -> None:  # type: ignore[no-untyped-def]
    data_dir = data_file("sharegpt_lengths.csv.gz").parent
    assert main(["+experiment=fig_memory_waste", f"results_dir={tmp_path}", f"data_dir={data_dir}"]) == 0
    assert_equal(tmp_path / "fig_memory_waste", TARGET / "fig_memory_waste_pairs")


def test_the_committed_set_is_whole_and_names_no_machine() -> None:
    folders = {path.name for path in TARGET.iterdir() if path.is_dir()}
    pairs, measured = (
        {f"{name}_{suffix}" for name in names} for names, suffix in ((REPLAYS, "pairs"), (MEASURED, "measured"))
    )
    assert folders == {*EXPERIMENTS} | pairs | measured
    for folder in folders:
        summary = (TARGET / folder / "summary.csv").read_text(encoding="utf-8")
        assert not set(OF_THE_MACHINE) & set(summary.splitlines()[0].split(","))
        manifests = (TARGET / folder / "manifests.json").read_text(encoding="utf-8")
        assert not [name for name in OF_THE_MACHINE if f'"{name}"' in manifests]
        if folder.startswith("fig_"):
            assert list((TARGET / folder).glob("*.png"))
            assert (TARGET / folder / "claims.csv").is_file()


def test_keep_leaves_out_what_differs_between_machines(tmp_path: Path) -> None:
    assert main([f"results_dir={tmp_path}", f"data_dir={tmp_path}", "workload.duration_s=5", "seed=3"]) == 0
    keep(tmp_path / "adhoc", tmp_path / "kept")
    assert "wall_s" in (tmp_path / "adhoc" / "summary.csv").read_text(encoding="utf-8")
    assert "wall_s" not in (tmp_path / "kept" / "summary.csv").read_text(encoding="utf-8")
    assert '"host"' not in (tmp_path / "kept" / "manifests.json").read_text(encoding="utf-8")


def test_a_part_of_the_set_is_made_alone(tmp_path: Path) -> None:
    regenerate(tmp_path, ["smoke"], tmp_path / "set")
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["smoke"]
    assert_equal(tmp_path / "set" / "smoke", TARGET / "smoke")


@pytest.mark.parametrize(
    ("folder", "words"), [("fig_smoke", "not of the reference set"), ("fig_noise_pairs", "cannot be made")]
)
def test_what_cannot_be_made_is_said(folder: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=words):
        regenerate(tmp_path, [folder], tmp_path / "set")
