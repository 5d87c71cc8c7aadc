"""Experts of gpt-oss, whose checkpoints fuse gate and up channels of all experts of a layer.

    experts.gate_up_proj_blocks U8 [experts, 2 * out, in / 32, 16]    gate and up rows in turn
    experts.gate_up_proj_scales U8 [experts, 2 * out, in / 32]
    experts.gate_up_proj_bias   [experts, 2 * out]

GGUF files and other formats have separate rows of gate and up, so a conversion reads the halves as layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hfq.checkpoint import Reader
from hfq.convert.layer_plan import NewTensor, SourceLayer, refusal
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.mxfp4 import Mxfp4

__all__ = ["fuse_experts", "halves_of"]

_LOCALS = {"weight_packed": "blocks", "weight_scale": "scales", "bias": "bias"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")


@dataclass(frozen=True)
class _Half(SourceLayer):
    """Rows of an expert's layer, with the tensors of compressed-tensors.

    Attributes:
        step: Distance of its rows in the stored layer.
        first: The first row.
    """

    step: int = field(default=1, kw_only=True)
    first: int = field(default=0, kw_only=True)

    def read(self, local: str) -> torch.Tensor:
        found = super().read(local)[self.first :: self.step]
        return (found.flatten(1) if local == "weight_packed" else found).contiguous()

    def copied(self, local: str) -> NewTensor:
        info = self.infos[local]
        return NewTensor(info.dtype, (self.size[0],), lambda: self.read(local), info.range)


def halves_of(layer: SourceLayer) -> Iterator[SourceLayer]:
    """Yields a layer of an expert in MXFP4, or its gate and up rows as layers of their own."""
    infos = {local: layer.infos[stored] for local, stored in _LOCALS.items() if stored in layer.infos}
    stem, _, projection = layer.module.rpartition(".")
    names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    size = (layer.size[0] // len(names), layer.size[1])
    for first, name in enumerate(names):
        yield _Half(f"{stem}.{name}", Mxfp4(), infos, size, layer.reader, step=len(names), first=first)


def fuse_experts(tensors: Mapping[str, NewTensor], reader: Reader) -> dict[str, NewTensor]:
    """Returns tensors with the experts of a layer fused as in gpt-oss.

    Args:
        tensors: All tensors; experts with the tensors of compressed-tensors' MXFP4.
        reader: Reader of the source.

    Raises:
        FormatError: A quantized layer is no expert, or an expert is missing.
    """
    fused, experts = dict[str, NewTensor](), dict[tuple[str, str], dict[tuple[int, str], NewTensor]]()
    for name, tensor in tensors.items():
        found = _EXPERT.fullmatch(name)
        if found is not None:
            experts.setdefault((found[1], found[4]), {})[int(found[2]), found[3]] = tensor
        elif name.endswith(".weight_packed"):
            raise refusal(
                name.removesuffix(".weight_packed"),
                "floats in all layers but experts, because gpt-oss quantizes nothing else",
                "MXFP4",
                "Convert to mxfp4-pack-quantized.",
            )
        else:
            fused[name] = tensor
    for (stem, local), parts in experts.items():
        count = 1 + max(expert for expert, _ in parts)
        for name, projections in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            wanted = [[parts.get((expert, each)) for each in projections] for expert in range(count)]
            rows = [[part for part in each if part is not None] for each in wanted]
            if any(len(each) != len(projections) for each in rows):
                raise refusal(f"{stem}.{name}", f"{count} experts", "fewer", "Keep the checkpoint unchanged.")
            fused[f"{stem}.{name}_{_LOCALS[local]}"] = _fused(rows, local, reader)
    return fused


def _fused(rows: list[list[NewTensor]], local: str, reader: Reader) -> NewTensor:
    first = rows[0][0]
    shape = (len(rows), first.shape[0] * len(rows[0]), *first.shape[1:])
    shape = (*shape[:2], shape[2] // 16, 16) if local == "weight_packed" else shape
    return NewTensor(first.dtype, shape, functools.partial(_stack, rows, shape, reader), first.place)


def _stack(rows: list[list[NewTensor]], shape: tuple[int, ...], reader: Reader) -> torch.Tensor:
    """Returns the experts [experts, rows, …], of each the rows of its parts in turn."""
    count, first = len(rows[0]), rows[0][0]
    stacked = torch.empty(
        (len(rows), first.shape[0], count, *first.shape[1:]), dtype=torch_dtype(first.dtype)
    )
    for places, parts in zip(stacked, rows, strict=True):
        for place, part in zip(places.unbind(1), parts, strict=True):
            place.copy_(part.values(reader))
    return stacked.view(shape)
