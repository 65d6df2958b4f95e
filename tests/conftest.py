"""Where nothing may be missing (``KVBENCH_REQUIRE_ALL=1``, set by .ci/run), a skipped test is a failed one."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from kvbench.composition import Composer

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _fail_skips(report: Report) -> Report:
    """Turn a skip (not an expected failure) into a failure that keeps its reason."""
    if os.environ.get("KVBENCH_REQUIRE_ALL") == "1" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"no skip is excused: {reason} (KVBENCH_REQUIRE_ALL=1)"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests marked ``gpu`` alone may still be skipped."""
    report = yield
    return report if item.get_closest_marker("gpu") else _fail_skips(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself, as ``pytest.importorskip`` does."""
    return _fail_skips((yield))


@pytest.fixture
def data_file() -> Callable[[str], Path]:
    """A file of the data directory by its name; the test is skipped where it is absent."""
    folder = Path(os.environ.get("KVBENCH_DATA_DIR") or Path(__file__).resolve().parent.parent / "data")

    def find(name: str) -> Path:
        if not (folder / name).is_file():
            pytest.skip(f"{name} is not in {folder} (KVBENCH_DATA_DIR, else data/)")
        return folder / name

    return find


@pytest.fixture
def elsewhere(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, and without data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_DATA_DIR", str(tmp_path_factory.mktemp("no_data")))


@pytest.fixture(scope="module")
def compose() -> Iterator[Composer]:
    """What turns overrides into configurations."""
    from kvbench.composition import composer

    with composer() as each:
        yield each


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch over tiny tensors: threads would only wait for each other."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
