"""Implementation of `hfq.fms.load`.

It builds FMS's model on the meta device, replaces its linear layers with hfq's, and checks that every tensor
is loaded.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from fms.models import get_model
from fms.modules.tp import TPModule
from torch import nn

from hfq.checkpoint import Reader
from hfq.errors import FormatError, SetupError, nearest
from hfq.integrations.fms.attention import guard_attention
from hfq.integrations.fms.fms_config import Source, read_source
from hfq.integrations.fms.fms_layers import Layers, rank_slice_of
from hfq.integrations.fms.row_layout import Layout, find_layout
from hfq.loading.config import HfqConfig
from hfq.loading.quantize_on_load.requirements import refuse_quantize_on_load
from hfq.modules.flat_buffer import is_mappable, map_tensor, read_tensor
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["unquantized_tensors", "load_model", "make_meta_model"]

logger = logging.getLogger(__name__)


def load_model(
    path: str | os.PathLike,
    data_type: Any,
    device: torch.device,
    fused: bool | None,
    strategy: str | None,
    group: Any,
    config: HfqConfig | None,
) -> nn.Module:
    """See `hfq.fms.load`."""
    started, config = time.perf_counter(), config or HfqConfig()
    dtype = _dtype(data_type)
    _check_options(strategy, fused, config)
    source = read_source(path)
    reader = Reader(source.checkpoint)
    model, layout = _lay_out(source, reader, dtype or source.dtype, fused, strategy, group)
    layers, problems = Layers(source, layout, config, reader), list[str]()
    for name in layout.layers:
        _place_layer(model, name, layers, device, problems)
    _place_dense(model, layout.unquantized, dtype or source.dtype, device, problems)
    _raise(problems, source)
    model.post_init()
    _check_complete(model, source)
    quantized = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    formats = ", ".join(sorted({module.weight_format.describe() for module in quantized}))
    reordered = sum(part.order is not None for parts in layout.layers.values() for part in parts)
    logger.info(
        "hfq: loaded %s for FMS in %.2f s: %d quantized layers (%s), %d of them with their rows in FMS's "
        "order",
        path,
        time.perf_counter() - started,
        len(quantized),
        formats or "none",
        reordered,
    )
    guard_attention(model)
    return model.eval()


def _lay_out(
    source: Source,
    reader: Reader,
    dtype: torch.dtype | None,
    fused: bool | None,
    strategy: str | None,
    group: Any,
) -> tuple[Any, Layout]:
    """Returns FMS's meta model and its layout.

    If `fused` and `strategy` are None, fused layers are used only if the checkpoint stores them fused.
    """
    unquantized, first = unquantized_tensors(source, reader), None
    for is_fused in (False, True) if fused is None and strategy is None else (bool(fused),):
        model = make_meta_model(source, dtype, is_fused, strategy, group)
        try:
            return model, find_layout(
                source.architecture, model.config, source.match, unquantized, source.head_dim
            )
        except FormatError as error:
            first = first or error
    raise first  # type: ignore[misc]  # there was at least one attempt


def make_meta_model(
    source: Source, dtype: torch.dtype | None, fused: bool, strategy: str | None, group: Any
) -> Any:
    """Returns FMS's model on the meta device, with plain linear layers.

    Raises:
        SetupError: FMS cannot build the model, for example because the ranks do not divide the heads.
    """
    params = source.params | {"fused_weights": fused}
    try:
        return get_model(
            source.architecture,
            device_type="meta",
            data_type=dtype,
            distributed_strategy=strategy or "none",
            group=group,
            **params,
        )
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        raise SetupError(
            "FMS cannot build this model. Nothing was loaded.",
            file=source.checkpoint.root,
            found=f"{type(error).__name__}: {error}",
            expected="a config and a number of ranks that FMS supports",
            fix="Use a number of ranks that divides the heads, or load the model with transformers: "
            "from_pretrained(path, quantization_config=HfqConfig()).",
        ) from error


def unquantized_tensors(source: Source, reader: Reader) -> dict[str, torch.Tensor]:
    """Returns the unquantized tensors that the model uses, by checkpoint name.

    Aligned tensors are memory-mapped.
    """
    quantized = {
        info.part_of or info.name
        for found in source.match.quantized.values()
        for info in found.infos.values()
    }
    left_out = {*quantized, *source.match.unused, *source.match.kept}
    return {
        name: map_tensor(reader, info) if is_mappable({name: info}) else read_tensor(reader, info)
        for name, info in source.checkpoint.tensors.items()
        if name not in left_out
    }


def _place_layer(
    model: nn.Module, name: str, layers: Layers, device: torch.device, problems: list[str]
) -> None:
    parent, _, local = name.rpartition(".")
    try:
        replaced = model.get_submodule(name)
    except AttributeError:
        names = [other for other, _ in model.named_modules()]
        problems.append(f"{name}: quantized, but FMS's model has no such layer.{nearest(name, names)}")
        return
    rank, world = _ranks(model, name)
    shape = (getattr(replaced, "out_features", None), getattr(replaced, "in_features", None))
    if isinstance(replaced, nn.Embedding):
        shape = (replaced.num_embeddings, replaced.embedding_dim)
    whole = layers.sizes(name)
    if shape[0] is None or shape[1] is None or (shape != whole and world == 1):
        problems.append(
            f"{name}: quantized [{whole[0]}, {whole[1]}], but FMS's {type(replaced).__name__} is "
            f"[{shape[0]}, {shape[1]}]"
        )
        return
    module = layers.build(name)
    layers.fill(name, module, device, rank_slice_of(name, (shape[0], shape[1]), whole, rank, world))
    module.train(replaced.training)
    setattr(model.get_submodule(parent), local, module)


def _place_dense(
    model: nn.Module,
    unquantized: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    device: torch.device,
    problems: list[str],
) -> None:
    owners = dict(model.named_modules(remove_duplicate=False))
    for name, stored in unquantized.items():
        parent, _, local = name.rpartition(".")
        owner = owners.get(parent)
        place = None if owner is None else owner._parameters.get(local, owner._buffers.get(local))
        if owner is None or place is None:
            problems.append(f"{name}: stored, but FMS's model has no such tensor")
            continue
        rank, world = _ranks(model, name)
        tensor = _part_of(stored, place, rank, world)
        if tensor is None:
            problems.append(f"{name}: expected {list(place.shape)}, found {list(stored.shape)}")
            continue
        weight = unquantized.get(f"{parent}.weight")
        is_cut = isinstance(owner, nn.Linear) and weight is not None and weight.shape[-1] != owner.in_features
        if local == "bias" and is_cut and rank > 0:
            tensor = torch.zeros_like(
                tensor
            )  # each rank computes a partial sum, and only rank 0 adds the bias
        tensor = tensor.to(
            device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        )
        if local in owner._parameters:
            owner._parameters[local] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[local] = tensor


def _part_of(stored: torch.Tensor, place: torch.Tensor, rank: int, world: int) -> torch.Tensor | None:
    """Returns a rank's slice of an unquantized tensor, or None if the shapes do not match."""
    if place.dim() != stored.dim():
        return None
    cut = [dim for dim in range(stored.dim()) if place.shape[dim] != stored.shape[dim]]
    if not cut:
        return stored
    local_size = place.shape[cut[0]]
    count = stored.shape[cut[0]] // local_size if local_size else 0
    if len(cut) > 1 or count * local_size != stored.shape[cut[0]] or not 1 < count <= world:
        return None
    return stored.narrow(cut[0], rank * count // world * local_size, local_size).contiguous()


def _ranks(model: nn.Module, name: str) -> tuple[int, int]:
    """Returns (rank, number of ranks) of the innermost tensor-parallel module around a name.

    Without one, returns (0, 1).
    """
    found = (0, 1)
    path = name.split(".")
    for end in range(1, len(path) + 1):
        try:
            module = model.get_submodule(".".join(path[:end]))
        except AttributeError:
            break
        if isinstance(module, TPModule):
            found = (module.rank, module.world_size)
    return found


def _check_complete(model: nn.Module, source: Source) -> None:
    state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    _raise(
        [f"{name}: missing, expected {list(tensor.shape)}" for name, tensor in state if tensor.is_meta],
        source,
    )


def _raise(problems: list[str], source: Source) -> None:
    if problems:
        raise FormatError(
            "The checkpoint does not match FMS's model. Nothing was loaded.",
            file=source.checkpoint.root,
            problems=problems,
            fix="Load it with transformers: from_pretrained(path, quantization_config=HfqConfig()).",
        )


def _dtype(data_type: Any) -> torch.dtype | None:
    found = getattr(torch, data_type, None) if isinstance(data_type, str) else data_type
    is_float = isinstance(found, torch.dtype) and found.is_floating_point
    if (data_type is not None and found is None) or (found is not None and not is_float):
        raise SetupError(
            f"data_type={data_type!r} of hfq.fms.load is not a float dtype.",
            expected="torch.float32, torch.bfloat16, or torch.float16, or one of their names",
            found=repr(data_type),
            fix="Pass a float dtype, or omit data_type to use the dtype of the checkpoint.",
        )
    return found


def _check_options(strategy: str | None, fused: bool | None, config: HfqConfig) -> None:
    if strategy not in (None, "tp"):
        raise SetupError(
            f"distributed_strategy={strategy!r} is not supported by hfq.fms.load.",
            expected="None or 'tp'",
            found=repr(strategy),
            fix="Pass 'tp' in a process group, or omit distributed_strategy.",
        )
    if strategy == "tp" and fused:
        raise SetupError(
            "hfq.fms.load does not support fused_weights=True with distributed_strategy='tp'.",
            expected="fused_weights=False",
            found="True",
            fix="Omit fused_weights.",
        )
    if strategy == "tp" and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise SetupError(
            "hfq.fms.load(distributed_strategy='tp') requires a process group.",
            expected="an initialized torch.distributed process group",
            found="none",
            fix="Start the script with torchrun, and call torch.distributed.init_process_group first.",
        )
    if not isinstance(config, HfqConfig) or config.cpu_memory == "shared":
        raise SetupError(
            "hfq.fms.load does not support this config.",
            expected="an HfqConfig with cpu_memory 'auto', 'mmap', or 'private'",
            found=repr(getattr(config, "cpu_memory", config))[:80],
            fix='Omit config, or pass HfqConfig(cpu_memory="auto").',
        )
    refuse_quantize_on_load(config, "hfq.fms.load")
