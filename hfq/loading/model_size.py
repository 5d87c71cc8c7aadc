"""Parameters and bytes of a loaded model, independent of its placement."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from hfq.errors import SetupError
from hfq.loading.loaded_model import loader_of
from hfq.modules.embedding import QuantizedEmbedding
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["is_loaded_by_hfq", "memory_footprint", "num_parameters"]


def is_loaded_by_hfq(model: nn.Module) -> bool:
    """Returns True if a model, or the model that it is a module of, was loaded by hfq."""
    is_root = getattr(vars(model).get("hf_quantizer"), "loading", None) is not None
    return is_root or any(isinstance(module, QuantizedModule) for module in model.modules())


def num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Returns the number of logical parameters of a model that hfq loaded.

    A quantized weight [out, in] counts as `out * in` parameters, however it is stored. Scales, zero points,
    and indices do not count. Tied weights count once.

    Args:
        model: The model, or a module of it.
        only_trainable: True to count trainable parameters only. Quantized weights are frozen.
        exclude_embeddings: True to leave out the weights of embeddings.
    """
    total = 0
    if not only_trainable:
        for module in _quantized_modules(model):
            if not (exclude_embeddings and isinstance(module, QuantizedEmbedding)):
                bias = module.out_features if "bias" in module.infos else 0
                total += module.in_features * module.out_features + bias
    for name, parameter in _unquantized_parameters(model):
        owner, _, local = name.rpartition(".")
        is_table = local == "weight" and isinstance(model.get_submodule(owner), nn.Embedding)
        if (parameter.requires_grad or not only_trainable) and not (exclude_embeddings and is_table):
            total += _numel(parameter)
    return total


def memory_footprint(model: nn.Module, return_buffers: bool = True) -> int:
    """Returns the bytes of the weights of a model that hfq loaded, wherever they are stored.

    Args:
        model: The model, or a module of it.
        return_buffers: True to add the bytes of the buffers.
    """
    infos = (info for module in _quantized_modules(model) for info in module.infos.values())
    total = sum(info.nbytes for info in infos)
    total += sum(
        _numel(parameter) * parameter.element_size() for _, parameter in _unquantized_parameters(model)
    )
    if return_buffers:
        total += sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return total


def _quantized_modules(model: nn.Module) -> Iterator[QuantizedModule]:
    """Yields the quantized modules; of several that read the same stored tensors, the first."""
    seen = set()
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            stored = frozenset(info.range for info in module.infos.values())
            if stored not in seen:
                seen.add(stored)
                yield module


def _unquantized_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters of all other modules; of tied parameters, the one that is stored."""
    ties, stored = getattr(model, "all_tied_weights_keys", {}), _stored_names(model)
    owners = {name for name, module in model.named_modules() if isinstance(module, QuantizedModule)}
    for name, parameter in model.named_parameters():
        is_tied = name in ties and name not in stored
        if name.rpartition(".")[0] not in owners and not is_tied:
            yield name, parameter


def _stored_names(model: nn.Module) -> Collection[str]:
    """Returns the names of the stored unquantized tensors; none for a module of a loaded model."""
    try:
        return loader_of(model).match.unquantized
    except SetupError:
        return ()


def _numel(parameter: Any) -> int:
    """Returns the elements of a parameter; under ZeRO-3 those of all its shards."""
    return getattr(parameter, "ds_numel", parameter.numel())
