"""The bytes of the KV cache and of activations, by layer, batch and context. Pure data.

A cached token takes two tensors in each layer: its keys [batch, heads, tokens, k] and its values [batch,
heads, tokens, v]. Layers with grouped queries have fewer heads there than the queries have; with multi-head
latent attention (DeepSeek-V2, 2024, section 2.1) one head of latents stands for all. A layer with a sliding
window of w keeps the last w - 1 tokens, as the token that computes is the one more that it sees
(transformers, cache_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfq.errors import PlacementError, nearest

__all__ = ["KV_DTYPES", "Activations", "KvLayer", "activation_nbytes", "kv_nbytes"]

KV_DTYPES = ("auto", "fp8", "int4", "int2")
"""`auto` is the dtype that the model computes in; `fp8`, `int4` and `int2` are transformers' quantized
caches.
"""

_FLOAT_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GROUP = 64
_RESIDUAL = 128
_FP8_SCALE = 4


@dataclass(frozen=True, slots=True)
class KvLayer:
    """What one layer caches.

    Attributes:
        keys: Elements of a token's keys, over all heads; 0 for a layer that caches none.
        values: Elements of a token's values.
        window: The sliding window in tokens; None where every token is kept.
        extra: Further elements of a token, as the keys of an indexer.
    """

    keys: int
    values: int
    window: int | None = None
    extra: int = 0

    def tokens(self, context: int) -> int:
        """How many tokens it keeps of a context."""
        return context if self.window is None else min(context, max(self.window - 1, 0))


def kv_nbytes(layers: Sequence[KvLayer], batch: int, context: int, dtype: str, kv_dtype: str = "auto") -> int:
    """The bytes of a whole KV cache after `context` tokens.

    Args:
        layers: What each layer caches.
        batch: Sequences.
        context: Tokens of each.
        dtype: The dtype that the model computes in.
        kv_dtype: One of `KV_DTYPES`. The quantized ones are exact for `fp8`, a bound for `int4` and `int2`:
            what is quantized takes its codes, and a scale and a shift for each 64 elements, and up to 127
            tokens are not quantized yet.

    Raises:
        PlacementError: A size is out of range, a dtype unknown, or the cache cannot be quantized.
    """
    _check(batch, context, kv_dtype)
    return sum(_layer_nbytes(layer, batch, layer.tokens(context), dtype, kv_dtype) for layer in layers)


def _layer_nbytes(layer: KvLayer, batch: int, tokens: int, dtype: str, kv_dtype: str) -> int:
    itemsize = _FLOAT_NBYTES.get(dtype, 4)
    kept = batch * tokens * (layer.keys + layer.values + layer.extra)
    if kv_dtype == "auto":
        return kept * itemsize
    if layer.window is not None or layer.extra:
        raise PlacementError(
            "transformers' quantized KV cache takes layers of full attention alone.",
            found=f"--kv-cache-dtype {kv_dtype}",
            expected="no sliding windows and no indexers",
            fix="pass --kv-cache-dtype auto",
        )
    if kv_dtype == "fp8":
        return kept + (2 * _FP8_SCALE if kept else 0)
    bits, elements = int(kv_dtype.removeprefix("int")), layer.keys + layer.values
    recent = min(tokens, _RESIDUAL - 1)
    quantized = batch * (tokens - recent) * elements
    return (
        -(-quantized * bits // 8)
        + -(-quantized // _GROUP) * 2 * itemsize
        + batch * recent * elements * itemsize
    )


@dataclass(frozen=True, slots=True)
class Activations:
    """The sizes that decide how much a forward holds beside weights and cache.

    Attributes:
        hidden: The hidden size.
        widest: The widest intermediate of one token in a layer: queries, keys and values together, or gate
            and up.
        vocabulary: The size of the logits.
        layers: The layers.
    """

    hidden: int
    widest: int
    vocabulary: int
    layers: int


def activation_nbytes(sizes: Activations, batch: int, context: int, dtype: str) -> int:
    """The most bytes that a prefill of `context` tokens holds beside weights and cache: an estimate.

    Counted are three copies of the hidden states (residual, normalized, output), twice the widest
    intermediate of a layer (before and after its nonlinearity), and, for the last token of each sequence,
    logits in the model's dtype and in float32. Kernels that materialize attention scores
    (`attn_implementation="eager"`) take batch × heads × context² more, which is not counted.
    """
    itemsize = _FLOAT_NBYTES.get(dtype, 4)
    tokens = batch * context
    return tokens * (3 * sizes.hidden + 2 * sizes.widest) * itemsize + batch * sizes.vocabulary * (
        itemsize + 4
    )


def _check(batch: int, context: int, kv_dtype: str) -> None:
    for name, value in (("--batch-size", batch), ("--max-model-len", context)):
        if not 1 <= value <= 1 << 40:
            raise PlacementError(
                f"{name} is out of range.", expected="1 or more", found=value, fix=f"pass {name} 1"
            )
    if kv_dtype not in KV_DTYPES:
        raise PlacementError(
            f"--kv-cache-dtype {kv_dtype} is not valid.{nearest(kv_dtype, KV_DTYPES)}",
            expected=", ".join(KV_DTYPES),
            found=kv_dtype,
            fix="Pass --kv-cache-dtype auto, or another of these.",
        )
