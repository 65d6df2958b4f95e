"""Fetching: nothing appears unless it is whole and right, and every failure is a sentence."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvbench.core import KvbenchError
from kvbench.workloads import download
from kvbench.workloads.download import SUMS, Source, UnreachableError, fetch, pairs_sum

BODY = b"arrival,prompt,output\n0,1,1\n"
PAIRS = [(21, 518), (8, 66)]


class Handler(BaseHTTPRequestHandler):
    bodies: dict[str, bytes]

    def do_GET(self) -> None:
        if self.path.strip("/") not in self.bodies:
            self.send_error(404)
            return
        body = self.bodies[self.path.strip("/")]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + (9 if "cut" in self.path else 0)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Not on the terminal."""


@pytest.fixture
def bodies() -> dict[str, bytes]:
    return {"t.csv": BODY, "cut.csv": BODY, "pairs.pkl": pickle.dumps(PAIRS)}


@pytest.fixture
def address(bodies: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "*")
    handler = type("Served", (Handler,), {"bodies": bodies})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def source(address: str) -> Source:
    return Source("t", f"{address}/t.csv", "t.csv.gz", "a trace", hashlib.sha256(BODY).hexdigest())


def test_a_file_is_zipped_checked_and_not_fetched_twice(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    assert fetch(source, folder).startswith("fetched")
    assert gzip.decompress((folder / "t.csv.gz").read_bytes()) == BODY
    assert [path.name for path in folder.iterdir()] == ["t.csv.gz"]
    assert fetch(replace(source, url="http://nowhere.invalid/"), folder) == "already there, checked"


def test_another_file_than_expected_is_not_kept(source: Source, bodies: dict[str, bytes], tmp_path: Path) -> None:
    bodies["t.csv"] = BODY + b"1,1,1\n"
    with pytest.raises(KvbenchError, match=r"t\.csv\.gz has the sum .*nothing was kept"):
        fetch(source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_spoilt_file_is_found(source: Source, tmp_path: Path) -> None:
    fetch(source, tmp_path)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(KvbenchError, match="delete it to fetch it again"):
        fetch(source, tmp_path)


def test_a_broken_connection_leaves_nothing(source: Source, tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=f"t: the connection broke off after {len(BODY)} of {len(BODY) + 9} bytes"):
        fetch(replace(source, url=source.url.replace("t.csv", "cut.csv")), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_set_that_is_gone(source: Source, tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="gone answered 404 Not Found"):
        fetch(replace(source, url=source.url.replace("t.csv", "gone")), tmp_path)


def test_without_a_network(source: Source, tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match=r"cannot reach 127\.0\.0\.1:9 .*kvbench runs without these files"):
        fetch(replace(source, url="http://127.0.0.1:9/t.csv"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KvbenchError, match="cannot write"):
        fetch(source, tmp_path / "file" / "data")


def test_an_unknown_sum_is_remembered_and_held_to(source: Source, bodies: dict[str, bytes], tmp_path: Path) -> None:
    unknown = replace(source, file="t.csv", sha256=None)
    fetch(unknown, tmp_path)
    assert (tmp_path / SUMS).read_text() == f"{source.sha256}  t.csv\n"
    fetch(replace(unknown, name="u", file="another.csv"), tmp_path)
    assert len((tmp_path / SUMS).read_text().splitlines()) == 2
    assert fetch(unknown, tmp_path) == "already there, checked"
    (tmp_path / "t.csv").unlink()
    bodies["t.csv"] = b"changed"
    with pytest.raises(KvbenchError, match=f"It may have changed at .*to accept that, remove its line from .*{SUMS}"):
        fetch(unknown, tmp_path)
    assert not (tmp_path / "t.csv").exists()


def test_pickled_pairs_are_known_by_what_they_hold(address: str, tmp_path: Path) -> None:
    expected = hashlib.sha256(b"prompt_tokens,output_tokens\n21,518\n8,66\n").hexdigest()
    source = Source("p", f"{address}/pairs.pkl", "p.pkl", "pairs", expected, pairs_sum)
    fetch(source, tmp_path)
    assert (tmp_path / "p.pkl").read_bytes() == pickle.dumps(PAIRS)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("paper_pairs", "sharegpt_lengths.csv.gz"),
        ("azure_2023_conv", "azure_2023_conv.csv.gz"),
        ("azure_2023_code", "azure_2023_code.csv.gz"),
        ("mooncake", "mooncake_conversation.jsonl.gz"),
    ],
)
def test_the_sums_of_what_kvbench_reads(data_file: Callable[[str], Path], name: str, file: str) -> None:
    source = next(source for source in download.USED if source.name == name)
    assert hashlib.sha256(gzip.decompress(data_file(file).read_bytes())).hexdigest() == source.sha256
    if name != "paper_pairs":
        assert source.file == file


def test_only_public_hosts_are_asked_and_no_two_sets_share_a_file() -> None:
    sources = (*download.USED, *download.OTHERS)
    assert all(s.url.startswith(("https://github.com/", "https://huggingface.co/datasets/")) for s in sources)
    assert len({s.name for s in sources}) == len({s.file for s in sources}) == len(sources)


def test_the_command(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = replace(source, name="gone", url=source.url.replace("t.csv", "gone"), file="gone.csv")
    monkeypatch.setattr(download, "USED", (source,))
    monkeypatch.setattr(download, "OTHERS", (gone,))
    monkeypatch.setenv("KVBENCH_DATA_DIR", str(tmp_path))
    assert download.main([]) == 0
    assert capsys.readouterr().out == f"t: fetched, 0.0 MB ({tmp_path / 't.csv.gz'})\n"
    assert download.main(["gone", "t"]) == 1
    shown = capsys.readouterr()
    assert "answered 404" in shown.err
    assert "t: already there, checked" in shown.out
    assert download.main(["all", f"--data-dir={tmp_path / 'other'}"]) == 1
    assert (tmp_path / "other" / "t.csv.gz").exists()
    capsys.readouterr()
    assert download.main(["nothing"]) == 2
    assert capsys.readouterr().err == "kvbench.workloads.download: no set is called nothing; there are t, gone, all\n"
    monkeypatch.setattr(download, "USED", (replace(source, name="u", url="http://127.0.0.1:9/"), source))
    assert download.main([f"--data-dir={tmp_path / 'third'}"]) == 1
    assert capsys.readouterr().err.startswith("kvbench.workloads.download: u: cannot reach 127.0.0.1:9")
    assert not (tmp_path / "third" / "t.csv.gz").exists()
