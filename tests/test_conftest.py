"""conftest.py: a skip fails where nothing may be missing, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
    import pytest

    def test_needs_data():
        pytest.skip("no data here")

    @pytest.mark.skip(reason="no network")
    def test_is_marked():
        ...

    @pytest.mark.gpu
    def test_needs_a_gpu():
        pytest.skip("no device")

    @pytest.mark.xfail
    def test_is_known_to_fail():
        assert False

    def test_passes():
        ...
"""


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(test_with=TESTS, test_without="import pytest; pytest.importorskip('no_such_module')")
    return pytester


def test_skips_are_skips_on_a_users_machine(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_REQUIRE_ALL", raising=False)
    inner.runpytest_inprocess().assert_outcomes(passed=1, skipped=4, xfailed=1)


def test_skips_fail_with_their_reason_where_nothing_may_be_missing(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_REQUIRE_ALL", "1")
    result = inner.runpytest_inprocess("--continue-on-collection-errors")
    result.assert_outcomes(passed=1, failed=1, skipped=1, xfailed=1, errors=2)
    result.stdout.fnmatch_lines(["*no skip is excused: *no network*", "*no skip is excused: *no data here*"])
