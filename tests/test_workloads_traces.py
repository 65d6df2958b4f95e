"""Replayed traces: which rows are served, which are refused, and how a refusal reads."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core import KvbenchError
from kvbench.workloads.rows import Column, Rows
from kvbench.workloads.traces import Replay
from kvbench.workloads.validity import enforce

SMALL = Path(__file__).with_name("data") / "small_trace.csv"
LIMIT = 2048


def small_trace() -> str:
    """200 invented requests, about 4 per second; ``tests/data/small_trace.csv`` is what this returns."""
    rng = random.Random(20230923)
    arrival, lines = 0.0, ["arrival,prompt,output\n"]
    for _ in range(200):
        arrival += rng.expovariate(4.0)
        prompt = min(1000, 1 + round(rng.lognormvariate(math.log(60), 1.2)))
        output = min(1000, 1 + round(rng.lognormvariate(math.log(250), 0.8)))
        lines.append(f"{arrival:.3f},{prompt},{output}\n")
    return "".join(lines)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def replay(path: Path | str | None, **options: Any) -> Replay:
    return Replay("trace", path, LIMIT, **options)


def served(path: Path, **options: Any) -> list[tuple[float, int, int]]:
    trace = replay(path, **options).generate()
    assert [request.id for request in trace.requests] == list(range(len(trace.requests)))
    return [(request.arrival_s, request.prompt_len, request.output_len) for request in trace.requests]


def test_the_shipped_trace_is_what_its_script_writes() -> None:
    assert SMALL.read_text(encoding="utf-8") == small_trace()


def test_the_shipped_trace_is_valid_and_replayed_as_it_stands() -> None:
    trace = replay(SMALL).generate()
    assert len(trace.requests) == 200
    assert (trace.num_dropped, trace.num_clipped) == (0, 0)
    assert trace.source == "trace small_trace.csv"
    assert list(trace.inputs) == ["small_trace.csv"]
    assert sum(r.prompt_len for r in trace.requests) == 29_014
    assert sum(r.output_len for r in trace.requests) == 62_239


def test_spreadsheets_and_pandas_write_what_is_read(tmp_path: Path) -> None:
    text = "\ufeffclient, prompt ,output,arrival\r\n7,12,3,0.5\r\n\r\n8,13.0,4.0,1\r\n"
    assert served(write(tmp_path / "t.csv", text)) == [(0.5, 12, 3), (1.0, 13, 4)]


def test_gzip_is_known_by_its_contents(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(gzip.compress(b"arrival,prompt,output\n0,1,1\n"))
    assert served(path) == [(0.0, 1, 1)]


FAULTS = [
    ("x,1,1", "line 3: arrival is 'x', not a finite time"),
    (",1,1", "line 3: arrival is missing, not a finite time"),
    ("inf,1,1", "line 3: arrival is inf, not a finite time"),
    ("nan,1,1", "line 3: arrival is 'nan', not a finite time"),
    ("-1,1,1", "line 3: arrival is -1, below 0"),
    ("0.5,1,1", "line 3: arrival is 0.5, before the 1 of a row above it"),
    ("1,0,1", "line 3: prompt is 0, not a whole number of 1 token or more"),
    ("1,1.5,1", "line 3: prompt is 1.5, not a whole number"),
    ("1,,1", "line 3: prompt is missing, not a whole number"),
    ("1,1,0", "line 3: output is 0, not a whole number"),
    ("1,1,-3", "line 3: output is -3, not a whole number"),
    ("1,1,nan", "line 3: output is 'nan', not a whole number"),
    ("1,1,inf", "line 3: output is inf, not a whole number"),
    ("1,1", "line 3: output is missing, not a whole number"),
    ("1,2000,100", "line 3: prompt 2000 + output 100 = 2100 tokens, but the model allows 2048"),
]


@pytest.mark.parametrize(("row", "message"), FAULTS)
def test_the_first_bad_row_is_named_with_its_value_and_a_remedy(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path / "t.csv", f"arrival,prompt,output\n1,1,1\n{row}\n2,0,0\n")
    with pytest.raises(KvbenchError) as caught:
        replay(path).generate()
    assert str(caught.value).startswith(f"{path}, {message}")
    assert "workload.invalid=" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("row", "message"), FAULTS)
def test_drop_leaves_the_row_out_and_counts_it(tmp_path: Path, row: str, message: str) -> None:
    del message
    path = write(tmp_path / "t.csv", f"arrival,prompt,output\n1,1,1\n{row}\n2,2,2\n")
    trace = replay(path, invalid="drop").generate()
    assert [request.prompt_len for request in trace.requests] == [1, 2]
    assert (trace.num_dropped, trace.num_clipped) == (1, 0)


def test_clip_repairs_what_it_can_and_counts_it(tmp_path: Path) -> None:
    rows = "5,2000,100\n1,2047,9\n6,2048,1\n7,1,0\n3,7,7\n"
    path = write(tmp_path / "t.csv", "arrival,prompt,output\n" + rows)
    trace = replay(path, invalid="clip").generate()
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in trace.requests] == [
        (1, 2047, 1),
        (3, 7, 7),
        (5, 2000, 48),
    ]
    assert (trace.num_dropped, trace.num_clipped) == (2, 3)


def test_an_outlier_above_does_not_condemn_valid_rows_where_it_is_dropped_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "arrival,prompt,output\n9,0,1\n1,1,1\n2,1,1\n")
    trace = replay(path, invalid="drop").generate()
    assert (len(trace.requests), trace.num_dropped) == (2, 1)


NUMBERS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0, math.inf, math.nan])


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=12), st.sampled_from(["drop", "clip"]))
def test_the_rules_agree_with_a_plain_loop(
    table: list[tuple[float, float, float]], rule: Literal["drop", "clip"]
) -> None:
    limit = 8
    expected, clipped, latest = [], 0, -math.inf
    for arrival, prompt, output in table:
        whole = all(math.isfinite(n) and n >= 1 and n == int(n) for n in (prompt, output))
        if not (math.isfinite(arrival) and arrival >= 0 and whole):
            continue
        short = output if prompt + output <= limit or rule == "drop" else limit - prompt
        if prompt + short > limit or short < 1 or (rule == "drop" and arrival < latest):
            continue
        clipped += short != output or arrival < latest
        expected.append((arrival, prompt, short))
        latest = max(latest, arrival)
    expected.sort(key=lambda row: row[0])
    columns = [Column(name, np.array(values)) for name, values in zip("apo", zip(*table, strict=True), strict=True)]
    rows = Rows("t", "line", np.arange(len(table)), columns[1], columns[2], columns[0])
    if not expected:
        with pytest.raises(KvbenchError, match=r"none of the \d+ rows of t can be served, for example t, line 0: "):
            enforce(rows, rule, limit)
        return
    valid = enforce(rows, rule, limit)
    assert list(zip(valid.arrival_s, valid.prompt_len, valid.output_len, strict=True)) == expected
    assert (valid.num_dropped, valid.num_clipped) == (len(table) - len(expected), clipped)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; it needs the header line arrival,prompt,output"),
        (b"arrival,prompt,output\n", "has no requests"),
        (b"arrival;prompt;output\n0;1;1\n", "has no column arrival, prompt, output"),
        (b"arrival,prompt\n0,1\n", "has no column output; .*found: arrival, prompt"),
        (b"0,1,1\n1,1,1\n", "has no column arrival, prompt, output"),
        (b"\xff\xfe\x00a", "cannot read .*utf-8.*save it as UTF-8"),
        (b"time,prompt,output\n0,1,1\n", r"no column arrival; .*workload\.columns\.arrival=NAME"),
        (b"arrival,prompt,output\n0,1,1\n3,4,5,6\n", "line 3: 4 fields under 3 columns"),
        (b"arrival,prompt,output\n2024-05-01 10:00:00,1,1\n", r"none of the 1 rows .*workload\.arrival_as=timestamps"),
        (gzip.compress(b"arrival,prompt,output\n" + b"0,1,1\n" * 99)[:-12], "cannot read"),
        (b"\x1f\x8bnonsense", "cannot read"),
        (b"arrival,prompt,output\n0," + b"1" * 200_000 + b",1\n", "cannot read .*field larger"),
    ],
    ids=[
        "empty",
        "header only",
        "semicolons",
        "column missing",
        "no header",
        "utf-16",
        "names",
        "surplus",
        "dates",
        "cut gzip",
        "bad gzip",
        "long",
    ],
)
def test_an_unusable_file_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(KvbenchError, match=message) as caught:
        replay(path, invalid="drop").generate()
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_and_a_missing_path_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"workload=trace needs workload\.path=FILE, a CSV"):
        replay(None).inputs()
    with pytest.raises(KvbenchError, match=r"no\.csv does not exist .*correct workload\.path"):
        replay(tmp_path / "no.csv").generate()
    with pytest.raises(KvbenchError, match=r"does not exist .*`make data` fetches"):
        Replay("azure_conv", tmp_path / "a.csv.gz", LIMIT, title="Azure").inputs()
    with pytest.raises(KvbenchError, match="it is not a file"):
        replay(tmp_path).generate()


def test_nothing_left_says_how_many_and_why(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "arrival,prompt,output\n0,5000,1\n0,0,1\n")
    with pytest.raises(KvbenchError, match=r"none of the 2 rows .*line 2: prompt 5000 \+ output 1 = 5001"):
        replay(path, invalid="clip").generate()


def test_rate_duration_and_number_cut_and_stretch(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "arrival,prompt,output\n" + "".join(f"{i},{i + 1},1\n" for i in range(11)))
    assert len(served(path, duration_s=5)) == 5
    assert len(served(path, num_requests=3)) == 3
    assert len(served(path, num_requests=99)) == 11
    halved = served(path, request_rate=2)
    assert [row[0] for row in halved] == [i / 2 for i in range(11)]
    assert len(served(path, request_rate=2, duration_s=2, num_requests=9)) == 4
    trace = replay(path, request_rate=2).generate()
    assert trace.source == "trace t.csv, time scaled"


def test_what_a_trace_cannot_be_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "arrival,prompt,output\n5,1,1\n5,1,1\n")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"request_rate": 1}, "all requests .* arrive at once"),
        ({"duration_s": 2}, r"no request .* within workload\.duration_s=2; the first comes at 5 s"),
        ({"duration_s": 0}, r"workload\.duration_s=0 is not possible"),
        ({"request_rate": math.nan}, r"workload\.request_rate=nan is not possible"),
        ({"num_requests": 0}, r"workload\.num_requests=0 is not possible"),
        ({"bucket_s": -1}, r"workload\.bucket_s=-1 is not possible"),
        ({"invalid": "ignore"}, r"workload\.invalid=ignore is not possible; give one of error, drop, clip"),
        ({"arrival_as": "hours"}, r"workload\.arrival_as=hours is not possible"),
        ({"columns": {"tokens": "x"}}, r"workload\.columns names tokens; it may name arrival, prompt, output"),
    ]
    for options, message in cases:
        with pytest.raises(KvbenchError, match=message):
            replay(path, **options).generate()


AZURE = {"arrival": "TIMESTAMP", "prompt": "ContextTokens", "output": "GeneratedTokens"}


def test_timestamps_count_from_the_first(tmp_path: Path) -> None:
    rows = ["2023-11-16 23:59:59.9799600,10,1", "2023-11-17 00:00:00.0319601+00:00,11,1", "2023-11-17T00:00:01Z,12,1"]
    path = write(tmp_path / "t.csv", "\n".join([",".join(AZURE.values()), *rows]))
    arrivals = [row[0] for row in served(path, columns=AZURE, arrival_as="timestamps")]
    assert arrivals == pytest.approx([0, 0.0520001, 1.02004], abs=1e-9)


@pytest.mark.parametrize("bad", ["yesterday", "", "2023-11-16 18:00:00+02:00"])
def test_a_bad_timestamp_is_a_bad_row(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path / "t.csv", f"{','.join(AZURE.values())}\n{bad},1,1\n2023-11-16 18:00:00,2,2\n")
    assert served(path, columns=AZURE, arrival_as="timestamps", invalid="drop") == [(0.0, 2, 2)]
    with pytest.raises(KvbenchError, match=f"line 2: TIMESTAMP is ({bad[:9]}|'{bad[:9]}|missing)"):
        replay(path, columns=AZURE, arrival_as="timestamps").generate()


MOONCAKE = {"arrival": "timestamp", "prompt": "input_length", "output": "output_length"}


def mooncake(path: Path, stamps: list[int]) -> Path:
    entries = [{"timestamp": stamp, "input_length": i + 1, "output_length": 1} for i, stamp in enumerate(stamps)]
    return write(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def test_buckets_are_spread_evenly_and_repeatably(tmp_path: Path) -> None:
    stamps = sorted(random.Random(1).choice([0, 3000, 5999, 9000, 12001]) for _ in range(2000))
    path = mooncake(tmp_path / "t.jsonl", stamps)
    options: dict[str, Any] = {"columns": MOONCAKE, "arrival_as": "milliseconds", "bucket_s": 3.0}
    rows = served(path, **options, seed=1)
    assert rows == served(path, **options, seed=1)
    assert rows != served(path, **options, seed=2)
    arrivals = np.array([row[0] for row in rows])
    assert (np.diff(arrivals) >= 0).all()
    assert [row[1] for row in rows] == list(range(1, 2001))
    assert (np.floor(arrivals / 3) == np.rint(np.array(stamps) / 3000)).all()
    assert np.histogram(arrivals % 3, bins=3, range=(0, 3))[0] == pytest.approx([667, 667, 667], rel=0.12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n", "has no column timestamp, input_length, output_length"),
        ('{"timestamp": 0,\n', "line 1: not a JSON object"),
        ("[1]\n", "has no column"),
        ("\n", "has no requests"),
        ('{"timestamp": 0, "input_length": null, "output_length": 1}\n', "input_length is missing"),
        ('{"timestamp": 0, "input_length": [1], "output_length": 1}\n', r"input_length is \[1\]"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n7\n', "line 2: timestamp is missing"),
    ],
)
def test_json_lines_are_checked_like_any_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(KvbenchError, match=message):
        replay(write(tmp_path / "t.jsonl", text), columns=MOONCAKE, arrival_as="milliseconds").generate()


@pytest.mark.parametrize(
    ("file", "options", "kept", "dropped", "last_s"),
    [
        ("azure_2023_conv.csv.gz", {"columns": AZURE, "arrival_as": "timestamps"}, 16_528, 2_838, 3501.721937),
        ("azure_2023_code.csv.gz", {"columns": AZURE, "arrival_as": "timestamps"}, 5_452, 3_367, 3435.948056),
        (
            "mooncake_conversation.jsonl.gz",
            {"columns": MOONCAKE, "arrival_as": "milliseconds"},
            2_424,
            9_607,
            3536.999,
        ),
    ],
)
def test_the_known_traces(
    data_file: Callable[[str], Path], file: str, options: dict[str, Any], kept: int, dropped: int, last_s: float
) -> None:
    trace = replay(data_file(file), invalid="drop", **options).generate()
    assert (len(trace.requests), trace.num_dropped) == (kept, dropped)
    assert trace.requests[-1].arrival_s == pytest.approx(last_s, abs=1e-6)
    everything = Replay("x", data_file(file), 200_000, **options).generate()
    assert len(everything.requests) == kept + dropped


def test_what_is_not_replayed_is_not_counted(tmp_path: Path) -> None:
    text = "arrival,prompt,output\n0,1,1\n1,0,1\n2,2000,100\n3,5,5\n4,0,1\n5,2000,100\n6,5,5\n"
    path = write(tmp_path / "t.csv", text)
    counts = [
        (len(trace.requests), trace.num_dropped, trace.num_clipped)
        for options in ({"num_requests": 2}, {"duration_s": 3.5}, {})
        for trace in [replay(path, invalid="clip", **options).generate()]
    ]
    assert counts == [(2, 1, 1), (3, 1, 1), (5, 2, 2)]
