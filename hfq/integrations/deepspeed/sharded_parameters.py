"""The parameters of a skeleton that hfq shards: where each is stored, who holds it, and how it is cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from hfq.formats.codecs.dtypes import torch_dtype
from hfq.loading.matching.offload_units import stored_place
from hfq.modules.flat_buffer import arena_layout
from hfq.modules.quantized_module import PackedModule
from hfq.placement.zero.shards import ZeroRow, packed_zero_row
from hfq.tensor_spec import DTYPE_BITS

if TYPE_CHECKING:
    from hfq.integrations.deepspeed.zero3_loader import ShardedLoading

__all__ = ["ZeroSlot", "find_slots"]


@dataclass
class ZeroSlot:
    """One parameter to be sharded.

    Attributes:
        row: How it is cut.
        shape: Its shape in the model; that of the flat row for a packed module.
        dtype: Its dtype in the model; the dtype that ZeRO runs in for a packed module.
        stored: The dtype that its bytes are stored as.
        requires_grad: Whether it may be trained.
        module: The packed module whose row it is, if any.
        places: For a dense parameter: the modules that hold it, under which names; several where it is tied.
    """

    row: ZeroRow
    shape: torch.Size
    dtype: torch.dtype
    stored: torch.dtype
    requires_grad: bool = False
    module: PackedModule | None = None
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def find_slots(loading: ShardedLoading) -> list[ZeroSlot]:
    """What is sharded, in the order of the model's modules, which is the same on every rank."""
    slots: list[ZeroSlot] = []
    tied: dict[int, ZeroSlot] = {}
    for name, module in loading.model.named_modules():
        if isinstance(module, PackedModule):
            slots.append(_packed_slot(name, module, loading.zero.dtype))
            continue
        for local, parameter in module._parameters.items():
            full = f"{name}.{local}" if name else local
            if parameter is None or full not in loading.sharded:
                continue
            if id(parameter) not in tied:
                tied[id(parameter)] = _dense_slot(full, parameter, loading)
                slots.append(tied[id(parameter)])
            tied[id(parameter)].places.append((module, local))
    return slots


def _packed_slot(name: str, module: PackedModule, dtype: torch.dtype) -> ZeroSlot:
    row = packed_zero_row(f"{name}.packed_row", module.infos, arena_layout(module.infos), dtype.itemsize)
    return ZeroSlot(row, torch.Size([row.numel]), dtype, dtype, module=module)


def _dense_slot(name: str, parameter: nn.Parameter, loading: ShardedLoading) -> ZeroSlot:
    info = stored_place(name, loading.model, loading.match)
    if info is None:
        raise KeyError(name)  # `ShardedLoading.place` shards only what is stored
    row = ZeroRow(name, info.nbytes, DTYPE_BITS[info.dtype] // 8, ((0, info.range),) if info.nbytes else ())
    requires_grad = loading.sharded[name]
    return ZeroSlot(row, parameter.shape, parameter.dtype, torch_dtype(info.dtype), requires_grad)
