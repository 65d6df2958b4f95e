"""The site: what is generated for its pages."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("experiment", "commands"),
    [
        ("fig_throughput", ["make fig_throughput"]),
        ("memory_map", ["python -m kvbench +experiment=memory_map"]),
        ("fig_online_latency", ["make fig_online_latency EXTRAS=dev,models"]),
        ("fig_sharing_measured", ["make fig_sharing_measured EXTRAS=dev,models"]),
        ("fig_kernel_overhead", ["make fig_kernel_overhead EXTRAS=dev,models  # needs a GPU"]),
        (
            "fig_swap_microbenchmark",
            ["make fig_swap_microbenchmark", "make fig_swap_microbenchmark EXTRAS=dev,models ARGS=runner=cpu"],
        ),
        (
            "fig_fidelity",
            ["make install EXTRAS=dev,models", "python -m kvbench.calibrate", "make fig_fidelity EXTRAS=dev,models"],
        ),
    ],
)
def test_an_experiment_is_shown_with_commands_that_work(
    hooks: ModuleType, experiment: str, commands: list[str]
) -> None:
    page = hooks.experiments()
    shown = page.partition(f"### {experiment}\n")[2].partition("```sh\n")[2].partition("\n```")[0]
    assert shown.splitlines() == commands


def test_numbers_of_claims_have_four_digits_on_the_page(hooks: ModuleType) -> None:
    """``claims.csv`` has more."""
    numbers = {"paper_low": "4.3046721", "paper_high": "", "measured": "0.0859748", "unit": "x"}
    row = {"claim": "c", "figure": "Fig. 12(a)", "verdict": "undecided", "note": "n", **numbers}
    assert hooks._claim(row) == "| c | Fig. 12(a) | at least 4.305 x | 0.08597 | undecided | n |"
