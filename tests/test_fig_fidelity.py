"""The experiment of simulated against real runs: its points, its figure, its table and its expectations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench import composition
from kvbench.calibrate import costs_file
from kvbench.composition import composer, groups, load_experiment, parse
from kvbench.core import KvbenchError
from kvbench.figures import fig_fidelity as fidelity
from kvbench.paper.claims import Verdict
from kvbench.plan import Plan, plan
from kvbench.results import Results
from tests.drawn import assert_nothing_is_cut, texts
from tests.extras import NEEDS_MODELS
from tests.synthetic_results import Row, write_results

SYSTEMS = ("fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "vllm")
TRIALS = (0.96, 1.0, 1.08)
"""Of the real runs; their median is 1."""
RESIDUALS = {"num_iterations": 600, "rms_pct": 4.5, "p90_pct": 6.2, "held_out_total_pct": -1.5}


def rows(error: float = 1.1, **more: Any) -> list[Row]:
    """Every point three times real and once simulated, which lies above by a factor."""
    found = []
    for load in ("at_once", "poisson"):
        for i, system in enumerate(SYSTEMS, 1):
            common = {
                "panel": load,
                "model": "opt_125m",
                "hardware": "local",
                "workload": "sharegpt_scaled",
                "num_preemptions": 3,
                **more,
            }
            ways = [{"system": system, "runner": "cpu", "device": "cpu, 2 threads", "costs": None}] * len(TRIALS)
            ways += [{"system": f"{system}[costs=local]", "costs": "local"}]
            for factor, way in zip((*TRIALS, error), ways, strict=True):
                metrics = {
                    "throughput_tok_per_s": 20.0 * i * factor,
                    "normalized_latency_mean_s": 0.5 / i * factor,
                    "num_running_mean": 3.0 * i * factor,
                    "ttft_p50_s": 1.0 / i * factor,
                }
                found.append({**common, **way, **metrics})
    return found


def results(folder: Path, given: list[Row]) -> Results:
    found = write_results(folder, given)
    for point in (folder / "points").iterdir() if given else ():
        (point / "config.yaml").write_text(yaml.safe_dump({"costs": {"name": "local", "residuals": RESIDUALS}}))
    return found


def planned(monkeypatch: pytest.MonkeyPatch, folder: Path, *typed: str) -> Plan:
    """The experiment with a costs file, which a machine where nobody calibrated does not have."""
    for path in composition.CONF.rglob("*.yaml"):
        target = folder / path.relative_to(composition.CONF)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    local = folder / "costs" / "local.yaml"
    local.unlink(missing_ok=True)
    costs = {"a_ms": 25.0, "b_ms": 0.0, "c_ms": 2.0, "p_ms": 1.4, "q_ms": 0.0, "packed": True}
    costs_file.store(local, "opt_125m", costs, "measured", RESIDUALS)
    groups.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(composition, "CONF", folder)
            with composer() as compose:
                return plan(compose, parse(["+experiment=fig_fidelity", *typed], sweep=False))
    finally:
        groups.cache_clear()


def test_real_points_run_three_times_trial_after_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    systems = ("orca_max", "vllm")
    found = planned(monkeypatch, tmp_path, f"system={','.join(systems)}")
    configs = [row.point.config for row in found.rows]
    assert len({row.point.key for row in found.rows}) == len(configs) == 2 * 2 * (3 + 1)
    real = [config for config in configs if config["choices"]["runner"] == "cpu"]
    for arrivals in ("all_at_once", "poisson"):
        of = [config for config in real if config["choices"]["workload/arrivals"] == arrivals]
        assert [(config["trial"], config["system"]) for config in of] == [
            (trial, system) for trial in range(3) for system in systems
        ]
    simulated = [config for config in configs if config not in real]
    assert [config["trial"] for config in simulated] == [0] * 4
    assert load_experiment("fig_fidelity")["common"]["system"] == list(SYSTEMS)
    assert {config["costs"]["name"] for config in simulated} == {"local"}
    assert {config["seed"] for config in configs} == {1}
    pairs = {(repr(config["workload"]), config["model"]["max_model_len"]) for config in configs}
    assert len(pairs) == 2  # real and simulated serve the same requests
    assert {row.point.folder.count("trial") for row in found.rows} == {0, 1}


def test_a_trial_is_another_point_and_changes_nothing_else() -> None:
    with composer() as compose:
        first, second = (
            plan(compose, parse([f"trial={trial}", "workload.duration_s=5"], sweep=False)).rows[0].point
            for trial in (0, 1)
        )
        with pytest.raises(KvbenchError, match="trial=-1 is negative"):
            plan(compose, parse(["trial=-1"], sweep=False))
    assert first.key != second.key
    assert {**first.config, "trial": 1} == second.config


def test_without_costs_of_this_machine_the_experiment_says_how_to_get_them() -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    if "local" in groups()["costs"]:
        pytest.skip("this machine has been calibrated")
    with composer() as compose, pytest.raises(KvbenchError, match=r"costs=local does not exist[^$]*kvbench.calibrate"):
        plan(compose, parse(["+experiment=fig_fidelity"], sweep=False))


def test_the_seed_is_not_the_calibration_s() -> None:
    from kvbench.calibrate.runs import DEFAULT_MODEL, SEED

    common = load_experiment("fig_fidelity")["common"]
    assert common["seed"] not in (SEED, SEED + 1)
    assert DEFAULT_MODEL.items() <= common.items()


def test_errors_are_against_the_median_and_the_spread_is_the_real_runs_own(tmp_path: Path) -> None:
    summary = fidelity._prepared(results(tmp_path, rows()))
    pair = fidelity.pair_of(summary, "poisson", "vllm", "throughput_tok_per_s")
    assert pair.error_pct == pytest.approx(10.0)
    assert pair.spread_pct == pytest.approx(12.0)
    assert (pair.real, pair.least, pair.most) == pytest.approx((100.0, 96.0, 108.0))


def test_the_table_names_every_error(tmp_path: Path) -> None:
    table = fidelity.table(results(tmp_path, rows()))
    assert table is not None
    lines = table.splitlines()
    line = next(line for line in lines if line.startswith("Poisson") and "vLLM" in line)
    assert " ".join(line.split()) == "Poisson vLLM 3 100 +10.0 % 12.0 % 0.1 +10.0 % 12.0 % +10.0 % +10.0 % 3/3"
    assert sum("+10.0 %" in line for line in lines) == 10 + 2
    assert "costs=local: fitted to 600 iterations (relative error: rms 4.5 %, 90 % within 6.2 %)" in table
    assert max(map(len, lines)) <= 130


def test_the_figure_tells_real_from_simulated_and_cuts_nothing(tmp_path: Path) -> None:
    figure = fidelity.draw(results(tmp_path, rows()))["fig_fidelity"]
    said = " ".join(text.get_text() for text in texts(figure)).replace("\n", " ")
    assert "opt_125m, measured on cpu, 2 threads" in said
    assert "Simulated (costs: local" in said
    assert "ShareGPT pairs of the authors' artifact" in said
    assert_nothing_is_cut(figure)


def test_expectations_hold_within_15_percent_of_three_runs(tmp_path: Path) -> None:
    found = fidelity.claims(results(tmp_path / "near", rows(1.14)))
    assert len(found) == 2 * 5 * 2
    assert [row.measured for row in found] == pytest.approx([1.14] * len(found))
    assert {row.verdict for row in found} == {Verdict.REPRODUCED}
    assert all("not the paper's" in row.note and "12.0 % apart" in row.note for row in found)
    far = fidelity.claims(results(tmp_path / "far", rows(0.84)))
    assert {row.verdict for row in far} == {Verdict.NOT_REPRODUCED}


def test_expectations_are_not_judged_on_less(tmp_path: Path) -> None:
    two = [row for i, row in enumerate(rows()) if i % 4]
    assert {row.verdict for row in fidelity.claims(results(tmp_path / "two", two))} == {Verdict.NOT_RUN}
    real = [row for row in rows() if row["costs"] is None]
    assert {row.verdict for row in fidelity.claims(results(tmp_path / "real", real))} == {Verdict.NOT_RUN}
    other = fidelity.claims(results(tmp_path / "model", rows(model="tiny_opt")))
    assert {row.verdict for row in other} == {Verdict.NOT_COMPARABLE}


@pytest.mark.parametrize("which", ["nothing", "real only", "simulated only"])
def test_what_is_missing_is_not_drawn(which: str, tmp_path: Path) -> None:
    given = [] if which == "nothing" else [row for row in rows() if (row["costs"] is None) == (which == "real only")]
    found = results(tmp_path, given)
    assert {row.verdict for row in fidelity.claims(found)} == {Verdict.NOT_RUN}
    if not given:
        assert fidelity.draw(found) == {}
        assert fidelity.table(found) is None
    else:
        assert_nothing_is_cut(fidelity.draw(found)["fig_fidelity"])
        assert "vLLM" in (fidelity.table(found) or "")
