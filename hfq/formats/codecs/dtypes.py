"""Conversion between torch dtypes and the dtype names of safetensors."""

from __future__ import annotations

import torch

__all__ = ["safetensors_dtype", "torch_dtype"]

_TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_SAFETENSORS = {dtype: name for name, dtype in _TORCH.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a safetensors dtype name."""
    return _TORCH[name]


def safetensors_dtype(dtype: torch.dtype) -> str:
    """Returns the safetensors name of a torch dtype."""
    return _SAFETENSORS[dtype]
