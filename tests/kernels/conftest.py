"""Kernels are checked in processes of their own, because triton decides on import whether it interprets or compiles.

``KVBENCH_KERNELS`` says which, as ``make kernels`` sets it: *interpreted* computes values on the CPU, *compiled* reads
the code for GPUs that need not be there, and *device* computes the values on the GPU that is. Without it nothing is
collected.
"""

from __future__ import annotations

import os

import pytest

MODE = os.environ.get("KVBENCH_KERNELS")
os.environ["OMP_NUM_THREADS"] = "1"  # small tensors, and a process for each core
os.environ["TRITON_INTERPRET"] = str(int(MODE == "interpreted"))
collect_ignore = {
    None: ["code", "values"],
    "interpreted": ["code"],
    "compiled": ["values"],
    "device": ["code", "values/test_traffic.py"],
}[MODE]


def pytest_configure(config: pytest.Config) -> None:
    """Triton 3.6's interpreter uses what numpy 2.3 deprecates."""
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")
