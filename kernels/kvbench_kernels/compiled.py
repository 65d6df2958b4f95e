"""What the compiler makes of the kernels, on a machine without a GPU: registers, spills, memory, loads, instructions.

The launches are those of ``device``, stopped before they would run, so that every argument is specialised as in a real
one. ``python -m kvbench_kernels.compiled FOLDER`` writes the table ``triton-<version>.csv`` of all ``CASES``.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from kvbench_kernels import device
from kvbench_kernels.plan import decode_tiles, prefill_tiles

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
PAGES = (1, 2, 4, 8, 16, 32, 64, 128)
POOL_ROWS = 8_000_000
"""Of the cache that is compiled for: of more than 2 GiB, as real ones are, which is what AMD's loads depend on."""


@dataclass(frozen=True, slots=True)
class Case:
    """A launch to compile.

    Attributes:
        function: of ``device``.
        arch: of ``TARGETS``.
        page: 0: contiguous.
        prefetch: whether ``decode`` reads the table ahead.
        head_dim: of the cache.
        dtype: of the cache.
        group: query heads for each K/V head.
        splits: of ``decode``; with several, it is the kernel that merges them that is read.
    """

    function: str
    arch: str
    page: int = 0
    prefetch: bool = True
    head_dim: int = 128
    dtype: str = "bfloat16"
    group: int = 1
    splits: int = 1


def _cases() -> list[Case]:
    """The sweep over pages that is drawn, and one page of 16 beside contiguous memory for everything else."""
    both = (0, 16)
    cases = [Case("decode", "sm_90", page) for page in (0, *PAGES)]
    cases += [Case("decode", "sm_90", page, prefetch=False) for page in (1, 16, 128)]
    cases += [Case("decode", arch, page) for arch in ("sm_80", "gfx942") for page in both]
    cases += [Case("decode", "sm_90", page, head_dim=head_dim) for head_dim in (64, 80, 96) for page in both]
    cases += [Case("decode", "sm_90", page, dtype="float16") for page in both]
    cases += [Case("decode", "sm_90", page, group=4) for page in both]
    cases += [Case("decode", "sm_90", page, dtype="float32") for page in both]
    cases += [Case("decode", "sm_90", splits=splits) for splits in (16, 128)]
    cases += [Case("prefill", arch, page) for arch in TARGETS for page in both]
    cases += [Case("prefill", "sm_90", page, head_dim=64) for page in both]
    cases += [Case("prefill", "sm_90", page, dtype="float32") for page in both]
    return cases + [Case(function, "sm_90") for function in ("write_kv", "copy_blocks", "move_rows")]


CASES = _cases()


class Compiled:
    """A compiled kernel, read.

    Args:
        kernel: what triton compiled.
    """

    def __init__(self, kernel: Any) -> None:
        self.hash = str(kernel.hash)
        self.assembly: str | None = kernel.asm.get("amdgcn")
        self.binary: bytes = kernel.asm.get("cubin", b"")
        self.shared_bytes = int(kernel.metadata.shared)
        self.num_threads = int(kernel.metadata.num_warps * kernel.metadata.warp_size)

    @cached_property
    def num_registers(self) -> int:
        """Of a thread."""
        return self._amd("vgpr_count") if self.assembly else self._nvidia("REG")

    @cached_property
    def spill_bytes(self) -> int:
        """What a thread keeps in memory for want of registers."""
        return 4 * self._amd("vgpr_spill_count") if self.assembly else self._nvidia("STACK")

    @cached_property
    def instructions(self) -> list[tuple[int, str, str]]:
        """Address, operation and operands of each."""
        if self.assembly:
            return _amd_instructions(self.assembly)
        line = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", re.M)
        return [(int(address, 16), *rest) for address, *rest in line.findall(_tool("-sass", self.binary))]

    @cached_property
    def loop(self) -> list[str]:
        """Operations of the longest stretch that a branch backwards repeats, without loops in it."""
        jumps = [
            (int(target[1], 16), address)
            for address, operation, operands in self.instructions
            if operation.startswith(("BRA", "s_cbranch", "s_branch"))
            and (target := re.search(r"0x([0-9a-f]+)", operands))
            and int(target[1], 16) < address
        ]
        innermost = [
            (first, last)
            for first, last in jumps
            if not any(first <= start and end <= last and (start, end) != (first, last) for start, end in jumps)
        ]
        bodies = [[op for address, op, _ in self.instructions if first <= address <= last] for first, last in innermost]
        return max(bodies, key=len, default=[])

    def _amd(self, key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", self.assembly or "")
        assert found is not None
        return int(found[1])

    def _nvidia(self, key: str) -> int:
        found = re.search(rf"{key}:(\d+)", _tool("-res-usage", self.binary))
        assert found is not None
        return int(found[1])


@contextmanager
def compiling(arch: str) -> Iterator[list[Compiled]]:
    """What is launched inside is compiled for ``arch`` and not run; the list receives it, launch by launch."""
    found: list[Compiled] = []
    launch, before = JITFunction.run, triton.runtime.driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        found.append(Compiled(launch(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(_NoGpu(arch))
    try:
        yield found
    finally:
        JITFunction.run, triton.runtime.driver._active = launch, before


def compile_case(case: Case) -> Compiled:
    """Compile the kernel of a case."""
    dtype = getattr(torch, case.dtype)
    heads, batch, d = 8, 4, case.head_dim
    k = torch.empty((POOL_ROWS, heads, d), dtype=dtype, device="meta")
    q = torch.empty((batch, heads * case.group, d), dtype=dtype, device="meta")
    lens = torch.empty(batch, dtype=torch.int32, device="meta")
    where: dict[str, Any] = {"base": torch.empty(batch, dtype=torch.int64, device="meta")}
    if case.page:
        where = {"table": torch.empty((batch, 512), dtype=torch.int32, device="meta"), "page": case.page}
    kv = torch.empty((40, 2, POOL_ROWS // 16, 16, heads, d), dtype=dtype, device="meta")
    with compiling(case.arch) as found:
        if case.function == "decode":
            tiles = decode_tiles(d, dtype, case.arch)
            device.decode(q, k, k, lens, **where, splits=case.splits, tiles=tiles, prefetch=case.prefetch)
        elif case.function == "prefill":
            cu_q = torch.empty(batch + 1, dtype=torch.int32, device="meta")
            device.prefill(q, k, k, cu_q, lens, **where, tiles=prefill_tiles(d, dtype, case.arch))
        elif case.function == "write_kv":
            device.write_kv(k[:batch], k[:batch], k, k, torch.empty(batch, dtype=torch.int64, device="meta"))
        elif case.function == "copy_blocks":
            device.copy_blocks(kv, torch.tensor([[0, 1]]))
        else:
            device.move_rows(kv.flatten(2, 3), 0, 1000, 500)
    return found[-1]


def measure(case: Case) -> dict[str, Any]:
    """A row of the table: the case, and what was compiled.

    ``wide_loads`` are those of 16 bytes for each thread, ``narrow_loads`` all others; where there is no loop, both are
    counted in the whole kernel, and ``loop`` is 0.
    """
    compiled = compile_case(case)
    inside = compiled.loop or [operation for _, operation, _ in compiled.instructions]
    loads = [op for op in inside if re.match(r"LDG(STS)?\.|LDG$|(global|buffer)_load_", op)]
    wide = sum("128" in re.sub("LTC128B?", "", op) or op.endswith("dwordx4") for op in loads)
    return asdict(case) | {
        "registers": compiled.num_registers,
        "spill_bytes": compiled.spill_bytes,
        "shared_bytes": compiled.shared_bytes,
        "threads": compiled.num_threads,
        "loop": len(compiled.loop),
        "wide_loads": wide,
        "narrow_loads": len(loads) - wide,
        "tensor_core": sum("MMA" in op or "mfma" in op for op in inside),
    }


class _NoGpu(DriverBase):  # type: ignore[misc]
    """Stands where triton looks for a GPU, and names one."""

    def __init__(self, arch: str) -> None:
        super().__init__()
        self.arch = arch

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.arch]

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.arch)  # what is compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_benchmarker(self) -> Any:
        raise RuntimeError("there is no GPU to measure")


def _amd_instructions(text: str) -> list[tuple[int, str, str]]:
    """Of AMD's assembly, numbered; a branch names the number of its label's first instruction."""
    rows: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        code = line.partition(";")[0].rstrip()
        if label := re.match(r"([.\w]+):", code):
            labels[label[1]] = len(rows)
        elif instruction := re.match(r"\t([a-z]\w+)\s*(.*)", code):
            rows.append((instruction[1], instruction[2]))
    return [(i, op, hex(labels[rest]) if rest in labels else rest) for i, (op, rest) in enumerate(rows)]


def _tool(option: str, binary: bytes) -> str:
    """What the tool for binaries that triton brings says of one."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write the table of all cases for the triton that is installed."""
    rows = [measure(case) for case in CASES]
    path = Path(sys.argv[1]) / f"triton-{triton.__version__}.csv"
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


if __name__ == "__main__":
    main()
