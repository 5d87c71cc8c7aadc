"""Integer codes with scales and zero points: GPTQ v1, v2, pack-quantized, and GGUF.

The safetensors formats store unsigned codes as one bit stream along the input, GPTQ by columns and
pack-quantized by rows. (pack-quantized calls the codes signed and adds 2**(bits - 1) before it packs them.)
So codes are transposed and never unpacked. Exceptions are gptqmodel's planar layout, pack-quantized of old
writers, in which no code straddles two words, and blocks of GGUF. Zero points are transposed, too; v1 stores
them minus one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hfq.checkpoint.gguf.block_types import block_type
from hfq.convert.gguf_blocks import block_codes, block_groups
from hfq.convert.layer_plan import LayerPlan, NewTensor, SourceLayer, exact_cast, refusal
from hfq.formats.codecs.bit_packing import pack_stream, unpack_planes, unpack_stream, unpack_words
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.codecs.ggml.signed_codes import SIGNED_TYPES, WRITTEN_TYPES, pack_blocks
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.configs.gptq_config import BITS
from hfq.formats.gguf.block_rows import Gguf
from hfq.formats.gptq import Gptq

__all__ = ["GptqOptions", "PackOptions", "plan_blocks", "plan_gptq", "plan_pack"]

_SLAB_COLUMNS = 1024


@dataclass(frozen=True)
class GptqOptions:
    """Options of a GPTQ config for one layer."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool


@dataclass(frozen=True)
class PackOptions:
    """Options of a config group of pack-quantized for one layer.

    A `group_size` of None means one scale for each row.
    """

    num_bits: int
    group_size: int | None
    symmetric: bool


@dataclass(frozen=True)
class _Groups:
    """The small tensors of a layer, independent of the format.

    Attributes:
        num_bits: The bits of a code.
        group_size: Channels of a group; -1 for all.
        is_symmetric: True if the source says so and every zero point is 2**(bits - 1).
        zeros: int32 [groups, out], the zero points of unsigned codes.
        scales: [groups, out] in their stored dtype.
        g_idx: int32 [in] if groups are scattered over the input; None otherwise.
    """

    num_bits: int
    group_size: int
    is_symmetric: bool
    zeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor | None


def plan_gptq(layer: SourceLayer, is_v1: bool) -> LayerPlan:
    """Plans a layer as GPTQ v1 or v2.

    Raises:
        FormatError: GPTQ, or this version of it, cannot hold the layer.
    """
    groups, (out_features, in_features) = _groups_of(layer), layer.size
    bits = groups.num_bits
    if bits not in BITS or in_features * bits % 32 or out_features * bits % 32:
        raise refusal(
            layer.module,
            "2, 3, 4 or 8 bits, whole 32-bit words along both sides",
            f"{bits} bits of [{out_features}, {in_features}]",
            "Keep the checkpoint unchanged.",
        )
    lowest, highest = int(groups.zeros.min()), int(groups.zeros.max())
    if is_v1 and lowest == 0:
        raise refusal(
            f"{layer.module}.qzeros",
            "zero points of 1 or more, because tools read a stored -1 in different ways",
            "a zero point of 0",
            "Convert to gptq_v2.",
        )
    _check_zeros(layer, highest, bits)
    words_in = in_features * bits // 32
    words_out = out_features * bits // 32
    count, zeros = groups.zeros.shape[0], _zeros(layer, groups)
    is_own = isinstance(layer.weight_format, Gptq)
    dtype = layer.infos["scales"].dtype if is_own else "F16"
    if not is_own:
        stored = "weight" if isinstance(layer.weight_format, Gguf) else "weight_scale"
        exact_cast(layer.module, stored, groups.scales, torch.float16)
    planar = is_own and layer.weight_format.is_planar  # type: ignore[attr-defined]
    codes = layer.infos["qweight"] if is_own and not planar else None
    tensors = {
        "qweight": NewTensor.copied(codes)
        if codes
        else NewTensor("I32", (words_in, out_features), lambda: _columns(layer)),
        "qzeros": NewTensor("I32", (count, words_out), lambda: _pack_zeros(zeros() - int(is_v1), bits)),
        "scales": NewTensor.copied(layer.infos["scales"])
        if is_own
        else NewTensor(
            dtype, (count, out_features), lambda: _groups_of(layer).scales.to(torch.float16).contiguous()
        ),
        "g_idx": NewTensor("I32", (in_features,), _g_idx(layer, groups)),
    }
    options = GptqOptions(bits, groups.group_size, groups.is_symmetric, groups.g_idx is not None)
    return LayerPlan(_with_bias(layer, tensors), options)


def plan_pack(layer: SourceLayer) -> LayerPlan:
    """Plans a layer as compressed-tensors' pack-quantized.

    Raises:
        FormatError: pack-quantized cannot hold the layer.
    """
    groups, (out_features, in_features) = _groups_of(layer), layer.size
    bits, count = groups.num_bits, groups.zeros.shape[0]
    if groups.g_idx is not None:
        raise refusal(
            f"{layer.module}.g_idx",
            "groups of neighboring channels, because compressed-tensors dropped actorder='group'",
            "channels in activation order",
            "Keep the checkpoint in GPTQ format, or quantize again with desc_act=False.",
        )
    size = None if count == 1 and groups.group_size != in_features else groups.group_size
    if size is not None and size * count != in_features:
        raise refusal(
            f"{layer.module}.scales",
            f"groups of {size} that divide {in_features} channels",
            f"{count} groups",
            "Keep the checkpoint in GPTQ format.",
        )
    _check_zeros(layer, int(groups.zeros.max()), bits)
    tensors = {
        "weight_packed": NewTensor(
            "I32", (out_features, -(-in_features * bits // 32)), lambda: _columns(layer).t().contiguous()
        ),
        "weight_scale": NewTensor(
            safetensors_dtype(groups.scales.dtype),
            (out_features, count),
            lambda: _groups_of(layer).scales.t().contiguous(),
        ),
        "weight_shape": NewTensor("I64", (2,), lambda: torch.tensor([out_features, in_features])),
    }
    if not groups.is_symmetric:
        shape = (-(-out_features * bits // 32), count)
        tensors["weight_zero_point"] = NewTensor(
            "I32", shape, lambda: pack_stream(_groups_of(layer).zeros.t(), bits)
        )
    return LayerPlan(_with_bias(layer, tensors), PackOptions(bits, size, groups.is_symmetric))


def plan_blocks(layer: SourceLayer) -> LayerPlan:
    """Plans a layer as blocks of GGUF, which repeat the scale of a larger group.

    Raises:
        FormatError: The blocks cannot hold the layer.
    """
    groups, (out_features, in_features) = _groups_of(layer), layer.size
    name, size = WRITTEN_TYPES.get(groups.num_bits), in_features // groups.zeros.shape[0]
    if name is None or size % 32 or size * groups.zeros.shape[0] != in_features:
        raise refusal(
            layer.module,
            "4, 5, or 8 bits, and groups of a multiple of 32 channels",
            f"{groups.num_bits} bits, groups of {size} of {in_features} channels",
            "Keep the checkpoint unchanged.",
        )
    if groups.g_idx is not None:
        raise refusal(
            f"{layer.module}.g_idx",
            "groups of neighboring channels",
            "channels in activation order",
            "Keep the checkpoint in GPTQ format, or quantize again with desc_act=False.",
        )
    half, is_gptq = 1 << (groups.num_bits - 1), isinstance(layer.weight_format, Gptq)
    if not bool((groups.zeros == half).all()):
        raise refusal(
            f"{layer.module}.{'qzeros' if is_gptq else 'weight_zero_point'}",
            f"zero points of {half}, because the blocks {name} have none",
            f"zero points of {int(groups.zeros.min())} to {int(groups.zeros.max())}",
            "Keep the checkpoint unchanged, or quantize again with sym=True.",
        )
    exact_cast(layer.module, "scales" if is_gptq else "weight_scale", groups.scales, torch.float16)
    shape = (out_features, in_features // 32 * block_type(name).nbytes)
    tensors = {"weight": NewTensor("U8", shape, lambda: _blocks_of(layer, name))}
    return LayerPlan(_with_bias(layer, tensors), name)


def _blocks_of(layer: SourceLayer, name: str) -> torch.Tensor:
    """Returns the blocks of a layer, uint8 [out, bytes of a row]."""
    groups, words, in_features = _groups_of(layer), _columns(layer), layer.size[1]
    scales = groups.scales.t().to(torch.float16)
    scales = scales.repeat_interleave(in_features // 32 // scales.shape[1], 1)
    slabs = []
    for start in range(0, layer.size[0], _SLAB_COLUMNS):
        part = slice(start, start + _SLAB_COLUMNS)
        codes = unpack_stream(words[:, part], groups.num_bits, in_features).t() - (1 << (groups.num_bits - 1))
        slabs.append(pack_blocks(codes.to(torch.int8), scales[part], name))
    return torch.cat(slabs)


def _groups_of(layer: SourceLayer) -> _Groups:
    found = layer.weight_format
    if isinstance(found, Gguf):
        return _of_blocks(layer, found)
    return _of_gptq(layer, found) if isinstance(found, Gptq) else _of_pack(layer, found)  # type: ignore[arg-type]


def _of_blocks(layer: SourceLayer, found: Gguf) -> _Groups:
    kind, scales = block_groups(layer, found)
    zeros = torch.full_like(scales, 1 << (kind.num_bits - 1), dtype=torch.int32)
    return _Groups(kind.num_bits, kind.group_size, True, zeros.t(), scales.t(), None)


def _of_gptq(layer: SourceLayer, found: Gptq) -> _Groups:
    zeros = found.zero_points(layer.read("qzeros"), 0, layer.size[0])
    g_idx = layer.read("g_idx").to(torch.int32) if found.act_order else None
    is_symmetric = found.symmetric and bool((zeros == 1 << (found.num_bits - 1)).all())
    return _Groups(found.num_bits, found.group_size, is_symmetric, zeros, layer.read("scales"), g_idx)


def _of_pack(layer: SourceLayer, found: PackQuantized) -> _Groups:
    if found.scheme is not None or found.others:
        raise refusal(
            layer.module,
            "quantization of weights only",
            "quantized activations",
            "Keep the checkpoint in compressed-tensors format.",
        )
    out_features, in_features = layer.size
    half = 1 << (found.num_bits - 1)
    scales = layer.read("weight_scale")
    scales = scales.reshape(1, 1).expand(out_features, 1) if scales.numel() == 1 else scales
    signed = found.zero_points(
        {} if found.is_symmetric else {"weight_zero_point": layer.read("weight_zero_point")}, 0, out_features
    )
    zeros = (
        torch.zeros(scales.shape, dtype=torch.int32)
        if signed is None
        else signed.to(torch.int32).expand(scales.shape)
    )
    count = scales.shape[1]
    told = found.group_size if found.group_size is not None and found.group_size > 0 else None
    size = told or in_features // count
    size = -1 if count == 1 and told != in_features else size
    g_idx = layer.read("weight_g_idx") if found.has_g_idx else None
    if g_idx is not None and torch.equal(g_idx, torch.arange(in_features, dtype=torch.int32) // max(size, 1)):
        g_idx = None
    g_idx = None if count == 1 else g_idx
    return _Groups(found.num_bits, size, found.is_symmetric, zeros.t() + half, scales.t(), g_idx)


def _columns(layer: SourceLayer) -> torch.Tensor:
    """Returns the codes in GPTQ's layout: int32 [ceil(in * bits / 32), out]."""
    found, (out_features, in_features) = layer.weight_format, layer.size
    if isinstance(found, Gguf):
        return _columns_of_blocks(layer, found)
    if isinstance(found, PackQuantized):
        words, bits = layer.read("weight_packed").t(), found.num_bits
        unpack, is_stream = unpack_words, found.is_straddling
    elif isinstance(found, Gptq):
        words = layer.read("qweight")
        bits = found.num_bits
        unpack = unpack_planes
        is_stream = not found.is_planar
    else:
        raise TypeError(type(found).__name__)
    if is_stream:
        return words.contiguous()
    result = torch.empty(-(-in_features * bits // 32), out_features, dtype=torch.int32)
    for start in range(0, out_features, _SLAB_COLUMNS):
        part = words[:, start : start + _SLAB_COLUMNS]
        result[:, start : start + _SLAB_COLUMNS] = pack_stream(unpack(part, bits, in_features), bits)
    return result


def _columns_of_blocks(layer: SourceLayer, found: Gguf) -> torch.Tensor:
    kind, rows = SIGNED_TYPES[found.type.name], layer.hold("weight")
    half = 1 << (kind.num_bits - 1)
    slabs = [
        pack_stream(
            block_codes(rows, found, start, start + _SLAB_COLUMNS).t().to(torch.int32) + half, kind.num_bits
        )
        for start in range(0, layer.size[0], _SLAB_COLUMNS)
    ]
    return torch.cat(slabs, 1)


def _pack_zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    return pack_stream(zeros.t(), bits).t().contiguous()


def _zeros(layer: SourceLayer, groups: _Groups) -> Callable[[], torch.Tensor]:
    """Returns a function that returns the zero points of a layer.

    It reads nothing if all of them are equal.
    """
    if not groups.is_symmetric:
        return lambda: _groups_of(layer).zeros
    shape, half = groups.zeros.shape, 1 << (groups.num_bits - 1)
    return lambda: torch.full(shape, half, dtype=torch.int32)


def _g_idx(layer: SourceLayer, groups: _Groups) -> Callable[[], torch.Tensor]:
    """Returns a function that returns the group of each channel.

    gptqmodel and transformers always require them.
    """
    if groups.g_idx is not None:
        local = "g_idx" if isinstance(layer.weight_format, Gptq) else "weight_g_idx"
        return lambda: layer.read(local).to(torch.int32)
    in_features = layer.size[1]
    size = groups.group_size if groups.group_size > 0 else in_features
    return lambda: torch.arange(in_features, dtype=torch.int32) // size


def _check_zeros(layer: SourceLayer, highest: int, bits: int) -> None:
    if highest >= 1 << bits:
        raise refusal(
            f"{layer.module}.qzeros",
            f"zero points of at most {(1 << bits) - 1}",
            str(highest),
            "Keep the checkpoint unchanged. Only AutoGPTQ's reading of v1 has this zero point.",
        )


def _with_bias(layer: SourceLayer, tensors: dict[str, NewTensor]) -> dict[str, NewTensor]:
    return tensors | ({"bias": layer.copied("bias")} if "bias" in layer.infos else {})
