"""Dequantization of a loaded model in place, for `model.dequantize()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfq.errors import SetupError
from hfq.loading.matching.target_modules import WEIGHT
from hfq.modules.concat_linear import ConcatLinear
from hfq.modules.embedding import QuantizedEmbedding
from hfq.modules.experts import QuantizedExperts
from hfq.modules.offloaded_parameter import OffloadedParameter
from hfq.modules.output_head import OutputHead
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["dequantize_model", "no_dequantization"]


def dequantize_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces every quantized module by an unquantized one with the same weight.

    Args:
        model: A model whose weights are all in memory.
        dtype: Dtype of the new weights, and of all others if the config names another one.

    Raises:
        SetupError: Weights are offloaded, belong to several ranks, or are those of experts or of a module
            with its own forward. The model is unchanged.
    """
    _check(model)
    if dtype != getattr(model.config, "dtype", dtype):
        model.to(dtype)
        model.config.dtype = dtype
    modules = dict(model.named_modules())
    halves = [
        half for module in modules.values() if isinstance(module, ConcatLinear) for half in module.values()
    ]
    for name, module in modules.items():
        if isinstance(module, QuantizedModule) and module not in halves:
            _replace(model, name, _unquantized(module, dtype))
        elif isinstance(module, ConcatLinear):
            layers = [_unquantized(layer, dtype) for layer in module.values()]  # type: ignore[arg-type]
            _replace(model, name, _concatenated(layers))
        elif isinstance(module, OutputHead):
            module.__class__ = nn.Linear  # type: ignore[assignment]


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        offloaded = [
            tensor for tensor in module._parameters.values() if isinstance(tensor, OffloadedParameter)
        ]
        is_moved = getattr(module, "onload_device", None) is not None
        if offloaded or is_moved or getattr(module, "storage_kind", "") == "shard":
            raise no_dequantization(name)
        if isinstance(module, QuantizedExperts) or name.endswith(f".{WEIGHT}"):
            raise no_dequantization(name)


def no_dequantization(name: str) -> SetupError:
    """Returns the error for a module that cannot be replaced by an unquantized one."""
    return SetupError(
        f"model.dequantize() does not support {name}. The model is unchanged.",
        tensor=name,
        expected="linear layers and embeddings in the memory of one process",
        found="experts, a module with its own forward, offloaded weights, or weights of several processes",
        fix="Load the unquantized checkpoint of this model, or place all weights in memory.",
    )


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, local = name.rpartition(".")
    module.train(model.get_submodule(name).training)
    setattr(model.get_submodule(owner), local, module)


def _unquantized(module: QuantizedModule, dtype: torch.dtype) -> Any:
    """Returns the module of torch or transformers that a quantized module replaced."""
    weight, bias = module.weight, module.bias
    made: nn.Module
    with torch.device("meta"):
        if isinstance(module, QuantizedEmbedding):
            made = _embedding(module)
        elif module.is_transposed:
            made = Conv1D(module.out_features, module.in_features)
        else:
            made = nn.Linear(module.in_features, module.out_features, bias is not None)
    made.weight = nn.Parameter(weight.to(dtype).contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.to(dtype))
    return made


def _embedding(module: QuantizedEmbedding) -> nn.Embedding:
    """Returns an embedding without weights."""
    size = module.num_embeddings, module.embedding_dim, module.padding_idx
    if module.replaced_class is None:
        return nn.Embedding(*size)
    made = module.replaced_class(*size, float(module.embed_scale))
    made.embed_scale = module.embed_scale
    return made


def _concatenated(layers: list[nn.Linear]) -> nn.Linear:
    first, has_bias = layers[0], layers[0].bias is not None
    with torch.device("meta"):
        whole = nn.Linear(first.in_features, sum(layer.out_features for layer in layers), has_bias)
    whole.weight = nn.Parameter(torch.cat([layer.weight.data for layer in layers]))
    if has_bias:
        whole.bias = nn.Parameter(torch.cat([layer.bias.data for layer in layers]))
    return whole
