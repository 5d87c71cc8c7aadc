"""MXFP4 as rows of nibbles with exponents, and as blocks of GGUF.

In both, 32 channels share an exponent. compressed-tensors packs neighboring channels into a byte, and a block
of GGUF packs channels j and j + 16. ggml has no negative zero, and no NaN: an exponent of 255 is a number.
"""

from __future__ import annotations

import torch

from hfq.convert.gguf_blocks import check_plain
from hfq.convert.layer_plan import LayerPlan, NewTensor, SourceLayer, refusal
from hfq.formats.gguf.block_rows import Gguf, positions
from hfq.formats.mxfp4 import Mxfp4

__all__ = ["plan_mxfp4", "plan_mxfp4_blocks"]

_BLOCK_NBYTES = 17
_NEGATIVE_ZERO = 8
_NAN = 255


def plan_mxfp4(layer: SourceLayer) -> LayerPlan:
    """Plans blocks of a GGUF file as compressed-tensors' mxfp4-pack-quantized.

    Raises:
        FormatError: The blocks have another type, or an exponent that means NaN elsewhere.
    """
    found, (out_features, in_features) = layer.weight_format, layer.size
    if not isinstance(found, Gguf):
        raise TypeError(type(found).__name__)
    if found.type.name != "MXFP4" or found.blocks.columns is not None:
        raise refusal(
            f"{layer.module}.weight",
            "blocks of MXFP4, in the order of the model's columns",
            found.type.name if found.blocks.columns is None else "permuted columns",
            "Keep the GGUF file. pack-quantized holds Q4_0, Q5_0, Q8_0, Q3_K, and Q6_K.",
        )
    check_plain(layer, found)
    if bool((_blocks(layer, found)[:, :, 0] == _NAN).any()):
        raise refusal(
            f"{layer.module}.weight", "exponents of at most 254", "255, which is NaN", "Keep the GGUF file."
        )
    groups = in_features // 32
    tensors = {
        "weight_packed": NewTensor("U8", (out_features, in_features // 2), lambda: _packed(layer, found)),
        "weight_scale": NewTensor("U8", (out_features, groups), lambda: _blocks(layer, found)[:, :, 0]),
    }
    if "bias" in layer.infos:
        tensors["bias"] = layer.copied("bias")
    return LayerPlan(tensors, None)


def plan_mxfp4_blocks(layer: SourceLayer) -> LayerPlan:
    """Plans a layer in MXFP4 as blocks of GGUF. Negative zeros become zeros.

    Raises:
        FormatError: The codes are integers, or activations are quantized.
    """
    found, (out_features, in_features) = layer.weight_format, layer.size
    if not isinstance(found, Mxfp4):
        raise TypeError(type(found).__name__)
    if found.is_integer or found.scheme is not None or found.others:
        raise refusal(
            layer.module,
            "MXFP4, and quantization of weights only",
            found.describe() if found.is_integer else "quantized activations",
            "Keep the checkpoint unchanged.",
        )
    shape = (out_features, in_features // 32 * _BLOCK_NBYTES)
    tensors = {"weight": NewTensor("U8", shape, lambda: _made_blocks(layer, found))}
    if "bias" in layer.infos:
        tensors["bias"] = layer.copied("bias")
    return LayerPlan(tensors, "MXFP4")


def _blocks(layer: SourceLayer, found: Gguf) -> torch.Tensor:
    """Returns the blocks in the order of the model's rows, uint8 [out, blocks, 17]."""
    weight, rows = layer.hold("weight"), found.blocks.rows
    if rows is not None:
        weight = weight.index_select(0, positions(rows, weight.device))
    return weight.unflatten(1, (-1, _BLOCK_NBYTES))


def _packed(layer: SourceLayer, found: Gguf) -> torch.Tensor:
    halves = _blocks(layer, found)[:, :, 1:]
    codes = torch.cat([halves & 15, halves >> 4], 2)
    codes.masked_fill_(codes == _NEGATIVE_ZERO, 0)
    return (codes[:, :, ::2] | codes[:, :, 1::2] << 4).flatten(1)


def _made_blocks(layer: SourceLayer, found: Mxfp4) -> torch.Tensor:
    pairs = layer.read(found.codes_name).unflatten(1, (-1, 16))
    codes = torch.stack([pairs & 15, pairs >> 4], 3).flatten(2)
    exponents = layer.read(found.scale_name).view(torch.uint8)
    return torch.cat([exponents[:, :, None], codes[:, :, :16] | codes[:, :, 16:] << 4], 2).flatten(1)
