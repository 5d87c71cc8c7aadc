"""Slices of quantized layers for tensor parallelism.

A slice is exact: every weight is computed from the same codes, scales, and zero points as in the whole layer.
So a cut must be between whole words of packed codes. It must also be between whole groups if the format has
no other way to assign channels to groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from hfq.checkpoint.gguf.block_types import block_type
from hfq.errors import FormatError
from hfq.formats.base import Format
from hfq.formats.codecs.value_checks import check_index
from hfq.tensor_spec import Blocks, Cut, LayerSlice, TensorInfo

__all__ = ["AwqShards", "BlockShards", "Fp8Shards", "GptqShards", "PackShards", "ScaledShards"]

Cuts = dict[str, Cut | None]


class GptqShards(Format):
    """Slices of `Gptq`: between words of codes on both axes, and between groups of the input."""

    num_bits: int
    group_size: int
    is_planar: bool

    def shard(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], index: Mapping[str, torch.Tensor]
    ) -> tuple[Format, Cuts]:
        words = _words_along(self, part, self.num_bits, dim=0, is_planar=self.is_planar)
        if part.axis == "out":
            columns = Cut(1, part.start, part.stop)
            packed: Cuts = {
                "qweight": columns,
                "scales": columns,
                "qzeros": dataclasses.replace(words, dim=1),
            }
            return self, _cuts(part, infos, packed)
        format_, packed = self._input_groups(part, infos, index.get("g_idx"))
        dropped = () if "g_idx" in packed else ("g_idx",)
        return format_, _cuts(part, infos, {"qweight": words, **packed}, dropped)

    def _input_groups(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], g_idx: torch.Tensor | None
    ) -> tuple[Format, Cuts]:
        """Returns a slice along the input.

        A slice of whole groups holds their scales and needs no g_idx. Any other slice holds all scales and
        its part of g_idx.
        """
        span = part.size if self.group_size == -1 else self.group_size
        groups, is_indexed = infos["scales"].shape[0], g_idx is not None and g_idx.numel() > 1
        if g_idx is not None and is_indexed:
            is_scattered = self._is_scattered(infos["g_idx"].name.rpartition(".")[0], g_idx, groups)
            if is_scattered or (groups > 1 and not part.is_aligned(span)):
                whole = _replaced(self, act_order=True, stored_groups=groups)
                return whole, {"g_idx": Cut(0, part.start, part.stop)}
        if groups == 1:
            return self, {}
        _check_aligned(self, part, span, f"groups of {span} channels")
        rows = Cut(0, *part.units(span))
        return self, {"scales": rows, "qzeros": rows}

    def _is_scattered(self, module: str, g_idx: torch.Tensor, groups: int) -> bool:
        """Returns True if an index does not assign the channels to groups in order (`desc_act`).

        Raises:
            FormatError: The index is out of range, or a group has no channels.
        """
        span = g_idx.numel() if self.group_size == -1 else self.group_size
        trivial = torch.arange(g_idx.numel(), dtype=g_idx.dtype, device=g_idx.device) // span
        is_trivial = torch.equal(g_idx, trivial)
        if is_trivial and groups == -(-g_idx.numel() // span):
            return False
        check_index(module, "g_idx", g_idx, groups)
        if g_idx.unique().numel() != groups:
            raise FormatError(
                "g_idx leaves groups without channels. Nothing was loaded.",
                tensor=f"{module}.g_idx",
                expected=f"all of {groups} groups",
                found=f"{g_idx.unique().numel()} of them",
                fix="Export the checkpoint again with its original g_idx.",
            )
        return not is_trivial

    def _are_scattered(self, g_idx: torch.Tensor, groups: int) -> bool | None:
        """Returns what `_is_scattered` returns for each layer of a stack.

        Returns None if the layers differ, or an index is wrong.
        """
        channels = g_idx.shape[1]
        span = channels if self.group_size == -1 else self.group_size
        trivial = torch.arange(channels, dtype=g_idx.dtype, device=g_idx.device) // span
        is_trivial = (g_idx == trivial).all(1)
        if bool(is_trivial.all()) and groups == -(-channels // span):
            return False
        if bool(is_trivial.any()) or int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
            return None
        used = torch.zeros(len(g_idx), groups, dtype=torch.bool, device=g_idx.device)
        return True if bool(used.scatter_(1, g_idx.to(torch.int64), True).all()) else None


class Fp8Shards(Format):
    """Slices of `Fp8`: at any position, except within groups of the input.

    A slice holds the scales of all blocks that it overlaps.
    """

    strategy: Any
    block_structure: tuple[int, int] | None
    group_size: int | None
    scale_name: str
    scale_shape: tuple[int, ...] | None

    def shard(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], index: Mapping[str, torch.Tensor]
    ) -> tuple[Format, Cuts]:
        dim = 0 if part.axis == "out" else 1
        codes = Cut(dim, part.start, part.stop)
        if self.strategy == "block":
            return self._blocks(part, infos, codes)
        if self.strategy == "group" and part.axis == "in":
            size = self.group_size or part.size
            _check_aligned(self, part, size, f"groups of {size} channels")
            return self, _cuts(part, infos, {"weight": codes, self.scale_name: Cut(1, *part.units(size))})
        has_rows = part.axis == "out" and self.strategy != "tensor"
        return self, _cuts(part, infos, {"weight": codes, self.scale_name: codes if has_rows else None})

    def _blocks(self, part: LayerSlice, infos: Mapping[str, TensorInfo], codes: Cut) -> tuple[Format, Cuts]:
        block, shape = (self.block_structure or (128, 128))[codes.dim], infos[self.scale_name].shape
        first, last = part.units(block)
        scale = Cut(2 * codes.dim if len(shape) == 4 else codes.dim, first, last)
        offset = part.start - first * block
        found = _replaced(self, block_offset=(offset, 0) if codes.dim == 0 else (0, offset))
        if self.scale_shape is not None:
            found = _replaced(found, scale_shape=(*shape[: scale.dim], last - first, *shape[scale.dim + 1 :]))
        return found, _cuts(part, infos, {"weight": codes, self.scale_name: scale})


class AwqShards(Format):
    """Slices of `Awq` gemm: between words of codes on the output, and groups on the input."""

    version: str
    num_bits: int
    group_size: int
    zeros_name: str

    def shard(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], index: Mapping[str, torch.Tensor]
    ) -> tuple[Format, Cuts]:
        if self.version != "gemm":
            return super().shard(part, infos, index)
        if part.axis == "in":
            span = part.size if self.group_size == -1 else self.group_size
            _check_aligned(self, part, span, f"groups of {span} channels")
            groups = Cut(0, *part.units(span))
            return self, _cuts(
                part,
                infos,
                {"qweight": Cut(0, part.start, part.stop), "scales": groups, self.zeros_name: groups},
            )
        words = _words_along(self, part, self.num_bits, dim=1)
        return self, _cuts(
            part, infos, {"qweight": words, self.zeros_name: words, "scales": Cut(1, part.start, part.stop)}
        )


class PackShards(Format):
    """Slices of `PackQuantized`.

    Cuts are between words of codes along the input, and between words of packed zero points along the output.
    """

    num_bits: int
    is_straddling: bool
    is_symmetric: bool
    has_g_idx: bool
    zero_dtype: str
    scale_shape: tuple[int, ...]
    size: tuple[int, int]

    def shard(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], index: Mapping[str, torch.Tensor]
    ) -> tuple[Format, Cuts]:
        count, (out_features, in_features) = part.stop - part.start, self.size
        cuts: Cuts
        if part.axis == "out":
            rows = Cut(0, part.start, part.stop)
            is_quantized = not self.is_symmetric and self.zero_dtype == "I32"
            zero = _words_along(self, part, self.num_bits, dim=0) if is_quantized else rows
            cuts = {
                "weight_packed": rows,
                "weight_zero_point": zero,
                "weight_scale": rows if self._has_rows else None,
            }
            size = (count, in_features)
        else:
            cuts = self._input_cuts(part)
            size = (out_features, count)
        scale = cuts.get("weight_scale")
        shape = self.scale_shape
        if scale is not None:
            shape = (*shape[: scale.dim], scale.stop - scale.start, *shape[scale.dim + 1 :])
        words = cuts["weight_packed"]
        width = (
            words.stop - words.start
            if words is not None and words.dim == 1
            else infos["weight_packed"].shape[1]
        )
        found = _replaced(self, size=size, width=width, scale_shape=shape)
        return found, _cuts(
            part, infos, cuts, ("weight_shape",)
        )  # weight_shape is the shape of the whole layer

    @property
    def _has_rows(self) -> bool:
        return self.scale_shape not in ((), (1,))

    def _input_cuts(self, part: LayerSlice) -> Cuts:
        if self.is_straddling:
            words = _words_along(self, part, self.num_bits, dim=1)
        else:
            per_word = 32 // self.num_bits
            _check_aligned(self, part, per_word, f"words of {per_word} codes")
            words = Cut(1, *part.units(per_word))
        groups = self.scale_shape[1] if len(self.scale_shape) == 2 else 1
        if self.has_g_idx:
            return {"weight_packed": words, "weight_g_idx": Cut(0, part.start, part.stop)}
        if groups == 1:
            return {"weight_packed": words}
        _check_aligned(self, part, part.size // groups, f"groups of {part.size // groups} channels")
        columns = Cut(1, *part.units(part.size // groups))
        return {"weight_packed": words, "weight_scale": columns, "weight_zero_point": columns}


class ScaledShards(Format):
    """Slices of `ScaledCodes`.

    Cuts are at any position along the output, except within a block of a grid. Along the input, they are
    between groups or blocks.
    """

    codes: ClassVar[str]
    scale: ClassVar[str]
    zero: ClassVar[str]
    columns: ClassVar[str]
    scale_shape: tuple[int, ...]
    block: tuple[int, int] | None

    def shard(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], index: Mapping[str, torch.Tensor]
    ) -> tuple[Format, Cuts]:
        dim = 0 if part.axis == "out" else 1
        codes = Cut(dim, part.start, part.stop)
        scale = None
        shape = infos[self.scale].shape
        shared = self._shared(part, shape)
        if shared is not None:
            _check_aligned(self, part, shared, f"groups of {shared}")
            scale = Cut(dim, *part.units(shared))
            shape = (*shape[:dim], scale.stop - scale.start, *shape[dim + 1 :])
        cuts: Cuts = {self.codes: codes, self.scale: scale, self.zero: scale}
        if dim == 1:
            cuts[self.columns] = Cut(0, part.start, part.stop)
        return _replaced(self, scale_shape=shape), _cuts(part, infos, cuts)

    def _shared(self, part: LayerSlice, shape: tuple[int, ...]) -> int | None:
        """Returns the number of neighbors on the axis of a cut that share a scale; None if all do."""
        if self.block:
            return self.block[0 if part.axis == "out" else 1]
        if shape in ((), (1,), (1, 1)):
            return None
        if part.axis == "out":
            return 1
        return part.size // shape[1] if len(shape) == 2 and shape[1] > 1 else None


class BlockShards(Format):
    """Slices of `Gguf`: at a row or between heads with a row order, and between blocks."""

    blocks: Blocks

    def shard(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], index: Mapping[str, torch.Tensor]
    ) -> tuple[Format, Cuts]:
        if part.axis == "in":
            if self.blocks.columns is not None:
                return super().shard(part, infos, index)
            kind = block_type(self.blocks.type)
            _check_aligned(self, part, kind.size, f"blocks of {kind.size} weights")
            nbytes = kind.nbytes if kind.dtype == "U8" else 1
            return self, _cuts(part, infos, {"weight": Cut(1, *(n * nbytes for n in part.units(kind.size)))})
        rows, blocks = self.blocks.rows, self.blocks
        if rows is not None:
            head = rows.first * rows.second * rows.inner
            if rows.start or rows.outer == 1:
                return super().shard(part, infos, index)
            _check_aligned(self, part, head, f"heads of {head} rows")
            outer = (part.stop - part.start) // head
            blocks = dataclasses.replace(blocks, rows=dataclasses.replace(rows, outer=outer))
        return _replaced(self, blocks=blocks), _cuts(part, infos, {"weight": Cut(0, part.start, part.stop)})


def _words_along(found: Format, part: LayerSlice, num_bits: int, dim: int, is_planar: bool = False) -> Cut:
    """Returns the 32-bit words of a slice, from a stream of codes or from planes of 32 codes."""
    unit = 32 if is_planar else 32 // math.gcd(32, num_bits)
    _check_aligned(found, part, unit, f"32-bit words of {num_bits}-bit codes")
    stop = -(-part.stop // 32) * num_bits if is_planar else -(-part.stop * num_bits // 32)
    return Cut(dim, part.start * num_bits // 32, stop)


def _cuts(part: LayerSlice, infos: Iterable[str], packed: Cuts, dropped: tuple[str, ...] = ()) -> Cuts:
    """Returns the cuts of all stored tensors of a layer.

    A rank holds all of each tensor that is not in `packed`, except for the bias.
    """
    cuts = {local: packed.get(local) for local in infos if local not in dropped}
    if "bias" in cuts and part.axis == "out":
        cuts["bias"] = Cut(0, part.start, part.stop)
    if part.axis == "in" and part.start > 0:
        cuts.pop("bias", None)  # only the rank that starts at 0 adds the bias
    return cuts


def _replaced(found: Any, **values: Any) -> Format:
    """Returns a copy of a format, which is a dataclass, with these values replaced."""
    return dataclasses.replace(found, **values)


def _check_aligned(found: Format, part: LayerSlice, multiple: int, what: str) -> None:
    if not part.is_aligned(multiple):
        raise FormatError(
            f"Tensor parallelism cannot cut a {found.describe()} layer at this position. Nothing was loaded.",
            found=str(part),
            expected=f"a cut between {what}",
            fix="Use fewer ranks (tp_size), or pass device_map instead of tp_plan.",
        )
