"""Bytes of the KV cache and of activations, by layer, batch size, and context length.

Pure data. A cached token takes two tensors in each layer: keys [batch, heads, tokens, k] and values [batch,
heads, tokens, v]. Layers with grouped queries have fewer KV heads than query heads. With multi-head latent
attention (DeepSeek-V2, 2024, section 2.1), one head of latents replaces all. A layer with a sliding window of
w keeps the last w - 1 tokens, since the current token is the last one in the window (transformers,
cache_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfq.errors import PlacementError, nearest

__all__ = [
    "KV_DTYPES",
    "OFFLOADED_KV_DTYPES",
    "Activations",
    "KvLayer",
    "activation_nbytes",
    "kv_nbytes",
    "offloaded_kv_nbytes",
]

KV_DTYPES = ("auto", "fp8", "int4", "int2")
"""`auto` is the model's dtype; `fp8`, `int4`, and `int2` are transformers' quantized caches."""

OFFLOADED_KV_DTYPES = ("auto", "fp8", "int8")
"""Dtypes of `hfq.OffloadedCache`, whose `fp8` and `int8` have one scale per head and token."""

_RECORD_ALIGNMENT = 8
_LAYERS_HELD = 2
_FLOAT_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GROUP = 64
_RESIDUAL = 128
_FP8_SCALE = 4


@dataclass(frozen=True, slots=True)
class KvLayer:
    """KV cache of one layer.

    Attributes:
        keys: Elements of a token's keys over all heads; 0 if the layer caches none.
        values: Elements of a token's values over all heads.
        window: Sliding window in tokens; None if every token is kept.
        extra: Further elements per token, such as the keys of an indexer.
        heads: Number of KV heads.
    """

    keys: int
    values: int
    window: int | None = None
    extra: int = 0
    heads: int = 1

    def tokens(self, context: int) -> int:
        """Returns the number of tokens of a context that the layer keeps."""
        return context if self.window is None else min(context, max(self.window - 1, 0))


def kv_nbytes(layers: Sequence[KvLayer], batch: int, context: int, dtype: str, kv_dtype: str = "auto") -> int:
    """Returns the bytes of a whole KV cache after `context` tokens.

    Args:
        layers: KV cache of each layer.
        batch: Number of sequences.
        context: Tokens per sequence.
        dtype: Dtype that the model computes in.
        kv_dtype: One of `KV_DTYPES`. The result is exact for `fp8` and an upper bound for `int4` and `int2`.
            Those store codes, a scale and a shift per 64 elements, and up to 127 tokens that are not
            quantized yet.

    Raises:
        PlacementError: A size is out of range, a dtype unknown, or the cache cannot be quantized.
    """
    _check(batch, context, kv_dtype, KV_DTYPES)
    return sum(_layer_nbytes(layer, batch, layer.tokens(context), dtype, kv_dtype) for layer in layers)


def offloaded_kv_nbytes(
    layers: Sequence[KvLayer], batch: int, context: int, dtype: str, kv_dtype: str = "auto"
) -> tuple[int, int]:
    """Returns the bytes that an offloaded KV cache stores, and those on the execution device.

    The device holds the layers with a sliding window or an indexer, and two of the others.

    Args:
        layers: KV cache of each layer.
        batch: Number of sequences.
        context: Tokens per sequence.
        dtype: Dtype that the model computes in.
        kv_dtype: One of `OFFLOADED_KV_DTYPES`.

    Raises:
        PlacementError: A size is out of range, or the dtype is unknown.
    """
    _check(batch, context, kv_dtype, OFFLOADED_KV_DTYPES)
    itemsize = _FLOAT_NBYTES.get(dtype, 4)
    stored, whole, kept = 0, [0], 0
    for layer in layers:
        nbytes = _layer_nbytes(layer, batch, layer.tokens(context), dtype, "auto")
        if layer.window is not None or layer.extra:
            kept += nbytes
            continue
        elements = layer.keys + layer.values
        record = elements * itemsize if kv_dtype == "auto" else elements + 2 * layer.heads * _FP8_SCALE
        stored += batch * context * -(-record // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT
        whole.append(nbytes)
    return stored, kept + sum(sorted(whole)[-_LAYERS_HELD:])


def _layer_nbytes(layer: KvLayer, batch: int, tokens: int, dtype: str, kv_dtype: str) -> int:
    itemsize = _FLOAT_NBYTES.get(dtype, 4)
    kept = batch * tokens * (layer.keys + layer.values + layer.extra)
    if kv_dtype == "auto":
        return kept * itemsize
    if layer.window is not None or layer.extra:
        raise PlacementError(
            "transformers' quantized KV cache supports only layers of full attention.",
            found=f"--kv-cache-dtype {kv_dtype}",
            expected="no sliding windows and no indexers",
            fix="Pass --kv-cache-dtype auto.",
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
    """Sizes that decide the memory of a forward pass in addition to weights and KV cache.

    Attributes:
        hidden: Hidden size.
        widest: Widest intermediate of one token in a layer: queries, keys, and values together, or gate and
            up.
        vocabulary: Size of the logits.
        layers: Number of layers.
    """

    hidden: int
    widest: int
    vocabulary: int
    layers: int


def activation_nbytes(sizes: Activations, batch: int, context: int, dtype: str) -> int:
    """Returns an estimate of the bytes that a prefill of `context` tokens holds at most.

    Weights and KV cache are not included. The estimate counts three copies of the hidden states (residual,
    normalized, output), and twice the widest intermediate of a layer (before and after its nonlinearity). For
    the last token of each sequence, it counts logits in the model's dtype and in float32. Kernels that
    materialize attention scores (`attn_implementation="eager"`) take batch × heads × context² more, which is
    not counted.
    """
    itemsize = _FLOAT_NBYTES.get(dtype, 4)
    tokens = batch * context
    return tokens * (3 * sizes.hidden + 2 * sizes.widest) * itemsize + batch * sizes.vocabulary * (
        itemsize + 4
    )


def _check(batch: int, context: int, kv_dtype: str, kv_dtypes: Sequence[str]) -> None:
    for name, value in (("--batch-size", batch), ("--max-model-len", context)):
        if not 1 <= value <= 1 << 40:
            raise PlacementError(
                f"{name} {value} is out of range.",
                expected="1 or more",
                found=value,
                fix=f"Pass {name} 1 or more.",
            )
    if kv_dtype in kv_dtypes:
        return
    if kv_dtype in (*KV_DTYPES, *OFFLOADED_KV_DTYPES):
        is_offloaded = kv_dtypes is OFFLOADED_KV_DTYPES
        preposition = "with" if is_offloaded else "without"
        change = "Leave out --kv-cache-device" if is_offloaded else "Add --kv-cache-device disk or cpu"
        raise PlacementError(
            f"--kv-cache-dtype {kv_dtype} is not valid {preposition} --kv-cache-device.",
            expected=", ".join(kv_dtypes),
            found=kv_dtype,
            fix=f"{change}, or pass --kv-cache-dtype auto.",
        )
    raise PlacementError(
        f"--kv-cache-dtype {kv_dtype} is not valid.{nearest(kv_dtype, kv_dtypes)}",
        expected=", ".join(kv_dtypes),
        found=kv_dtype,
        fix="Pass --kv-cache-dtype auto, or another of these.",
    )
