"""A Slurm cluster of this machine alone, for tests: Debian's slurmctld, slurmd and munged, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "munged")
PACKAGES = "slurmctld slurmd slurm-client munge"

CONFIGURATION = """\
ClusterName=kvbench
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MinJobAge=60
KillWait=2
ReturnToService=2
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs={num_cores} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install {PACKAGES}"
    return None if os.geteuid() == 0 else "slurmd needs root"


@contextmanager
def cluster(folder: Path, num_cores: int = 2) -> Iterator[dict[str, str]]:
    """Run one while inside; yields the environment in which its clients find it."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    ports = [free_port(), free_port()]
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=host, controller_port=ports[0], daemon_port=ports[1], folder=folder, num_cores=num_cores
        )
    )
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(128))
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    with ExitStack() as stack:
        for command in (
            ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
             f"--log-file={folder}/munged.log", f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed"],
            ["slurmctld", "-D", "-i", "-f", str(configuration)],
            ["slurmd", "-D", "-f", str(configuration)],
        ):  # fmt: skip
            stack.enter_context(_running(command, environment, folder / f"{command[0]}.out"))
            if command[0] == "munged":
                wait_for((folder / "munge.socket").exists)
        wait_for(lambda: "idle" in _output(["sinfo", "-h", "-o", "%T"], environment))
        yield {"SLURM_CONF": str(configuration)}


@contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _output(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Return once ``condition`` holds. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the cluster did not start; its folder has logs")
        time.sleep(0.1)


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
