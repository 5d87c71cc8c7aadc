"""Sizes of the KV cache of each layer, from the config and the meta model.

transformers decides which layers use a sliding window (`DynamicCache`). The modules of a layer give the sizes
of its keys and values.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hfq.placement.estimate.estimate import Workload
from hfq.placement.estimate.kv_cache import Activations, KvLayer, activation_nbytes, kv_nbytes

__all__ = ["activation_sizes", "context_nbytes", "kv_layers"]


def kv_layers(model: PreTrainedModel) -> tuple[list[KvLayer], int]:
    """Returns the cache of each decoder layer, and the number of layers with an uncounted state.

    Uncounted states are those of convolutions and recurrences.

    Args:
        model: The model, or its meta model; its projections may be quantized.
    """
    config = model.config.get_text_config(decoder=True)
    cached = DynamicCache(config=config).layers
    attentions = _attentions(model)
    layers, uncounted = [], 0
    per_layer = getattr(config, "per_layer_config", None) or [config] * len(cached)
    for index, layer in enumerate(cached):
        kind = type(layer).__name__
        uncounted += "Linear" in kind
        if kind == "DummyLayer" or not hasattr(layer, "is_sliding"):
            continue
        keys, values = _sizes(per_layer[index], attentions.get(index))
        window = getattr(layer, "sliding_window", None)
        extra = getattr(config, "index_head_dim", 0) if "Indexed" in kind else 0
        heads = 1 if keys == getattr(config, "kv_lora_rank", None) else _heads(per_layer[index])
        layers.append(KvLayer(keys, values, int(window) if window is not None else None, extra, heads))
    return layers, uncounted


def activation_sizes(model: PreTrainedModel) -> Activations:
    """Returns the sizes that determine the activation memory of a forward pass."""
    config = model.config.get_text_config(decoder=True)
    hidden = int(config.hidden_size)
    widest = hidden
    for module in model.modules():
        outs = [
            _out(child)
            for name, child in module.named_children()
            if name in ("gate_proj", "up_proj", "w1", "w3")
        ]
        attention = [
            _out(child) for name, child in module.named_children() if name in ("q_proj", "k_proj", "v_proj")
        ]
        one = [
            _out(child)
            for _, child in module.named_children()
            if not (outs or attention) and _out(child) > hidden
        ]
        widest = max(
            widest, sum(outs), sum(attention), *[size for size in one if size != config.vocab_size], 0
        )
    return Activations(hidden, widest, int(config.vocab_size), int(config.num_hidden_layers))


def context_nbytes(model: PreTrainedModel) -> int:
    """Returns the bytes of the KV cache and activations of the default `Workload`."""
    (layers, _), workload = kv_layers(model), Workload()
    dtype, batch, context = str(model.dtype).removeprefix("torch."), workload.batch, workload.context
    kv = kv_nbytes(layers, batch, context, dtype, workload.kv_dtype)
    return kv + activation_nbytes(activation_sizes(model), batch, context, dtype)


def _attentions(model: nn.Module) -> dict[int, nn.Module]:
    """Returns the attention module of each layer, by its index in the cache."""
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        is_attention = any(hasattr(module, child) for child in ("k_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
        if isinstance(index, int) and is_attention and "cross" not in name.lower():
            found.setdefault(index, module)
    return found


def _sizes(config: Any, attention: nn.Module | None) -> tuple[int, int]:
    """Returns (elements of the keys, elements of the values) of one token, over all heads."""
    if getattr(config, "kv_lora_rank", None) and getattr(config, "qk_rope_head_dim", None):
        # transformers 5.23 caches latents, earlier versions cache the expanded keys and values
        if attention is None or hasattr(attention, "expand_kv"):
            return config.kv_lora_rank, config.qk_rope_head_dim
        heads = config.num_attention_heads
        return heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), heads * config.v_head_dim
    keys, values = _out(getattr(attention, "k_proj", None)), _out(getattr(attention, "v_proj", None))
    if keys:
        return keys, values or keys
    heads = _heads(config)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads * size, heads * size


def _heads(config: Any) -> int:
    """Returns the number of KV heads."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _out(module: Any) -> int:
    """Returns the output features of a linear layer, quantized or not; 0 for other modules."""
    found = getattr(module, "out_features", None) or getattr(module, "nf", 0)
    return found if isinstance(found, int) else 0
