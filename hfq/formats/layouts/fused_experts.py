"""Quantized experts that a checkpoint fuses into tensors with one more dimension.

The slice of each expert becomes a separate module.

gpt-oss:
    experts.gate_up_proj_blocks [experts, …]
    becomes `experts.<e>.gate_up_proj` with `blocks`, `scales`, `bias`.
Any format:
    experts.gate_up_proj.weight [experts, out, in], …
    becomes `experts.<e>.gate_up_proj` with `weight`, ….
MLX:
    switch_mlp.gate_proj.weight [experts, out, in], …
    becomes `experts.<e>.gate_proj` with `weight`, ….
GraniteMoe:
    input_linear.weight, output_linear.weight
    become `experts.<e>.gate_up_proj`, `experts.<e>.down_proj`.
ModelOpt:
    experts.gate_up_proj [experts, in, out], and experts.gate_up_proj_weight_scale, …
    become `experts.<e>.gate_up_proj` with `transposed`, `weight_scale`, ….

A slice along the first dimension is contiguous in the file. So a file and a byte range address every expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfq.errors import FormatError
from hfq.tensor_spec import ByteRange, TensorInfo

__all__ = ["TRANSPOSED", "split_experts"]

TRANSPOSED = "transposed"
"""The local name of a ModelOpt expert's codes, which are stored with inputs before outputs.

The stored tensor has only the name of the layer.
"""

_GPT_OSS = re.compile(r"^(.*)\.(\w+_proj)_(blocks|scales|bias)$")
_FUSED = re.compile(r"^(.*?)\.?((?:experts|switch_mlp)\.\w+_proj|input_linear|output_linear)\.(\w+)$")
_GRANITE = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
_MODELOPT = re.compile(
    r"^(.*)\.(gate_up_proj|down_proj)(?:_(weight_scale|weight_scale_2|input_scale|bias))?$"
)
_CODES = ("weight_packed", "weight")
_PACKED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32", "U32")
_MOST_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class _Slices:
    """The target names of the slices of a fused tensor, and their number."""

    experts: str
    projection: str
    local: str
    count: int


def split_experts(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Replaces each fused tensor of quantized experts by the slices of its experts.

    A tensor with a single number is a slice of every expert.
    """
    split: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        target = _target(name, tensors)
        if target is None or not 0 < target.count <= _MOST_EXPERTS:
            split[name] = info
            continue
        nbytes = info.nbytes // target.count if info.shape else 0
        for expert in range(target.count):
            part = f"{target.experts}.{expert}.{target.projection}.{target.local}"
            source = ByteRange(info.range.file, info.range.offset + expert * nbytes, nbytes or info.nbytes)
            if part in tensors:
                raise FormatError(
                    "The checkpoint stores an expert twice. Nothing was loaded.",
                    file=info.range.file,
                    tensor=part,
                    expected="each expert either fused or separate",
                    found=f"{part} and {name}",
                    fix="Download the checkpoint again, or remove one of the two tensors.",
                )
            split[part] = info._replace(name=part, shape=info.shape[1:], range=source, part_of=name)
    return split


def _target(name: str, tensors: Mapping[str, TensorInfo]) -> _Slices | None:
    """Returns the slices of a fused tensor, or None for any other tensor."""
    if "_proj" not in name and "put_linear" not in name:
        return None
    stem, _, local = name.rpartition(".")
    owner, _, layer = stem.rpartition(".")
    if "_proj" not in local and not owner.endswith(("experts", "switch_mlp")) and layer not in _GRANITE:
        return None  # a layer by itself, such as experts.0.gate_proj.qweight
    leading = tensors[name].shape[:1]
    count = leading[0] if leading else 0
    found = _GPT_OSS.match(name)
    if found and f"{found[1]}.{found[2]}_blocks" in tensors:
        return _Slices(found[1], found[2], found[3], count)
    found = _MODELOPT.match(name)
    if found and f"{found[1]}.{found[2]}_weight_scale" in tensors:
        codes = _codes_of([f"{found[1]}.{found[2]}"], tensors)
        if codes is None or leading not in ((), codes.shape[:1]):
            return None
        return _Slices(found[1], found[2], found[3] or TRANSPOSED, codes.shape[0])
    found = _FUSED.match(name)
    if not found:
        return None
    stem = name.removesuffix(f".{found[3]}")
    codes = _codes_of([f"{stem}.{local}" for local in _CODES], tensors)
    if codes is None or codes.shape[:1] != leading:
        return None
    projection = _GRANITE.get(found[2]) or found[2].rpartition(".")[2]
    return _Slices(f"{found[1]}.experts".removeprefix("."), projection, found[3], count)


def _codes_of(names: Iterable[str], tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Returns the first existing tensor of `names`, or None if it cannot be codes of experts."""
    codes = next((tensors[name] for name in names if name in tensors), None)
    if codes is None or len(codes.shape) != 3:
        return None
    is_layer = codes.blocks is not None and codes.blocks.is_layer
    return codes if is_layer or codes.dtype in _PACKED_DTYPES else None
