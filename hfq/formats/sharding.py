"""Where a packed layer may be cut for tensor parallelism, and which part of each of its tensors then belongs to a rank.

A cut is exact: every weight of a slice is computed from the same codes, scales and zero points as in the whole layer. So it lies
between whole words of packed codes, and between whole groups where the format has no other way to say which group a channel is in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hfq.errors import FormatError
from hfq.formats.base import Format
from hfq.formats.values import check_index
from hfq.spec import Cut, LayerSlice, TensorInfo

__all__ = ["Fp8Shards", "GptqShards"]

Cuts = dict[str, Cut | None]


class GptqShards(Format):
    """How `Gptq` is cut: words of codes along both axes, groups along the input."""

    num_bits: int
    group_size: int
    is_planar: bool

    def shard(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], index: Mapping[str, torch.Tensor]
    ) -> tuple[Format, Cuts]:
        per_word = 32 if self.is_planar else 32 // math.gcd(32, self.num_bits)
        _check_aligned(self, part, per_word, f"32-bit words of {self.num_bits}-bit codes")
        words = Cut(0, part.start * self.num_bits // 32, self._words(part.stop))
        if part.axis == "out":
            columns = Cut(1, part.start, part.stop)
            packed: Cuts = {"qweight": columns, "scales": columns, "qzeros": dataclasses.replace(words, dim=1)}
            return self, _cuts(part, infos, packed)
        format_, packed = self._input_groups(part, infos, index.get("g_idx"))
        dropped = () if "g_idx" in packed else ("g_idx",)
        return format_, _cuts(part, infos, {"qweight": words, **packed}, dropped)

    def _input_groups(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], g_idx: torch.Tensor | None
    ) -> tuple[Format, Cuts]:
        """A slice of whole groups takes their scales and needs no g_idx; any other takes all scales, and its part of g_idx."""
        span = part.size if self.group_size == -1 else self.group_size
        groups, is_indexed = infos["scales"].shape[0], g_idx is not None and g_idx.numel() > 1
        if g_idx is not None and is_indexed:
            is_scattered = self._is_scattered(infos["g_idx"].name.rpartition(".")[0], g_idx, groups)
            if is_scattered or (groups > 1 and not part.is_aligned(span)):
                return _replaced(self, act_order=True), {"g_idx": Cut(0, part.start, part.stop)}
        if groups == 1:
            return self, {}
        _check_aligned(self, part, span, f"groups of {span} channels")
        rows = Cut(0, *part.units(span))
        return self, {"scales": rows, "qzeros": rows}

    def _words(self, count: int) -> int:
        """The 32-bit words that so many codes take."""
        return -(-count // 32) * self.num_bits if self.is_planar else -(-count * self.num_bits // 32)

    def _is_scattered(self, module: str, g_idx: torch.Tensor, groups: int) -> bool:
        """Whether an index sends channels elsewhere than to the groups in their order (`desc_act`).

        Raises:
            FormatError: The index leaves its range, or groups without channels.
        """
        check_index(module, "g_idx", g_idx, groups)
        if g_idx.unique().numel() != groups:
            raise FormatError(
                "g_idx leaves groups without channels; nothing was loaded.", tensor=f"{module}.g_idx",
                expected=f"all of {groups} groups", found=f"{g_idx.unique().numel()} of them",
                fix="the checkpoint is damaged, or its g_idx was stripped: re-export it",
            )  # fmt: skip
        span = g_idx.numel() if self.group_size == -1 else self.group_size
        return not torch.equal(g_idx, torch.arange(g_idx.numel(), dtype=g_idx.dtype, device=g_idx.device) // span)


class Fp8Shards(Format):
    """How `Fp8` is cut: anywhere, but for groups of the input; a slice takes the scales of all blocks that it reaches into."""

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


def _cuts(part: LayerSlice, infos: Iterable[str], packed: Cuts, dropped: tuple[str, ...] = ()) -> Cuts:
    """The cuts of all stored tensors of a layer; what is not among `packed` is held whole, but for the bias."""
    cuts = {local: packed.get(local) for local in infos if local not in dropped}
    if "bias" in cuts and part.axis == "out":
        cuts["bias"] = Cut(0, part.start, part.stop)
    if part.axis == "in" and part.start > 0:
        cuts.pop("bias", None)  # the rank that starts at 0 adds it
    return cuts


def _replaced(found: Any, **values: Any) -> Format:
    """A format is a dataclass, which its base cannot say."""
    return dataclasses.replace(found, **values)


def _check_aligned(found: Format, part: LayerSlice, multiple: int, what: str) -> None:
    if not part.is_aligned(multiple):
        raise FormatError(
            f"A {found.describe()} layer cannot be cut there for tensor parallelism; nothing was loaded.", found=str(part),
            expected=f"a cut between {what}", fix="use fewer ranks (tp_size), or device_map in place of tp_plan",
        )  # fmt: skip
