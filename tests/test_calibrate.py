"""Iteration costs of this machine: the regression finds known ones, the file keeps them, mistakes are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kvbench import composition
from kvbench.calibrate import __main__ as command
from kvbench.calibrate import costs_file
from kvbench.calibrate.regression import fit, predicted_ms, residuals
from kvbench.calibrate.runs import Iterations, Measured, designs, joined, measure
from kvbench.composition import Composer, composer, parse
from kvbench.core import Batch, KvbenchError, Request, Sequence
from kvbench.parts import build
from kvbench.runners.simulated import IterationCosts, Simulated
from tests.extras import NEEDS_MODELS

pytest.importorskip("scipy", reason="calibrating needs make install EXTRAS=dev")

TRUE = {"a_ms": 25.0, "b_ms": 4.5e-3, "c_ms": 2.2, "p_ms": 1.4, "q_ms": 2e-3}


def iterations(costs: dict[str, Any], noise: float = 0.02, outliers: float = 0.0, num_rows: int = 600) -> Iterations:
    """Mixed iterations of known cost, with multiplicative noise and some that something else slowed down."""
    rng = np.random.default_rng(7)
    num_requests = rng.integers(1, 49, num_rows).astype(np.float64)
    context_len = num_requests * rng.integers(8, 250, num_rows)
    lengths = rng.integers(8, 250, num_rows) * (rng.random(num_rows) < 0.3)
    shape = Iterations(num_requests, context_len, lengths.astype(float), lengths.astype(float) ** 2, num_requests)
    ms = predicted_ms(costs, shape) * (1 + noise * rng.standard_normal(num_rows))
    slow = rng.random(num_rows) < outliers
    return shape._replace(ms=np.where(slow, ms * rng.uniform(2, 5, num_rows), ms))


def first(of: Iterations, count: int) -> Iterations:
    return Iterations(*(column[:count] for column in of))


def test_a_fit_recovers_the_coefficients_in_spite_of_noise_and_outliers() -> None:
    found = fit(iterations(TRUE, outliers=0.1)).coefficients
    assert found == pytest.approx(TRUE, rel=0.06)
    exact = fit(iterations(TRUE, noise=0.0)).coefficients
    assert exact == pytest.approx(TRUE, rel=1e-3)


def test_a_second_segment_is_found_where_there_is_one_and_only_there() -> None:
    bent = TRUE | {"c_ms": 0.5, "c_large_ms": 3.0, "c_knee": 12}
    found = fit(iterations(bent))
    assert found.coefficients["c_knee"] == 12
    assert found.coefficients["c_large_ms"] == pytest.approx(3.0, rel=0.1)
    assert found.dropped == []
    assert "c_knee" not in fit(iterations(TRUE)).coefficients


def test_what_is_not_determined_is_left_out() -> None:
    flat = TRUE | {"b_ms": 0.0, "q_ms": 0.0}
    found = fit(iterations(flat))
    assert found.dropped == ["b_ms", "q_ms"]
    assert found.coefficients["b_ms"] == found.coefficients["q_ms"] == 0.0
    assert found.coefficients["p_ms"] == pytest.approx(TRUE["p_ms"], rel=0.05)

    of = iterations(TRUE)
    alike = of._replace(context_len=100 * of.num_requests)  # nothing tells context from requests
    alike = alike._replace(ms=predicted_ms(TRUE, alike) * of.ms / predicted_ms(TRUE, of))
    assert "b_ms" in fit(alike).dropped


def test_too_few_iterations_are_refused() -> None:
    with pytest.raises(KvbenchError, match="19 iterations determine no costs"):
        fit(first(iterations(TRUE), 19))


def test_residuals_are_those_of_the_fit_and_of_what_was_held_out() -> None:
    of = iterations(TRUE, noise=0.0)
    slower = of._replace(ms=of.ms * 1.25)
    assert residuals(TRUE, of, slower) == {
        "num_iterations": 600,
        "rms_pct": 0.0,
        "p90_pct": 0.0,
        "held_out_iterations": 600,
        "held_out_total_pct": -20.0,
    }
    assert residuals(TRUE, slower, of)["rms_pct"] == 20.0
    assert len(joined([of, slower]).ms) == 1200


@pytest.mark.parametrize("bent", [{}, {"c_ms": 0.5, "c_large_ms": 3.0, "c_knee": 12}])
def test_the_regression_prices_as_the_simulated_runner_does(bent: dict[str, Any]) -> None:
    costs = TRUE | bent
    decodes = [Sequence(Request(i, 0.0, 5 + i, 9), 14 + i, 5 + i, origin=-(5 + i)) for i in range(20)]
    prefills = [Sequence(Request(i, 0.0, 30, 9), 39, 30, origin=3 - 30) for i in range(20, 22)]
    context_len = sum(3 - seq.origin for seq in decodes)
    batch = Batch(3, dict.fromkeys([*decodes, *prefills]), 20, context_len, prefills)
    shape = Iterations(*(np.array([float(n)]) for n in (22, context_len, 60, 2 * 30**2, 1)))
    priced = Simulated(IterationCosts(**costs)).execute(batch).seconds
    assert 1e3 * priced == pytest.approx(float(predicted_ms(costs, shape)[0]))


def test_a_packed_engine_is_not_charged_for_padding() -> None:
    """A request-level batch: prompts of 10 and 30 tokens, the first of which has finished in the second iteration."""
    seqs = [Sequence(Request(i, 0.0, n, 9), n + 9, n, origin=4 - n) for i, n in enumerate((10, 30))]
    prefill = Batch(4, dict.fromkeys(seqs), 0, 0, seqs, prefill_len=30)
    decode = Batch(5, dict.fromkeys(seqs), 2, 2 * 31)
    costs: dict[str, Any] = {"a_ms": 0.0, "b_ms": 1.0, "c_ms": 0.0, "p_ms": 1.0, "q_ms": 1.0}
    for packed, tokens, squares, context_len in ((False, 60, 1800, 62), (True, 40, 1000, 42)):
        runner = Simulated(IterationCosts(**costs, packed=packed))
        assert 1e3 * runner.execute(prefill).seconds == pytest.approx(tokens + squares)
        assert 1e3 * runner.execute(decode).seconds == pytest.approx(context_len)


def test_runs_spread_what_the_terms_depend_on() -> None:
    for max_model_len in (256, 2048):
        found = designs(max_model_len)
        assert found["held out"]["workload.seed"] != found["mixed"]["workload.seed"]
        counts = {each["workload.num_requests"] for each in found.values()}
        lengths = [each["workload.lengths.prompt_len"] for each in found.values() if each["workload"] == "fixed"]
        assert {1, 32} <= counts
        assert max(lengths) > 0.8 * max_model_len > 16 * min(lengths)
        alike = [each for each in found.values() if each["workload"] == "fixed"]
        assert all(
            each["workload.lengths.prompt_len"] + each["workload.lengths.output_len"] <= max_model_len for each in alike
        )


# The file


def store(path: Path, model: str = "opt_125m", **more: Any) -> None:
    costs_file.store(path, model, {**TRUE, "packed": True, **more}, "measured", {"rms_pct": 1.0})


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of conf/ that a calibration may write to."""
    copy = tmp_path / "conf"
    for path in composition.CONF.rglob("*.yaml"):
        if path.stem != "local" or path.parent.name != "costs":
            target = copy / path.relative_to(composition.CONF)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(composition, "CONF", copy)
    monkeypatch.setattr(command, "CONF", copy)
    composition.groups.cache_clear()
    yield copy
    composition.groups.cache_clear()


def resolve(compose: Composer, text: str) -> dict[str, Any]:
    [settings] = parse(text.split(), sweep=False)
    return compose.resolve(settings).point


def test_entries_of_other_models_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    store(path)
    store(path, "tiny_llama", a_ms=1.0)
    store(path, a_ms=30.0)
    models = costs_file.load(path)
    assert {model: entry["a_ms"] for model, entry in models.items()} == {"opt_125m": 30.0, "tiny_llama": 1.0}
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["name"] == "mine"


@pytest.mark.parametrize("system", ["fastertransformer", "orca_max", "vllm"])
def test_a_stored_file_prices_a_simulated_run_of_this_machine(conf: Path, system: str) -> None:
    store(conf / "costs" / "local.yaml")
    composition.groups.cache_clear()
    with composer() as compose:
        point = resolve(compose, f"runner=simulated model=opt_125m costs=local system={system} kv_cache_seqs=4")
        elsewhere = resolve(compose, f"model=opt_125m costs=local system={system} hardware=h200 kv_cache_seqs=4")
    assert point["hardware"]["name"] == "local"
    assert point["costs"]["name"] == "local"
    assert point["costs"]["residuals"] == {"rms_pct": 1.0}
    assert point["costs"]["a_ms"] == TRUE["a_ms"]
    assert build(point).open_runner().device_name == "simulated"
    with pytest.raises(KvbenchError, match="not on hardware=h200"):
        build(elsewhere)


def test_missing_costs_name_the_command_that_makes_them(conf: Path) -> None:
    with composer() as compose:
        with pytest.raises(KvbenchError, match=r"costs=local does not exist.*\n.*python -m kvbench.calibrate"):
            resolve(compose, "model=opt_125m costs=local")
        store(conf / "costs" / "local.yaml")
        composition.groups.cache_clear()
        with pytest.raises(KvbenchError, match=r"no entry for model=tiny_opt.*\n.*kvbench.calibrate model=tiny_opt"):
            resolve(compose, "model=tiny_opt costs=local")


# The command


def test_the_command_measures_fits_and_writes(
    conf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of = iterations(TRUE | {"b_ms": 0.0})
    asked: list[dict[str, Any]] = []

    def measured(overrides: dict[str, Any], passes: int) -> Measured:
        asked.append(overrides)
        return Measured(of, first(of, 100), "opt_125m", "cpu, 2 threads, float32", "local")

    monkeypatch.setattr(command, "measure", measured)
    assert command.main(["model.dtype=float32", "--name", "mine"]) == 0
    assert asked == [{"model.dtype": "float32"}]
    entry = costs_file.load(conf / "costs" / "mine.yaml")["opt_125m"]
    assert entry["hardware"] == "local"
    assert entry["c_ms"] == pytest.approx(TRUE["c_ms"], rel=0.05)
    assert entry["packed"] is True
    assert entry["residuals"]["left_out"] == ["b_ms"]
    assert entry["residuals"]["num_iterations"] == 600
    assert "model.dtype=float32: real runs on cpu, 2 threads, float32" in entry["source"]
    said = capsys.readouterr().out
    assert "costs=mine" in said
    assert f"{entry['c_ms']:g}  ms per request" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", "paper_engine"], "was not written by a calibration"),
        (["--name", "../mine"], "names no file"),
        (["--passes", "0"], "measures nothing"),
        (["model"], "cannot read 'model'"),
        (["runner=simulated"], "runner=simulated computes nothing"),
        (["costs=paper_engine"], "costs=paper_engine prices simulated runs"),
        (["model=opt"], "model=opt does not exist"),
        (["hardware=h200"], "only this machine can be measured"),
        (["model=tiny_opt", "model.max_model_len=8"], "too short to vary lengths"),
    ],
)
def test_a_mistake_is_told_and_measures_nothing(
    arguments: list[str], said: str, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    assert command.main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvbench.calibrate: ")
    assert said in told
    assert len(told.splitlines()) <= 2
    assert {path.stem for path in (conf / "costs").glob("*.yaml")}.isdisjoint({"local", "mine"})


def test_real_iterations_are_measured_whole() -> None:
    """The tiniest model: what is summed of the batches is what the steps table says."""
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    found = measure({"model": "tiny_opt", "model.max_model_len": 64, "model.num_parameters": 470784}, passes=1)
    assert found.model == "tiny_opt"
    assert found.device.startswith("cpu, ")
    assert (found.fitted.ms > 0).all()
    assert found.fitted.num_requests.max() == 32
    long = found.fitted.prefill_len[found.fitted.num_requests == 1]
    assert {48.0, 56.0} <= set(long)
    one = (found.fitted.num_requests == 1) & (found.fitted.prefill_len > 0)
    assert (found.fitted.square_len[one] == found.fitted.prefill_len[one] ** 2).all()
    fit(found.fitted)
