"""Packed experts that a checkpoint fuses into tensors of one more dimension: each expert's slice is a module of its own.

    experts.gate_up_proj_blocks [experts, …]            gpt-oss: `experts.<e>.gate_up_proj` with `blocks`, `scales`, `bias`
    experts.gate_up_proj.weight [experts, out, in], …   any dialect:  `experts.<e>.gate_up_proj` with `weight`, …
    input_linear.weight, output_linear.weight           GraniteMoe: `experts.<e>.gate_up_proj`, `experts.<e>.down_proj`

A slice along the first dimension is contiguous in the file, so that every expert is addressed by file and byte range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hfq.errors import FormatError
from hfq.spec import ByteRange, TensorInfo

__all__ = ["split_experts"]

_GPT_OSS = re.compile(r"^(.*)\.(\w+_proj)_(blocks|scales|bias)$")
_FUSED = re.compile(r"^(.*?)\.?(experts\.\w+_proj|input_linear|output_linear)\.(\w+)$")
_GRANITE = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
_CODES = ("weight_packed", "weight")
_PACKED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")
_MOST_EXPERTS = 4096


def split_experts(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors, each fused tensor of packed experts replaced by its experts' slices."""
    split: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        target = _target(name, tensors)
        count = info.shape[0] if info.shape else 0
        if target is None or not 0 < count <= _MOST_EXPERTS:
            split[name] = info
            continue
        nbytes = info.nbytes // count
        for expert in range(count):
            part = f"{target[0]}.{expert}.{target[1]}.{target[2]}"
            source = ByteRange(info.range.file, info.range.offset + expert * nbytes, nbytes)
            if part in tensors:
                raise FormatError(
                    "A checkpoint stores an expert twice; nothing was loaded.", file=info.range.file, tensor=part,
                    expected="each expert fused with the others, or by itself", found=f"{part} and {name}",
                    fix="download the checkpoint again, or remove one of the two",
                )  # fmt: skip
            split[part] = TensorInfo(part, info.dtype, info.shape[1:], source, part_of=name)
    return split


def _target(name: str, tensors: Mapping[str, TensorInfo]) -> tuple[str, str, str] | None:
    """(experts, projection, local name) of a fused tensor's slices; None for any other tensor."""
    if "_proj" not in name and "put_linear" not in name:
        return None
    found = _GPT_OSS.match(name)
    if found and f"{found[1]}.{found[2]}_blocks" in tensors:
        return found[1], found[2], found[3]
    found = _FUSED.match(name)
    if not found:
        return None
    stem = name.removesuffix(f".{found[3]}")
    codes = next((tensors[f"{stem}.{local}"] for local in _CODES if f"{stem}.{local}" in tensors), None)
    if (
        codes is None
        or len(codes.shape) != 3
        or codes.dtype not in _PACKED_DTYPES
        or codes.shape[:1] != tensors[name].shape[:1]
    ):
        return None
    if found[2] in _GRANITE:
        return f"{found[1]}.experts".removeprefix("."), _GRANITE[found[2]], found[3]
    parent, _, projection = found[2].rpartition(".")
    return f"{found[1]}.{parent}".removeprefix("."), projection, found[3]
