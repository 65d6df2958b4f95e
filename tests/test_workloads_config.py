"""conf/workload: every file builds its workload, with the options it names."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from kvbench.core import KvbenchError

CONF = Path(__file__).resolve().parent.parent / "conf"
NAMES = sorted(path.stem for path in (CONF / "workload").glob("*.yaml"))
ROOT_CONFIG = """
defaults:
  - workload: sharegpt
  - _self_
seed: 7
data_dir: nowhere
model: {max_model_len: 2048}
"""


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """Compose the group alone, so that these tests need no other part of the configuration."""
    shutil.copytree(CONF / "workload", tmp_path / "workload")
    (tmp_path / "config.yaml").write_text(ROOT_CONFIG)

    def build(*overrides: str) -> Any:
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return instantiate(compose("config", overrides=list(overrides)).workload)

    return build


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_is_built_from_the_options_around_it(build: Any, name: str) -> None:
    workload = build(f"workload={name}")
    assert (workload.name, workload.seed, workload.max_model_len) == (name, 7, 2048)
    for option in ("request_rate", "duration_s", "num_requests", "invalid"):
        assert hasattr(workload, option)


def test_known_sets_drop_and_a_users_file_is_checked(build: Any) -> None:
    assert {name for name in NAMES if build(f"workload={name}").invalid == "error"} == {"trace", "fixed"}


@pytest.mark.parametrize(("choice", "rate"), [("paper", 2.0), ("poisson", 2.0), ("gamma", 2.0), ("all_at_once", None)])
@pytest.mark.parametrize("name", ["sharegpt", "alpaca", "fixed"])
def test_every_rule_of_arrival_goes_with_every_data_set(build: Any, name: str, choice: str, rate: float | None) -> None:
    overrides = [f"workload={name}", f"workload/arrivals={choice}", "workload.num_requests=50"]
    workload = build(*overrides, *(["workload.request_rate=2.0"] if rate else []))
    assert workload.request_rate == rate
    assert type(workload.arrivals).__name__.lower() == choice.replace("_", "")
    assert len(workload.generate().requests) == 50


def test_all_at_once_is_the_whole_data_set(build: Any) -> None:
    assert len(build("workload=alpaca", "workload/arrivals=all_at_once").generate().requests) == 52_002


def test_a_users_trace_by_its_path(build: Any) -> None:
    small = Path(__file__).with_name("data") / "small_trace.csv"
    workload = build("workload=trace", f"workload.path={small}", "workload.invalid=clip")
    assert len(workload.generate().requests) == 200
    with pytest.raises(KvbenchError, match=r"needs workload\.path"):
        build("workload=trace").generate()


@pytest.mark.parametrize("name", ["azure_conv", "azure_code", "mooncake", "vtc"])
def test_a_known_trace_that_is_absent_says_how_to_get_it(build: Any, name: str) -> None:
    with pytest.raises(KvbenchError, match=r"nowhere/.* does not exist \(workload=.*`make data` fetches"):
        build(f"workload={name}").inputs()
