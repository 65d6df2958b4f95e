"""Where nothing may be missing (``KVBENCH_REQUIRE_ALL=1``, set by .ci/run), a skipped test is a failed one."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

import pytest

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
