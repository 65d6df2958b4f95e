"""A mistake in a command is told in a line or two, with the remedy and an exit status, and never with a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvbench.app import main

FAST = "workload=fixed workload.num_requests=3 executor=serial"
"""What makes a command quick, should it run after all."""


pytestmark = pytest.mark.usefixtures("elsewhere")


def refused(command: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    """Run a command that must fail; returns what it says."""
    assert main(command) == status
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert 1 <= len(said.err.splitlines()) <= 2
    assert said.err.startswith("kvbench: ")
    assert not list(Path().rglob("outputs"))
    assert not list(Path().rglob(".hydra"))
    return said.err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        # choices, keys and the grammar of overrides
        ("system=vlm", ["did you mean vllm?", "fastertransformer, orca_max, orca_oracle, orca_pow2, vllm"]),
        ("executor=dask", ["executor is one of local, ray, serial, slurm"]),
        ("allocator=null", ["allocator is one of buddy"]),
        ("workload={a:1}", ["workload is one of"]),
        ("workload/arrivals=burst", ["workload/arrivals is one of"]),
        ("+experiment=fig_13", ["experiment is one of", "smoke"]),
        ("workload.reqest_rate=1", ["did you mean workload.request_rate?", "workload has", "duration_s"]),
        ("request_rate=1", ["did you mean workload.request_rate?"]),
        ("data_dir=nowhere", ["data_dir=nowhere: there is no such folder", "make data"]),
        ("results_dir=", ["names no folder"]),
        ("model.num_layers=-3", ["model.num_layers=-3 is not possible"]),
        ("model.num_layers=0 kv_cache_seqs=3", ["model.num_layers=0 is not possible"]),
        ("model.num_kv_heads=7", ["cannot share model.num_kv_heads=7 equally"]),
        ("hardware.num_gpus=0", ["hardware.num_gpus=0 is not possible"]),
        ("-m workload.request_rate=range(4,1)", ["lists no value"]),
        ("allocator=own allocator._target_=x.Y allocator.bug=1", ["unknown key allocator.bug", "+allocator.bug="]),
        ("foo=1", ["unknown key foo", "the top level has"]),
        ("+foo=1", ["unknown key foo"]),
        ("+system.foo=1", ["unknown key system.foo"]),
        ("seed.x=1", ["seed is a value"]),
        ("+allocator.foo=1", ["allocator.foo does not exist: Paged takes block_size, copy_on_write"]),
        ("allocator.block_siz=8", ["did you mean allocator.block_size?"]),
        ("workload.lengths=3", ["would replace the keys", "data_dir"]),
        ("vllm", ["cannot read 'vllm'", "key=value"]),
        ("system=", ["system is one of"]),
        ("a=b=c]", ["cannot read"]),
        ("--fast", ["unknown option --fast", "--help"]),
        ("~allocator", ["nothing can be deleted"]),
        ("hydra.run.dir=x", ["no hydra.* keys"]),
        ("allocator@b=paged", ["no packages"]),
        ("system=vllm,orca_max", ["add -m"]),
        ("-m workload.request_rate=interval(1,2)", ["an interval has no points"]),
        ("-m +experiment=smoke,fig_throughput", ["one experiment at a time"]),
        ("-m system=glob(x*)", ["matches nothing", "vllm"]),
        ("workload.request_rate=${nope}", ["workload.request_rate", "nope"]),
        # values
        ("workload.request_rate=-1", ["workload.request_rate=-1", "greater than 0"]),
        ("workload.request_rate=0", ["workload.request_rate=0"]),
        ("workload.request_rate=nan", ["workload.request_rate=nan"]),
        ("workload.request_rate=fast", ["workload.request_rate='fast' is not a number or null"]),
        ("workload.invalid=ignore", ["error or drop or clip"]),
        ("allocator.block_size=0", ["allocator.block_size=0", "at least 1"]),
        ("allocator.block_size=100000", ["allocator.block_size=100000", "15728"]),
        ("allocator.block_size=1.5", ["allocator.block_size=1.5 is not a whole number"]),
        ("allocator.copy_on_write=3", ["allocator.copy_on_write=3 is not true or false"]),
        ("scheduler.max_num_seqs=0", ["max_num_seqs=0"]),
        ("scheduler.watermark=2", ["watermark=2"]),
        ("costs.a_ms=-1", ["a_ms=-1"]),
        ("executor.num_workers=0 executor=local", ["executor.num_workers=0"]),
        ("seed=-1", ["seed=-1"]),
        ("seed=x", ["seed='x' is not a whole number"]),
        ("repeats=0", ["repeats=0"]),
        ("records=some", ["records='some' is not full or summary"]),
        ("measure_from_s=-3", ["measure_from_s=-3"]),
        ("measure_from_s=9 measure_to_s=9", ["measure_to_s=9"]),
        ("kv_cache_bytes=10", ["819200"]),
        ("kv_cache_bytes=12GB", ["kv_cache_bytes='12GB'"]),
        ("kv_cache_bytes=inf", ["kv_cache_bytes=inf"]),
        ("model.published_blocks.a100_40gb=many", ["is not a mapping of text to a whole number"]),
        ("workload=sharegpt workload.lengths.data_dir=3", ["workload.lengths.data_dir=3 is not text"]),
        ("name=a/b", ["name=a/b names no folder"]),
        ("name=..", ["name=.. names no folder"]),
        ("name=reference", ["name=reference is kept"]),
        ("-m name=a,b", ["belong to the whole command"]),
        # combinations
        ("system=orca_max reservation=on_demand", ["reservation=on_demand does not exist for Buddy"]),
        ("system=fastertransformer reservation=pow2", ["reservation=pow2 does not exist for Contiguous"]),
        ("system=vllm scheduler=request_level", ["reservation=on_demand", "scheduler=request_level"]),
        ("model=opt_66b hardware=a100_40gb", ["opt_66b does not fit a100_40gb", "122.41 GiB"]),
        ("hardware=h200", ["costs=paper_engine", "a100_40gb", "hardware=h200"]),
        ("model=opt_66b costs=paper_engine_orca_only", ["no entry for model=opt_66b", "opt_13b"]),
        # a user's own parts
        ("allocator._target_=no_such.Class", ["there is no module no_such"]),
        ("allocator._target_=kvbench.core.Nope", ["kvbench.core has no class Nope"]),
        ("allocator._target_=Paged", ["allocator._target_=Paged", "package.module.Class"]),
        ("allocator._target_=kvbench.allocators.buddy.Buddy", ["allocator.copy_on_write does not exist"]),
        # experiments
        ("+experiment=smoke panel=a", ["experiment=smoke has no panel=a"]),
        ("+experiment=smoke system=vlm", ["did you mean vllm?"]),
        ("+experiment=fig_throughput panel=z", ["no panel=z", "a, b, c, d, e, f"]),
        ("+experiment=smoke allocator.copy_on_write=false", ["system=fastertransformer", "unknown key"]),
        ("+experiment=smoke reservation=on_demand", ["system=fastertransformer", "reservation=on_demand"]),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_before_anything_runs(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    typed = command.split(" ")
    if "experiment" not in command:
        typed = [*(word for word in FAST.split() if word.partition("=")[0] not in command), *typed]
    said = refused(typed, capsys)
    for word in words:
        assert word in said
    assert not Path("results").exists()


def test_a_message_quotes_what_tells_the_point_apart(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["+experiment=fig_throughput", "workload.duration_s=60", "allocator.copy_on_write=false"], capsys)
    point, _, reason = said.partition(": unknown key")
    assert "system=" in point
    assert "workload.request_rate=" in point
    assert "copy_on_write" not in point
    assert "duration_s" not in point
    assert len(point) <= 180
    assert reason


HEAD = "arrival,prompt,output\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("when,prompt,output\n0,1,1\n", ["arrival"]),
        (f"{HEAD}0,5,5\n1,nan,5\n", ["prompt", "nan", "workload.invalid"]),
        (f"{HEAD}nan,5,5\n", ["arrival", "nan"]),
        (f"{HEAD}1,5,5\n0,5,5\n", ["sort the rows"]),
        (f"{HEAD}0,5,0\n", ["output", "0"]),
        (f"{HEAD}0,5,x\n", ["output", "x"]),
        (f"{HEAD}0,2000,100\n", ["2048"]),
        (HEAD, ["trace.csv"]),
        ("", ["trace.csv"]),
        (None, ["trace.csv does not exist"]),
    ],
)
def test_a_bad_trace_is_told(content: str | None, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        Path("trace.csv").write_text(content)
    status = 2 if content is None else 1  # what is in a file is found out when the point runs
    said = refused(["workload=trace", "workload.path=trace.csv", "executor=serial"], capsys, status)
    for word in words:
        assert word in said


def test_a_trace_without_a_path_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "workload.path" in refused(["workload=trace"], capsys)


def test_one_reason_is_told_once_for_all_points(capsys: pytest.CaptureFixture[str]) -> None:
    Path("trace.csv").write_text(f"{HEAD}0,5,0\n")
    command = ["-m", "system=vllm,orca_max,orca_pow2", "workload=trace", "workload.path=trace.csv", "executor=serial"]
    assert "and 2 more failed" in refused(command, capsys, 1)


@pytest.mark.parametrize("content", [b"not a pickle", b"cos\nsystem\n(S'touch hacked'\ntR."])
def test_a_bad_pickle_is_told(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    Path("data/sharegpt_opt_text_completion_length.pkl").write_bytes(content)
    said = refused(["data_dir=data", "workload.duration_s=1", "executor=serial"], capsys, 1)
    assert "sharegpt_opt_text_completion_length.pkl" in said
    assert not Path("hacked").exists()


@pytest.mark.parametrize("override", ["results_dir=file/below", "results_dir=file"])
def test_a_results_path_below_a_file_is_told(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    said = refused([override, *FAST.split()], capsys)
    assert "file" in said
    assert "results_dir=" in said


def test_a_file_in_the_place_of_a_point_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FAST.split()) == 0
    (folder,) = Path("results/adhoc/points").iterdir()
    shutil.rmtree(folder)
    folder.write_text("")
    capsys.readouterr()
    assert "cannot write" in refused(FAST.split(), capsys, 1)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("kvbench.app.plan", broken)
    with pytest.raises(RuntimeError, match="ours"):
        main([])
