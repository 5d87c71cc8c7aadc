"""Parameters of a meta model that hfq shards, with their sources, owners, and shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from hfq.formats.codecs.dtypes import torch_dtype
from hfq.loading.matching.match import CheckpointMatch
from hfq.loading.matching.offload_units import stored_place
from hfq.modules.flat_buffer import flat_layout
from hfq.modules.quantized_module import QuantizedModule
from hfq.placement.zero.shards import FlatParameter, flat_parameter
from hfq.tensor_spec import DTYPE_BITS, TensorInfo

__all__ = ["ShardedParameter", "find_sharded_parameters"]


@dataclass
class ShardedParameter:
    """One parameter to shard.

    Attributes:
        flat: Its bytes in the checkpoint and their partition.
        shape: Its shape in the model, or the shape of the flat buffer for a quantized module.
        dtype: Its dtype in the model, or the dtype that ZeRO runs in for a quantized module.
        stored: The stored dtype of its bytes. For a quantized module, the same as `dtype`.
        requires_grad: True if it may be trained.
        module: The quantized module whose flat buffer it is, or None for an unquantized parameter.
        places: For an unquantized parameter, each owning module with the parameter's name in it. A tied
            parameter has several. Empty for a quantized module.
    """

    flat: FlatParameter
    shape: torch.Size
    dtype: torch.dtype
    stored: torch.dtype
    requires_grad: bool = False
    module: QuantizedModule | None = None
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def find_sharded_parameters(
    model: nn.Module, match: CheckpointMatch, sharded: Mapping[str, bool], zero_dtype: torch.dtype
) -> list[ShardedParameter]:
    """Lists the sharded parameters in module order, which is the same on every rank.

    Args:
        model: The model on the meta device.
        match: The stored tensor of every parameter.
        sharded: The unquantized parameters that hfq shards, by name, and True for those that may be trained.
        zero_dtype: The dtype that ZeRO runs in.

    Returns:
        The parameters. Tied parameters are listed once.
    """
    sharded_parameters: list[ShardedParameter] = []
    tied: dict[int, ShardedParameter] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            sharded_parameters.append(_quantized_parameter(name, module, zero_dtype))
            continue
        for local, parameter in module._parameters.items():
            full = f"{name}.{local}" if name else local
            if parameter is None or full not in sharded:
                continue
            if id(parameter) not in tied:
                tied[id(parameter)] = _unquantized_parameter(
                    full, parameter, stored_place(full, model, match), sharded[full]
                )
                sharded_parameters.append(tied[id(parameter)])
            tied[id(parameter)].places.append((module, local))
    return sharded_parameters


def _quantized_parameter(name: str, module: QuantizedModule, dtype: torch.dtype) -> ShardedParameter:
    flat = flat_parameter(f"{name}.flat_buffer", module.infos, flat_layout(module.infos), dtype.itemsize)
    return ShardedParameter(flat, torch.Size([flat.numel]), dtype, dtype, module=module)


def _unquantized_parameter(
    name: str, parameter: nn.Parameter, info: TensorInfo | None, requires_grad: bool
) -> ShardedParameter:
    if info is None:
        raise KeyError(name)  # `Zero3Loader.place` shards only stored parameters
    flat = FlatParameter(
        name, info.nbytes, DTYPE_BITS[info.dtype] // 8, ((0, info.range),) if info.nbytes else ()
    )
    return ShardedParameter(flat, parameter.shape, parameter.dtype, torch_dtype(info.dtype), requires_grad)
