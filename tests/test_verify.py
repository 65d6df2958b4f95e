"""``python -m kvbench.verify`` on allocators that live outside of kvbench."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.verify import main

Run = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parent.parent

# What somebody would write who read only the protocol: one call per token, nothing shared.
PLAIN = '''
from kvbench.allocators.base import Ability, AllocationError
from kvbench.core import Fit, Usage


class Plain:
    abilities = Ability.ANY_SIZE | Ability.GROW

    def __init__(self, num_slots, block_size=16):
        self.num_slots, self.block_size = num_slots, block_size
        self.pages = set(range(num_slots // block_size))
        self.num_pages = len(self.pages)
        self.tables, self.lens = {}, {}

    def _pages(self, slots):
        return -(-slots // self.block_size)

    def can_allocate(self, slots, keep=0, count=1):
        need = count * self._pages(slots) + self._pages(keep)
        if need > self.num_pages:
            return Fit.NEVER
        return Fit.OK if need <= len(self.pages) else Fit.LATER

    def allocate(self, seq, slots):
        if seq in self.tables or slots < 1:
            raise ValueError(seq)
        need = self._pages(slots)
        if need > len(self.pages):
            raise AllocationError((need - len(self.pages)) * self.block_size)
        self.tables[seq] = sorted(self.pages)[:need]
        self.pages -= set(self.tables[seq])
        self.lens[seq] = need * self.block_size
        return self.lens[seq]

    def can_append(self, num_seqs):
        return num_seqs <= len(self.pages)

    def append(self, seqs, copies):
        due = [seq for seq in seqs if self.lens[seq] == len(self.tables[seq]) * self.block_size]
        if len(due) > len(self.pages):
            raise AllocationError((len(due) - len(self.pages)) * self.block_size)
        for seq in due:
            self.tables[seq].append(min(self.pages))
            self.pages.remove(self.tables[seq][-1])
        for seq in seqs:
            self.lens[seq] += 1
        return 1

    def free(self, seq):
        self.pages.update(self.tables.pop(seq))
        del self.lens[seq]

    def slots(self, seq):
        return [page * self.block_size + i for page in self.tables[seq] for i in range(self.block_size)]

    def usage(self):
        free = len(self.pages) * self.block_size
        used = self.num_pages * self.block_size - free
        return Usage(used, self.num_slots - used, free)


class Forgetful(Plain):
    def free(self, seq):
        self.pages.update(self.tables.pop(seq)[1:])


class Pushy(Plain):
    """Raises when it is too late."""

    def append(self, seqs, copies):
        for seq in seqs:
            super().append([seq], copies)
        return 1


class Overlapping(Plain):
    """Gives everybody the first page; that largest_free is wrong ends every run before there are two."""

    def allocate(self, seq, slots):
        granted = super().allocate(seq, slots)
        self.tables[seq] = [0, *self.tables[seq][1:]]
        return granted

    def usage(self):
        usage = super().usage()
        usage.largest_free -= usage.used > 0
        return usage


class Unfinished:
    def __init__(self, num_slots):
        self.num_slots = num_slots


class Renamed(Plain):
    def __init__(self, num_slots):
        super().__init__(num_slots // 2)


not_a_class = 3
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    (folder / "mine.py").write_text(PLAIN)
    (folder / "wrong.py").write_text("def f(:\n")
    return folder


@pytest.fixture
def verify(package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.syspath_prepend(str(package))

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_command_on_a_plug_in(package: Path) -> None:
    command = [sys.executable, "-m", "kvbench.verify", "mine:Plain", "--examples", "20", "block_size=4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["mine:Plain(num_slots=130, block_size=4)", "declares ANY_SIZE, GROW"]
    assert sum(line.startswith("  passed ") for line in lines) == 16
    not_asked = [line.split()[2] for line in lines if line.startswith("  not asked")]
    assert not_asked == ["fork", "extend", "prefix", "refork", "swap", "can_swap_in"]
    assert lines[-1] == "16 of 16 laws hold"
    assert {path.name for path in package.iterdir()} <= {"mine.py", "wrong.py", "__pycache__"}


def test_without_hypothesis_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['hypothesis'] = None; from kvbench.verify import main; "
        "sys.exit(main(['kvbench.allocators.paged:Paged']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvbench.verify: the conformance suite needs hypothesis; pip install hypothesis\n"


def test_report_of_a_leak(verify: Run) -> None:
    code, out, err = verify("mine:Forgetful", "--num-slots", "26", "--block-size", "4", "--examples", "20")
    assert (code, err) == (1, "")
    assert "  FAILED       books " in out
    title, *calls = out.split("\n\n")[2].splitlines()
    assert title.startswith("books: usage().used is ")
    assert title.endswith(", but sequences hold 0 different slots")
    assert calls[-1].endswith(". free(A)")
    assert len(calls) <= 4
    assert "  not reached  leak " in out
    assert "\n\n14 of 16 laws hold; not reached: 1, as " in out


def test_report_of_a_state_changed_on_error(verify: Run) -> None:
    code, out, _ = verify("mine:Pushy", "--num-slots", "26", "--block-size", "4", "--examples", "30")
    assert code == 1
    assert "  FAILED       atomic " in out
    assert "raised, yet " in out


def test_what_no_run_came_to_has_not_passed(verify: Run) -> None:
    code, out, _ = verify("mine:Overlapping", "--num-slots", "26", "--block-size", "4", "--examples", "20")
    verdicts = {line[15:26].strip(): line[2:13].strip() for line in out.splitlines()[3:25]}
    assert code == 1
    assert (verdicts["largest"], verdicts["protocol"], verdicts["fork"]) == ("FAILED", "passed", "not asked")
    assert {verdicts[name] for name in ("exclusive", "memory", "room", "leak")} == {"not reached"}
    missed = list(verdicts.values()).count("not reached")
    held = list(verdicts.values()).count("passed")
    expected = f"{held} of 16 laws hold; not reached: {missed}, as what failed ends a run before; mend that"
    assert out.splitlines()[-1].startswith(expected)


def test_unfinished_class_is_told_what_is_missing(verify: Run) -> None:
    code, out, _ = verify("mine:Unfinished")
    assert code == 1
    assert "protocol: abilities is None, not a kvbench.allocators.base.Ability" in out
    assert "  passed " not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["mine"], "'mine' names no class; write package.module:Class"),
        (["mine:"], "'mine:' names no class; write package.module:Class"),
        (["mine:not_a_class"], "mine:not_a_class is not a class; write package.module:Class"),
        (["mine:Absent"], "cannot import mine:Absent: AttributeError: module 'mine' has no attribute 'Absent'"),
        (["absent:Absent"], "cannot import absent:Absent: ModuleNotFoundError: No module named 'absent'"),
        (["wrong:Class"], "cannot import wrong:Class: SyntaxError: invalid syntax (wrong.py, line 1)"),
        (["mine:Plain", "size"], "'size' is not an option of the allocator; write key=value"),
        (["mine:Plain", "--block-size=4", "block_size=4"], "block_size is given twice; give it once"),
        (["mine:Plain", "--examples=0"], "--examples=0: give at least 1"),
        (["mine:Plain", "--num-slots", "-5"], "--num-slots=-5: give at least 1"),
        (["mine:Plain", "--num-slots=0"], "--num-slots=0: give at least 1"),
        (["mine:Renamed"], "mine:Renamed(num_slots=130) says num_slots=65; it must say what it was given"),
        (
            ["mine:Unfinished", "size=yes"],
            "cannot build mine:Unfinished(num_slots=130, size=True): "
            "TypeError: Unfinished.__init__() got an unexpected keyword argument 'size'",
        ),
        (
            ["kvbench.allocators.paged:Paged", "--block-size", "0"],
            "cannot build kvbench.allocators.paged:Paged(num_slots=130, block_size=0): "
            "allocator.block_size=0: a block holds at least 1 slot; give 1 or more",
        ),
    ],
)
def test_mistakes_are_one_line(verify: Run, argv: list[str], message: str) -> None:
    code, out, err = verify(*argv)
    assert (code, out) == (2, "")
    assert err == f"kvbench.verify: {message}\n"
