"""Which number type a device computes in."""

from __future__ import annotations

from typing import cast

import torch

from kvbench.capacity import DTYPE_BYTES, Dtype
from kvbench.core import KvbenchError

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""x86 and ARM; without them bfloat16 is emulated, several times slower than float32."""


def resolve(dtype: Dtype, device: str = "cpu") -> Dtype:
    """Replace ``auto`` by bfloat16 where the device has instructions for it, else by float32.

    Raises:
        KvbenchError: no such type.
    """
    if dtype not in DTYPE_BYTES:
        raise KvbenchError(f"model.dtype={dtype} is not supported; give one of {', '.join(DTYPE_BYTES)}")
    if dtype != "auto":
        return dtype
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if any(capabilities.get(name) for name in _BF16_INSTRUCTIONS) else "float32"


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch type of a resolved one."""
    return cast(torch.dtype, getattr(torch, dtype))
