"""The HTML report: what it says, what it carries, and, in a headless Chromium, what it does."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvbench.app import main as run
from kvbench.memory_map import Purpose, load
from kvbench.paper.claims import Claim, Verdict
from kvbench.partition import CLASSES
from kvbench.records import Columns
from kvbench.report import __main__ as command
from kvbench.report import gather, page
from kvbench.report.packing import packed
from kvbench.report.runs import run_content
from kvbench.report.tables import rows_of
from kvbench.report.timeline import COUNTED, bucketed
from kvbench.results import Results, write_csv

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "results" / "reference" / "fig_throughput"
NUM_SLOTS = 1000
NASTY = "</script><script>alert(1)</script> & co"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two systems at three rates with memory maps, and claims."""
    folder = tmp_path_factory.mktemp("results")
    arguments = ["system=orca_max,vllm", "workload.request_rate=2,4,8", "workload=fixed", "workload.num_requests=20"]
    arguments += ["workload.lengths.prompt_len=200", "workload.lengths.output_len=100", "kv_cache_seqs=1.1"]
    assert run(["-m", *arguments, "memory_map=true", "executor=serial", f"results_dir={folder}"]) == 0
    claim = Claim(NASTY, "Fig. 0", 1.0, 2.0, 1.5, 1.4, 1.6, "ratio", "5 %", Verdict.REPRODUCED, "a note")
    names = [each.name for each in fields(Claim)]
    write_csv(folder / "adhoc" / "claims.csv", names, [{name: getattr(claim, name) for name in names}])
    return Results(folder / "adhoc")


@pytest.fixture(scope="module")
def text(results: Results) -> str:
    return page(gather([results.path]))[0]


def _steps(num: int, seed: int = 0) -> Columns:
    """Iterations with pauses between some of them."""
    draw = np.random.default_rng(seed)
    seconds = draw.uniform(0.01, 0.2, num)
    end_s = np.cumsum(seconds + draw.choice([0.0, 0.5], num, p=[0.9, 0.1]))
    steps: Columns = {"end_s": end_s, "seconds": seconds}
    steps |= {name: draw.integers(0, 50, num) for name in COUNTED}
    steps |= {name: draw.integers(1, 100, num) for name in CLASSES}
    return steps


def _unpacked(content: dict[str, Any]) -> dict[str, NDArray[Any]]:
    data, columns, at = zlib.decompress(base64.b64decode(content["data"])), {}, 0
    for name, kind, length in content["columns"]:
        columns[name] = np.frombuffer(data, np.dtype(kind.lower()), length, at)
        at += columns[name].nbytes
    assert at == len(data)
    return columns


def test_packed_columns_come_back() -> None:
    columns = {"a": np.array([0, 255]), "b": np.array([-3, 300]), "c": np.array([70_000]), "d": np.array([0.1, np.pi])}
    back = _unpacked(packed(columns))
    assert {name: column.dtype.name for name, column in back.items()} == {
        "a": "uint8", "b": "int16", "c": "uint32", "d": "float32",
    }  # fmt: skip
    assert all(np.allclose(back[name], columns[name], rtol=1e-6) for name in columns)


def test_few_iterations_are_kept_as_they_are() -> None:
    steps = _steps(50)
    buckets = bucketed(steps, NUM_SLOTS, 200)
    assert buckets.is_exact
    middle_s = steps["end_s"].astype(float) - steps["seconds"].astype(float) / 2
    at = np.searchsorted(buckets.edges_s, middle_s, side="right") - 1
    for name in (*COUNTED, *CLASSES):
        assert np.allclose(buckets.mean[name][at], steps[name])
        assert np.array_equal(buckets.low[name], buckets.high[name])
    pauses = np.setdiff1d(np.arange(len(buckets.edges_s) - 1), at)
    assert len(pauses)
    assert np.allclose(buckets.mean["free"][pauses], NUM_SLOTS)
    assert np.allclose(buckets.mean["num_running"][pauses], 0, atol=1e-6)


def test_buckets_have_the_mean_over_time_and_hide_no_extreme() -> None:
    steps = _steps(2000)
    buckets = bucketed(steps, NUM_SLOTS, 37)
    assert not buckets.is_exact
    end_s, seconds = steps["end_s"].astype(float), steps["seconds"].astype(float)
    for at in range(37):
        moments = np.linspace(float(buckets.edges_s[at]), float(buckets.edges_s[at + 1]), 20_001)
        moments = (moments[:-1] + moments[1:]) / 2
        index = np.minimum(np.searchsorted(end_s, moments, side="right"), len(end_s) - 1)
        runs = moments >= end_s[index] - seconds[index]
        for name, idle in (("num_running", 0), ("free", NUM_SLOTS), ("token_states", 0)):
            values = np.where(runs, steps[name].astype(float)[index], idle)
            assert buckets.mean[name][at] == pytest.approx(values.mean(), rel=2e-3)
            assert (buckets.low[name][at], buckets.high[name][at]) == (values.min(), values.max())


def test_a_million_iterations_fit_and_a_single_spike_stays(tmp_path: Path) -> None:
    num = 1_000_000
    steps = {name: np.full(num, 7) for name in (*COUNTED, *CLASSES)}
    steps["num_waiting"][678_901] = 12_345
    start = time.process_time()
    buckets = bucketed({**steps, "seconds": np.full(num, 0.03), "end_s": np.arange(1, num + 1) * 0.03}, 49, 6000)
    assert time.process_time() - start < 20
    assert len(buckets.edges_s) == 6001
    assert buckets.high["num_waiting"].max() == 12_345
    assert np.flatnonzero(buckets.high["num_waiting"] > 7).tolist() == [678_901 * 6000 // num]


def test_a_run_takes_no_more_bytes_than_it_may(results: Results) -> None:
    row = rows_of(results.summary)[0]
    for most, is_exact in ((40_000, True), (4_500, False)):
        content = run_content(results, row, most)
        assert content
        assert sum(len(part["packed"]["data"]) for part in content.values()) <= most
        assert content["steps"]["num_buckets"] == len(_unpacked(content["steps"]["packed"])["edges_s"]) - 1
        assert content["steps"]["is_exact"] is is_exact
        assert content["steps"]["num_iterations"] == row["num_iterations"]


class _Reader(HTMLParser):
    """Collects the cells of tables by the table's id, all ids, and everything that points somewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.fields: list[str] = []
        self.labels: list[str] = []
        self._rows: list[list[str]] | None = None
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids += [found["id"]] if "id" in found else []
        self.targets += [found[name] for name in ("src", "href", "action", "srcset") if name in found]
        if tag == "table":
            self._rows = self.tables[found["id"]] = []
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th"):
            self._in_cell = True
            assert self._rows is not None
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._rows = None if tag == "table" else self._rows
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell and self._rows:
            self._rows[-1][-1] += data


def test_tables_read_without_javascript(results: Results, text: str) -> None:
    reader = _Reader(text)
    head, *rows = reader.tables["results-table"]
    summary = results.summary
    assert len(rows) == len(summary) == 6
    assert [row[head.index("system")] for row in rows] == list(summary["system"])
    latency = head.index("latency (s/token)")
    for row, value in zip(rows, summary["normalized_latency_mean_s"], strict=True):
        assert float(row[latency]) == pytest.approx(value, rel=1e-3)
    assert reader.tables["claims-table"][1] == [
        "reproduced", NASTY, "Fig. 0", "1 to 2", "1.5", "1.4 to 1.6", "ratio", "5 %", "a note",
    ]  # fmt: skip
    assert ["sources", results.manifest(summary.iloc[0])["sources"], "6"] in reader.tables["provenance-table"]
    assert ["allocator._target_", "kvbench.allocators.buddy.Buddy; kvbench.allocators.paged.Paged"] in reader.tables[
        "config-differing"
    ]
    assumed = {tuple(row[::2]): row[1] for row in reader.tables["assumptions-table"]}
    assert "a_ms=27.6" in " ".join(assumed.values())
    assert {("time", "all"), ("true lengths", "all"), ("system", "vllm"), ("system", "orca_max")} <= set(assumed)


def test_the_page_asks_nobody_for_anything_and_repeats_no_id(text: str) -> None:
    reader = _Reader(text)
    assert len(reader.ids) == len(set(reader.ids))
    assert all(target.startswith(("#", "data:")) for target in reader.targets)
    assert {target[1:] for target in reader.targets if target.startswith("#")} <= set(reader.ids)
    assert "default-src 'none'" in text
    assert "alert(1)</script>" not in text
    assert len(text) < 1_000_000


def test_same_results_same_bytes(results: Results, text: str) -> None:
    assert page(gather([results.path]))[0] == text


def test_committed_results_have_a_report_too(tmp_path: Path) -> None:
    assert command.main([str(REFERENCE), "--to", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    reader = _Reader(text)
    assert len(reader.tables["claims-table"]) > 50
    assert "This folder has no configurations" in text
    assert len(text) < 5_000_000


def _run(folder: Path, name: str, *more: str) -> Path:
    words = ["workload=fixed", "workload.num_requests=5", "kv_cache_seqs=2", "executor=serial", "memory_map=true"]
    assert run(["-m", "workload.request_rate=1,2,4", *words, f"results_dir={folder}", f"name={name}", *more]) == 0
    return folder / name


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The very same points in two folders: nothing but the folder tells them apart."""
    folder = tmp_path_factory.mktemp("pair")
    return _run(folder, "mine"), _run(folder, "theirs")


def test_the_title_is_the_folder_s_name(pair: tuple[Path, Path]) -> None:
    text, _ = page(gather(pair[:1]))
    assert "<h1>mine</h1>" in text
    assert "<title>mine · kvbench</title>" in text


def test_several_folders_are_one_report(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in pair:
        write_csv(folder / "claims.csv", [each.name for each in fields(Claim)], [{"claim": "c", "verdict": "not run"}])
        (folder / "drawn.png").write_bytes(b"png")
    try:
        assert command.main(list(map(str, pair))) == 0
    finally:
        for path in (path for folder in pair for path in (folder / "claims.csv", folder / "drawn.png")):
            path.unlink()
    assert capsys.readouterr().out.startswith("results/compare/report.html (")
    text = (tmp_path / "results" / "compare" / "report.html").read_text(encoding="utf-8")
    reader = _Reader(text)
    assert len(reader.ids) == len(set(reader.ids))
    assert "<h1>mine, theirs</h1>" in text
    shown = reader.tables["results-table"][1:]
    assert [row[0] for row in shown] == ["mine"] * 3 + ["theirs"] * 3
    beside = reader.tables["comparison-table"]
    assert [(row[0], row[beside[0].index("over the first")]) for row in beside[1:]] == [
        (name, "1") for name in ("mine", "theirs") for _ in range(3)
    ]
    assert [row[1] for row in reader.tables["claims-table"][1:]] == ["mine", "theirs"]
    content = json.loads(text.partition('id="content-data">')[2].partition("</script>")[0])
    assert len({run["label"] for run in content["runs"]}) == len({run["point"] for run in content["runs"]}) == 6
    assert {"figure-mine/drawn", "figure-theirs/drawn"} <= set(reader.ids)
    assert all(f"{name}/memory map" in text for name in ("mine", "theirs"))
    lines = {(row["system"], *row["labels"]) for row in content["sweep"]["rows"]}
    looks = {(look["color"], *look["dash"]) for look in content["sweep"]["systems"].values()}
    assert len(lines) == len(looks) == 2


def test_points_are_selected(pair: tuple[Path, Path]) -> None:
    gathered = gather([pair[0], "request_rate=1,4", pair[1], "request_rate=4"])
    assert [(row["results"], row["request_rate"]) for row in gathered.rows] == [("mine", 1), ("mine", 4), ("theirs", 4)]


def test_what_cannot_be_put_together_is_refused_unless_it_is_mixed(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(_run(tmp_path, "other", "model=opt_66b", "hardware=a100_40gb_x4", "kv_cache_seqs=3"))
    to = ["--to", str(tmp_path / "x.html")]
    assert command.main([str(pair[0]), other, *to]) == 2
    refused = capsys.readouterr().err.splitlines()
    assert refused[0].startswith("kvbench.report: not comparable: model is opt_13b / opt_66b; pool (bytes) is")
    assert len(refused) == 2
    assert command.main([str(pair[0]), other, "--mix", *to]) == 0
    assert "Not comparable: model is opt_13b / opt_66b" in capsys.readouterr().out
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "Not comparable: model is opt_13b / opt_66b" in text
    assert "over the first" not in text


@pytest.mark.parametrize("lost", ["requests.parquet", "config.yaml", "manifest.json", None])
def test_what_a_report_leaves_out_is_said(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str | None
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(pair[0], folder)
    point = sorted((folder / "points").iterdir())[0]
    if lost:
        (point / lost).unlink()
        (point / "memory_map.parquet").unlink()  # without requests it cannot be drawn, and says so
    else:
        shutil.rmtree(point)
    assert command.main([str(folder)]) == 0
    _, said = capsys.readouterr().out.splitlines()
    assert said.startswith(f"This folder has lost files of 1 of 3 points ({point.name}): ")
    assert "run the same command again" in said
    assert said in (folder / "report.html").read_text(encoding="utf-8")


def test_mistakes_are_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path)]) == 2
    assert command.main([str(REFERENCE), str(REFERENCE), "--to", str(tmp_path / "x.html")]) == 2
    assert [line[:16] for line in capsys.readouterr().err.splitlines()] == ["kvbench.report: "] * 2


def _contrast(a: str, b: str) -> float:
    """Of WCAG 2: from 1 to 21."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_told_from_its_background_in_both_themes() -> None:
    css = (ROOT / "kvbench/report/page.css").read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)[:2]]
    assert len(themes) == 2
    for theme in themes:
        for name in ("ink", "soft", "accent", "good", "bad", "other"):
            for behind in ("paper", "panel"):
                assert _contrast(theme[name], theme[behind]) >= 4.5, (name, behind)


# From here on: in a browser.

Shot = Callable[[str], None]


@pytest.fixture(scope="module")
def browser(text: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """The page in a headless Chromium, from disk."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs a browser and its driver (Debian: apt install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs make install EXTRAS=dev")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(text, encoding="utf-8")
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        _screen(chrome, 1200, 900)
        chrome.set_script_timeout(30)
        chrome.get(path.as_uri())
        _until(
            chrome,
            "document.querySelectorAll('.player[data-ready]').length && document.querySelector('#time').dataset.ready",
        )
        yield chrome
    finally:
        chrome.quit()


@pytest.fixture
def shot(browser: Chrome) -> Shot:
    """Keeps a picture of what the browser shows, where ``KVBENCH_SCREENSHOTS`` names a folder."""

    def take(name: str) -> None:
        if folder := os.environ.get("KVBENCH_SCREENSHOTS"):
            browser.save_screenshot(str(Path(folder) / f"report_{name}.png"))

    return take


def _screen(chrome: Chrome, width: int, height: int, scheme: str = "light") -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chrome.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )


def _ask(chrome: Chrome, expression: str, *arguments: object) -> Any:
    return chrome.execute_script(f"return {expression}", *arguments)  # type: ignore[no-untyped-call]


def _log(chrome: Chrome, kind: str) -> list[Any]:
    return list(chrome.get_log(kind))  # type: ignore[no-untyped-call]


def _until(chrome: Chrome, expression: str) -> None:
    for _ in range(300):
        if _ask(chrome, f"Boolean({expression})"):
            return
        time.sleep(0.05)
    pytest.fail(f"never came true: {expression}")


def _do(chrome: Chrome, selector: str, *keys: str, index: int = 0) -> Any:
    """Scroll to an element and type into it."""
    found = chrome.find_elements("css selector", selector)[index]
    chrome.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)  # type: ignore[no-untyped-call]
    if keys:
        found.send_keys(*keys)
    return found


def _hover(chrome: Chrome, element: Any, x: float, y: float, *, drag_to: float | None = None) -> None:
    """Move the mouse to a place within an element, given as parts of its size; drag from there."""
    box = _ask(chrome, "arguments[0].getBoundingClientRect().toJSON()", element)

    def mouse(kind: str, part: float, button: str = "none") -> None:
        place = {"x": box["x"] + part * box["width"], "y": box["y"] + y * box["height"]}
        chrome.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "button": button, "clickCount": 1, **place})

    mouse("mouseMoved", x)
    if drag_to is not None:
        mouse("mousePressed", x, "left")
        mouse("mouseMoved", (x + drag_to) / 2, "left")
        mouse("mouseMoved", drag_to, "left")
        mouse("mouseReleased", drag_to, "left")


DRAWN = """[...document.querySelectorAll(arguments[0])].map(canvas => {
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, colors = new Set();
    for (let at = 0; at < data.length; at += 4) {
        if (data[at + 3]) colors.add((data[at] << 16) + (data[at + 1] << 8) + data[at + 2]);
    }
    return colors.size;
})"""


def test_charts_and_maps_are_drawn(browser: Chrome, shot: Shot) -> None:
    colors = _ask(browser, DRAWN, ".uplot canvas")
    assert len(colors) == 4  # the sweep; batch, queue, ledger
    assert min(colors) > 5
    assert min(_ask(browser, DRAWN, "#requests canvas, .map canvas")) >= 3
    shot("results")
    _do(browser, "#run-charts .chart", index=1)
    shot("time")


def test_hovering_says_what_was_there(browser: Chrome, results: Results) -> None:
    plot = _do(browser, "#run-charts .u-over", index=1)
    _hover(browser, plot, 0.35, 0.5)
    _until(browser, "document.querySelector('#run-charts .reading').textContent")
    at_s = float(_ask(browser, "document.querySelector('#run-charts .reading').textContent").split()[1])
    row = results.summary[results.summary["point"] == _ask(browser, "document.querySelector('#run').value")].iloc[0]
    steps = results.steps(row)
    index = int(np.searchsorted(steps["end_s"].astype(float), at_s + 1e-4, side="right"))
    told = _ask(browser, "[...document.querySelectorAll('#run-charts output')].map(each => each.textContent)")
    assert float(told[0]) == steps["num_running"][index] > 0
    assert float(told[1]) == steps["num_waiting"][index]
    classes = [name for name in CLASSES if steps[name].any()]
    assert [float(each.split()[0]) for each in told[2:]] == pytest.approx(
        [100 * float(steps[name][index]) / row["num_slots"] for name in classes], rel=1e-2
    )


def test_dragging_zooms_all_charts_and_a_key_shows_all_again(browser: Chrome) -> None:
    _hover(browser, _do(browser, "#run-charts .u-over", index=0), 0.25, 0.5, drag_to=0.5)
    _until(browser, "document.querySelector('#view').textContent.includes(' of ')")
    from_s, to_s, end_s = (
        float(each) for each in re.findall(r"[\d.]+", _ask(browser, "document.querySelector('#view').textContent"))
    )
    assert (from_s / end_s, to_s / end_s) == pytest.approx((0.25, 0.5), abs=0.02)
    assert "@" in browser.current_url
    _do(browser, "#run-charts .plot", "0")
    _until(browser, "document.querySelector('#view').textContent.startsWith('all')")


def test_a_series_can_be_hidden(browser: Chrome) -> None:
    button = _do(browser, "#run-charts .legend button", index=2)
    before = _ask(browser, DRAWN, "#run-charts .uplot canvas")[2]
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert _ask(browser, DRAWN, "#run-charts .uplot canvas")[2] != before
    button.click()
    assert button.get_attribute("aria-pressed") == "true"


def test_tables_filter_and_sort(browser: Chrome, results: Results) -> None:
    visible = "[...document.querySelectorAll('#results-table tbody tr')].filter(row => !row.hidden).length"
    latency_s = results.summary["normalized_latency_mean_s"].iloc[-1]
    box = _do(browser, "[data-filter=results-table]", f"VLLM {latency_s:.4g}")
    assert _ask(browser, visible) == 1
    assert _ask(browser, "document.querySelector('[data-filter=results-table] + output').textContent") == "1 of 6 rows"
    box.send_keys("\ue003" * 20)
    assert _ask(browser, visible) == 6
    column = "[...document.querySelectorAll('#results-table tbody tr')].map(row => Number(row.cells[2].dataset.value))"
    _do(browser, "#results-table th:nth-child(3) button", "\ue007")
    rises = _ask(browser, column)
    _do(browser, "#results-table th:nth-child(3) button", "\ue007")
    assert rises == sorted(rises)
    assert _ask(browser, column) == sorted(rises, reverse=True)


def test_the_player_scrubs_to_what_the_map_holds(browser: Chrome, results: Results) -> None:
    _do(browser, ".player input[type=range]", "\ue011")
    counts = "[...document.querySelectorAll('.player')].at(-1).querySelectorAll('.map > h4 + .over + .reading')"
    said_something = False
    for part in (0.2, 0.6):
        place = "[...document.querySelectorAll('.player')].at(-1)"
        _ask(
            browser,
            f"(() => {{ const bar = {place}.querySelector('input'); bar.value = {1000 * part}; "
            "bar.dispatchEvent(new Event('input')); })()",
        )
        at_s = float(_ask(browser, f"{place}.dataset.time"))
        told = _ask(browser, f"[...{counts}].map(each => each.textContent)")
        rows = [row for _, row in results.summary.iterrows() if row["request_rate"] == 8]
        for row, said in zip(rows, told, strict=True):
            memory = load(results.folder(row))
            step = int(memory.step_at(at_s))
            if step < 0:
                assert said == "nothing runs"
                continue
            purposes = memory.purposes([step])
            shares = [100 * float((purposes == what).mean()) for what in (Purpose.TOKEN_STATES, Purpose.FREE)]
            assert [float(each) for each in re.findall(r"([\d.]+) %", said)] == pytest.approx(shares, rel=0.01)
            said_something = True
    assert said_something


def test_the_player_plays_pauses_and_tells_slots(browser: Chrome, shot: Shot) -> None:
    time_s = "Number(document.querySelector('.player').dataset.time)"
    _do(browser, ".player [data-play]").click()
    before = _ask(browser, time_s)
    _until(browser, f"{time_s} > {before}")
    grid = _do(browser, ".player .map > canvas", " ")
    paused = _ask(browser, time_s)
    time.sleep(0.2)
    assert _ask(browser, time_s) == paused
    grid.send_keys("\ue012", "\ue015")
    told = "document.querySelector('.player .reading[aria-live]').textContent"
    assert re.fullmatch(r"Slot \d+: .+", _ask(browser, told))
    _do(browser, ".player")
    shot("map")


def test_links_lead_to_a_run(browser: Chrome, results: Results) -> None:
    point = str(results.summary["point"].iloc[4])
    _do(browser, f"a[href='#point-{point}']").click()
    _until(browser, f"document.querySelector('#time').dataset.ready === '{point}'")
    assert _ask(browser, "document.querySelector('#run').value") == point


def test_it_is_dark_where_people_want_it_and_fits_a_phone(browser: Chrome, shot: Shot) -> None:
    _screen(browser, 1200, 900, "dark")
    _until(browser, "getComputedStyle(document.body).backgroundColor === 'rgb(21, 24, 28)'")
    _until(browser, "document.querySelectorAll('.uplot').length === 4")
    _do(browser, ".player")
    shot("map_dark")
    _do(browser, "#run-charts .chart", index=1)
    shot("time_dark")
    for scheme in ("dark", "light"):
        _screen(browser, 390, 844, scheme)
        _until(browser, "innerWidth === 390")
        _until(browser, "[...document.querySelectorAll('.uplot')].every(each => each.offsetWidth <= 390)")
        assert _ask(browser, "document.documentElement.scrollWidth") == 390
    _do(browser, "#run-charts .chart", index=1)
    shot("time_phone")
    _do(browser, ".player")
    shot("map_phone")
    _screen(browser, 1200, 900)


def test_fields_have_labels_and_print_has_no_controls(browser: Chrome) -> None:
    unnamed = """[...document.querySelectorAll('input, select, button, [tabindex="0"]')].filter(each =>
        !each.labels?.length && !each.textContent &&
        !each.getAttribute('aria-label') && !each.getAttribute('aria-labelledby'))"""
    assert _ask(browser, f"{unnamed}.map(each => each.outerHTML)") == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    try:
        shown = "[...document.querySelectorAll('nav, .controls, .filter')].filter(each => each.offsetParent).length"
        assert _ask(browser, shown) == 0
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_nothing_was_asked_of_a_network_and_no_error_was_logged(browser: Chrome) -> None:
    asked = []
    for entry in _log(browser, "performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    assert asked
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
    logged = [entry["message"] for entry in _log(browser, "browser")]
    assert [message for message in logged if "getImageData" not in message] == []  # these tests read canvases, often


def test_without_javascript_the_tables_are_there(browser: Chrome) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.refresh()
    try:
        assert "orca_max" in browser.find_element("css selector", "#results-table").text
        assert not any(each.is_displayed() for each in browser.find_elements("css selector", ".js-only"))
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        browser.refresh()
