"""Every command ends alike: a user's mistake with a line and 2, Ctrl-C with a line that says what stays and 130."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvbench import app, command
from kvbench.core import KvbenchError
from tests.extras import NEEDS_MODELS

PACKAGE = Path(command.__file__).parent
COMMANDS = {
    "kvbench": (["system=vlm"], "app.plan"),
    "kvbench.calibrate": (["--passes", "0"], "calibrate.__main__.calibrate"),
    "kvbench.compare": (["nowhere"], "compare.select"),
    "kvbench.export": (["nowhere"], "export.Results"),
    "kvbench.fit": ([], "fit.__main__._compare"),
    "kvbench.memory_map": (["nowhere"], "memory_map.__main__.draw"),
    "kvbench.models.describe": (["no/such.gguf"], "models.describe.describe"),
    "kvbench.reference": (["nothing"], "reference.regenerate"),
    "kvbench.report": (["nowhere"], "report.__main__.write"),
    "kvbench.verify": (["nothing"], "verify._builder"),
    "kvbench.workloads.download": (["nothing"], "workloads.download._fetch_all"),
}
"""Command -> a mistake, and what works for a while in it."""
NO_MISTAKE = {"kvbench.schema"}
"""Commands that read nothing from a user."""


def run(name: str, arguments: list[str], where: str) -> int:
    """Call a command in this process."""
    if name == "kvbench.models.describe":
        pytest.importorskip("torch", reason=NEEDS_MODELS)
    status: int = import_module(f"kvbench.{where.rpartition('.')[0]}").main(arguments)
    return status


pytestmark = pytest.mark.usefixtures("elsewhere")


def test_these_are_all_commands() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found.add(".".join(part for part in parts if part != "__main__"))
    assert found == COMMANDS.keys() | NO_MISTAKE


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_is_told_in_a_line_or_two(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, *COMMANDS[name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{name}: ")
    assert 1 <= len(said.err.splitlines()) <= 2
    assert not list(Path().iterdir())


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interruption_says_what_stays(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    _, where = COMMANDS[name]
    if name == "kvbench.models.describe":
        pytest.importorskip("torch", reason=NEEDS_MODELS)
    monkeypatch.setattr(f"kvbench.{where}", interrupt)
    arguments = {"kvbench": [], "kvbench.fit": ["--curves", "a"], "kvbench.calibrate": [], "kvbench.reference": []}
    words = ["smollm"] if name == "kvbench.models.describe" else ["mooncake"]
    assert run(name, arguments.get(name, words), where) == 130
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: interrupted; ")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a short run with its memory map."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["workload=fixed", "workload.num_requests=3", "memory_map=true", "executor=serial", "name=mine"]
    assert app.main([*words, f"results_dir={folder}", f"data_dir={folder}"]) == 0
    return folder / "mine"


@pytest.mark.parametrize("place", ["/proc/x", "file", "file/below"])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("kvbench.compare", "--to PLACE"),
        ("kvbench.export", "--to PLACE"),
        ("kvbench.memory_map", "--seconds 0 --to PLACE"),
        ("kvbench.report", "--to PLACE/report.html"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(
    name: str, option: str, place: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert run(name, [str(finished), *option.replace("PLACE", place).split()], COMMANDS[name][1]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: {place}")
    assert "cannot be read or written: " in line
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_an_error_of_ours_with_a_disk_keeps_its_traceback_and_a_full_disk_has_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def action(error: OSError) -> int:
        raise error

    with pytest.raises(OSError, match="ours"):
        command.run("kvbench.x", lambda: action(OSError("ours")))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert command.run("kvbench.x", lambda: action(full)) == 2
    assert capsys.readouterr().err == "kvbench.x: No space left on device\n"


def test_an_interruption_may_say_it_itself(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise KeyboardInterrupt("interrupted with 3 of 4 done")

    assert command.run("kvbench.x", action) == 130
    assert capsys.readouterr().err == "kvbench.x: interrupted with 3 of 4 done\n"


def test_what_is_no_mistake_keeps_its_traceback() -> None:
    def action() -> int:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        command.run("kvbench.x", action)


def test_a_status_is_passed_on() -> None:
    assert command.run("kvbench.x", lambda: 1) == 1


def test_a_reader_may_leave() -> None:
    """As ``| head`` does: no complaint, and no error when what is left is flushed."""
    program = (
        "import os, sys; from kvbench import command\n"
        "def action():\n    print('x' * 100_000, flush=True); return 1\n"
        "sys.exit(command.run('kvbench.x', action))"
    )
    command_line = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command_line, cwd=PACKAGE.parent, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_mistakes_are_exceptions_of_kvbench(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise KvbenchError("first\nsecond")

    assert command.run("kvbench.x", action) == 2
    assert capsys.readouterr().err == "kvbench.x: first\nsecond\n"
