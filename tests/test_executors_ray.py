"""Ray: two workers of this machine give what `serial` gives, and a killed one costs nobody but the killer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("ray") is None:  # nothing imports it before its settings are made
    pytest.skip("executor=ray needs make install EXTRAS=dev,ray", allow_module_level=True)

from kvbench.core import KvbenchError
from kvbench.executors.ray import SETTINGS, Ray
from tests.executor_jobs import check_a_kill, check_a_sweep_with_a_kill, process, sleep
from tests.single_node_slurm import free_port, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster that exists: a head with two cores, which knows of no other on this machine."""
    ports = [free_port(), free_port()]
    options = ("port", "dashboard-agent-listen-port")
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2"]
    command += [f"--{option}={port}" for option, port in zip(options, ports, strict=True)]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # a short name: sockets lie in it
        environment = os.environ | SETTINGS | {"PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "disabled"}
        log = (Path(folder) / "head.log").open("wb")
        head = subprocess.Popen([*command, f"--temp-dir={folder}"], env=environment, stdout=log, stderr=log)
        try:
            wait_for(lambda: b"Ray runtime started" in (Path(folder) / "head.log").read_bytes(), seconds=120)
            yield f"127.0.0.1:{ports[0]}"
        except TimeoutError:
            pytest.fail((Path(folder) / "head.log").read_text())
        finally:
            head.terminate()
            head.wait(30)
            log.close()


def test_a_cluster_is_started_and_ended() -> None:
    found = dict(Ray(num_workers=2).run(process, [1, 2, 3, 4]))
    assert sorted(found) == [1, 2, 3, 4]
    assert os.getpid() not in found.values()


def test_a_killed_worker_costs_nobody_but_the_killer(address: str, tmp_path: Path) -> None:
    check_a_kill(Ray(address), tmp_path)


def test_a_sweep_on_a_cluster_is_one_in_this_process(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_a_sweep_with_a_kill(Ray(address))


def test_a_closed_run_leaves_no_task(address: str) -> None:
    results = Ray(address).run(sleep, [0.0, 600.0, 600.0])
    assert next(results) == (0.0, 0.0)
    started = time.monotonic()
    results.close()
    assert len(dict(Ray(address).run(process, [1, 2]))) == 2
    assert time.monotonic() - started < 300


def test_an_unexpected_error_comes_through(address: str) -> None:
    with pytest.raises(TypeError):
        list(Ray(address).run(sleep, ["a"]))


def test_nothing_to_do() -> None:
    assert list(Ray().run(process, [])) == []


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ray().num_workers
    assert Ray("auto").num_workers is None
    with pytest.raises(KvbenchError, match=r"executor\.num_workers=0"):
        Ray(num_workers=0)
    with pytest.raises(KvbenchError, match="give one of them"):
        Ray("auto", 2)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(KvbenchError, match="make install EXTRAS=dev,ray"):
        Ray()


def test_nobody_at_the_address() -> None:
    with pytest.raises(KvbenchError, match=r"no Ray cluster answers there.*ray start --head"):
        list(Ray("127.0.0.1:1").run(process, [1]))


def test_settings_are_made_before_ray_reads_them() -> None:
    """Without them a node that others keep busy for half a minute is given up, or ends this process."""
    code = "from kvbench.executors.ray import Ray; Ray(); from ray._raylet import Config as c; "
    code += "print(c.health_check_failure_threshold(), c.raylet_client_num_connect_attempts())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    names = ("RAY_health_check_failure_threshold", "RAY_raylet_client_num_connect_attempts")
    assert done.stdout.split() == [SETTINGS[name] for name in names]
