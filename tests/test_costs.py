"""The coefficients that ship: each file is complete, each entry says where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.core import Batch, KvbenchError, Request, Sequence
from kvbench.runners.simulated import NOT_COEFFICIENTS, IterationCosts, Simulated

CONF = Path(__file__).resolve().parent.parent / "conf"
FILES = sorted(path.stem for path in CONF.glob("costs/*.yaml") if "residuals:" not in path.read_text(encoding="utf-8"))
"""Those that ship: what was fitted to some machine carries residuals."""


def load(stem: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CONF / "costs" / f"{stem}.yaml").read_text(encoding="utf-8")))


def entries() -> list[tuple[str, str]]:
    return [(stem, model) for stem in FILES for model in load(stem)["models"]]


def costs_of(stem: str, model: str) -> IterationCosts:
    entry = load(stem)["models"][model]
    return IterationCosts(**{key: value for key, value in entry.items() if key not in NOT_COEFFICIENTS})


@pytest.mark.parametrize("stem", ["paper_engine", "fastertransformer"])
def test_both_engines_have_the_four_models_of_the_paper(stem: str) -> None:
    assert set(load(stem)["models"]) == {"opt_13b", "llama_13b", "opt_66b", "opt_175b"}


@pytest.mark.parametrize("stem", FILES)
def test_a_file_carries_its_name(stem: str) -> None:
    assert load(stem)["name"] == stem


@pytest.mark.parametrize(("stem", "model"), entries())
def test_an_entry_builds_costs_and_says_where_they_come_from(stem: str, model: str) -> None:
    entry = load(stem)["models"][model]
    assert (CONF / "model" / f"{model}.yaml").is_file()
    assert (CONF / "hardware" / f"{entry['hardware']}.yaml").is_file()
    assert len(entry["source"]) > 20
    costs = costs_of(stem, model)
    assert costs.a_ms > 10  # reading the weights once takes longer on any of these machines
    assert costs.context_factor(16) == 1.0  # b is that of the paper's block size


@pytest.mark.parametrize("model", ["opt_13b", "opt_66b", "opt_175b"])
def test_fastertransformer_has_less_overhead_per_iteration(model: str) -> None:
    """Both read the same weights; idle, the paper has 0.024 / 0.038 / 0.056 s against 0.030 / 0.053 / 0.088 s."""
    assert costs_of("fastertransformer", model).a_ms < costs_of("paper_engine", model).a_ms


def test_small_blocks_are_read_more_slowly() -> None:
    """Fig. 18(b): the paper's best block sizes for ShareGPT are 16 to 128."""
    factors = [costs_of("paper_engine", "opt_13b").context_factor(size) for size in (1, 8, 16, 256)]
    assert factors[0] > factors[1] > factors[2] < factors[3]


def test_a_swap_pays_for_pieces_and_bytes_in_its_own_direction() -> None:
    costs = costs_of("paper_engine", "opt_13b")
    assert costs.swap_ms(80, 13_107_200, out=True) == pytest.approx(80 * 1.9e-3 + 13.1072 / 13.1)
    assert costs.swap_ms(80, 13_107_200, out=False) == pytest.approx(80 * 3.2e-3 + 13.1072 / 11.9)
    free = IterationCosts(1, 0, 0, 0, 0, swap_out_call_us=1.0)
    assert free.swap_ms(1000, 10**9, out=True) == 1.0
    assert free.swap_ms(1000, 10**9, out=False) == 0.0


def test_a_prompt_alone_hides_computing_behind_the_weights_or_the_other_way_round() -> None:
    costs = IterationCosts(30.0, 0, 1.0, 0, 0, weights_ms=20.0, alone_ms=0.1)
    assert costs.prompt_alone_ms(10) == 30.0 + 1.0  # the weights take longer
    assert costs.prompt_alone_ms(200) == 30.0 + 1.0
    assert costs.prompt_alone_ms(500) == 10.0 + 1.0 + 50.0
    with pytest.raises(KvbenchError, match="weights_ms and alone_ms"):
        IterationCosts(30.0, 0, 1.0, 0, 0).prompt_alone_ms(10)


def test_the_factor_of_the_kernel_can_be_left_out() -> None:
    costs = IterationCosts(0, 1.0, 0, 0, 0, context_factors={8: 2.0, 16: 1.0})
    request = Request(0, 0.0, 5, 9)
    batch = Batch(5, {Sequence(request, 14, 5): None}, 1, 5)
    assert Simulated(costs, 8).execute(batch).seconds == pytest.approx(10e-3)
    assert Simulated(costs, 8, kernel_factor=False).execute(batch).seconds == pytest.approx(5e-3)
