"""HQQ's file format (`AutoHQQHFModel.save_to_safetensors`), with 1, 2, 3, 4, or 8 bits.

Its checkpoints have no quantization_config.

    W_q         U8 (I32 for 3 bits)  the matrix M below, packed along its rows; with view_as_float, its bytes
                                     are stored as floats
    scale, zero [rows, 1] for axis 1, [1, columns] for axis 0
    shape I64 [2], and scalars and strings as tensors: nbits, group_size, axis, packing, …

M is the flattened weight as [out * in / g, g] (axis 1) or [g, out * in / g] (axis 0). Packing splits M into
slabs of rows, with the first slab in the highest bits. For 3 bits, an int32 holds ten codes, and rows are
padded.

    W.flat = ((M - zero) * scale).flat

Format: hqq's `Quantizer` and `BitPack`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, Format, FormatVariant
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.codecs.value_checks import check_finite, with_common
from hfq.formats.layouts.scaled import Others, other_tensors
from hfq.tensor_spec import DTYPE_BITS, TensorInfo, TensorSpec

__all__ = ["Hqq"]

_SLABS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
_PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
_STORED_BITS = {8: (8, 7, 6, 5), 4: (4,), 3: (3,), 2: (2,), 1: (1,)}
"""Actual bits by stored bits; hqq stores 5 to 7 bits as bytes."""
_META: dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]] = {
    "nbits": (("I32", "I64"), ()),
    "group_size": (("I32", "I64"), ()),
    "axis": (("I32", "I64"), ()),
    "shape": (("I64", "I32"), (2,)),
    "packing": (("U8",), None),
    "compute_dtype": (("U8",), None),
    "unpack_view_dtype": (("U8",), None),
    **dict.fromkeys(
        (
            "channel_wise",
            "encoded_state_dict",
            "offload_meta",
            "optimize",
            "quant_scale",
            "quant_zero",
            "round_zero",
            "stores_quant_config",
            "view_as_float",
        ),
        (("U8", "BOOL", "I32"), ()),
    ),
}
"""Tensors of metadata that hqq stores: the dtypes, and the shape; texts have any length."""


@dataclass(frozen=True)
class Hqq(Format):
    """HQQ with the parameters of one module; see the module docstring.

    Attributes:
        num_bits: 1, 2, 3, 4 or 8.
        axis: 1 if a row of M is a group, 0 if a column is a group.
        group_size: Weights of a group.
        groups: The number of groups of the scales, if a row of M is a group.
        meta: The scalars and strings of metadata, as stored: (name, dtype, shape).
        packed_shape: The shape of `W_q`.
        codes_dtype: The stored dtype of `W_q`.
        size: (out, in) of the layer.
    """

    name = "hqq"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "HQQ (8, 4, 3, 2, 1 bits)",
            "hqq",
            "W_q, scale, zero, shape, nbits, …",
            (
                "hqq-4bit",
                "hqq-8bit",
                "hqq-3bit",
                "hqq-2bit",
                "hqq-1bit",
                "hqq-4bit-axis0",
                "hqq-4bit-as-float",
            ),
            ("hqq-4bit-g64", "hqq-3bit-g64", "hqq-2bit-g64-axis0"),
        ),
    )
    num_bits: int = 4
    axis: int = 1
    group_size: int = 64
    groups: int = 0
    meta: Others = ()
    packed_shape: tuple[int, ...] = ()
    codes_dtype: str = "U8"
    size: tuple[int, int] = (0, 0)

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Hqq | None:
        packed, scale = tensors.get("W_q"), tensors.get("scale")
        if packed is None or len(packed.shape) != 2:
            return None
        axis = (
            0 if scale is not None and len(scale.shape) == 2 and scale.shape[0] == 1 != scale.shape[1] else 1
        )
        nested = [
            name for name in tensors if name.startswith(("zero.", "scale.")) or name in ("zero_scale", "meta")
        ]
        if nested or packed.dtype not in ("U8", "I32", *FLOATS):
            raise FormatError(
                "The HQQ options of a layer are not supported. Nothing was loaded.",
                file=packed.range.file,
                tensor=packed.name,
                expected="codes in U8, I32, or floats, with unquantized scales",
                found=", ".join(nested) or str(packed),
                fix="Quantize the model again with hqq 0.2.8 or later, quant_zero=False, and "
                "quant_scale=False.",
            )
        meta = other_tensors(tensors, tuple(_META))
        if "nbits" not in tensors:
            meta = (("nbits", "I32", ()), *meta)  # hqq always writes nbits, so its absence must be an error
        groups = scale.shape[0] if scale is not None and axis == 1 and scale.shape else 0
        fitting = [
            bits for bits, slabs in _SLABS.items() if groups and packed.shape[0] == -(-groups // slabs)
        ]
        likely = next(
            (bits for bits in fitting if packed.dtype in FLOATS or (bits == 3) == (packed.dtype == "I32")), 0
        )
        return cls(
            num_bits=likely,
            axis=axis,
            groups=groups,
            meta=meta,
            packed_shape=packed.shape,
            codes_dtype=packed.dtype,
        )

    def sized(self, in_features: int, out_features: int) -> Hqq:
        """Returns this format with the bits and group size that the shape of the codes implies.

        `resolve` compares the stored scalars with them.
        """
        numel, (rows, width) = in_features * out_features, self.packed_shape
        for bits, slabs in _SLABS.items():
            columns = width * DTYPE_BITS[self.codes_dtype] // (32 if bits == 3 else 8)
            is_plain = self.codes_dtype == ("I32" if bits == 3 else "U8")
            if not (is_plain or self.codes_dtype in FLOATS) or not rows or not columns:
                continue
            real = numel // columns
            if numel % columns == 0 and rows == -(-real // slabs) and self.groups in (0, real):
                group_size = columns if self.axis == 1 else real
                return dataclasses.replace(
                    self, num_bits=bits, group_size=group_size, size=(out_features, in_features)
                )
        raise FormatError(
            "The quantized codes of a layer do not fit its size.",
            expected=f"{numel} codes of 1, 2, 3, 4 or 8 bits",
            found=f"W_q {self.codes_dtype} {list(self.packed_shape)}",
            fix="Restore the original config.json of the checkpoint.",
        )

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        groups = in_features * out_features // self.group_size
        rows, columns = (groups, self.group_size) if self.axis == 1 else (self.group_size, groups)
        scale = (groups, 1) if self.axis == 1 else (1, groups)
        width = columns * (32 if self.num_bits == 3 else 8) // DTYPE_BITS[self.codes_dtype]
        return (
            TensorSpec("W_q", (self.codes_dtype,), (-(-rows // _SLABS[self.num_bits]), width), "codes"),
            TensorSpec("scale", FLOATS, scale, "scale"),
            TensorSpec("zero", FLOATS, scale, "zero_point"),
            *(_meta_spec(name, shape) for name, _, shape in self.meta),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "W_q"

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        return self.size

    def describe(self) -> str:
        return f"hqq int{self.num_bits or '?'} g{self.group_size}{' axis 0' if self.axis == 0 else ''}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Hqq:
        check_finite(module, "scale", tensors["scale"])
        check_finite(module, "zero", tensors["zero"])
        expected = {
            "axis": [self.axis],
            "group_size": [self.group_size],
            "shape": list(self.size),
            "packing": list(_PACKINGS[self.num_bits].encode()),
            "quant_zero": [0],
            "quant_scale": [0],
            "view_as_float": [int(self.codes_dtype in FLOATS)],
        }
        stored = {
            name: tensors[name].to(torch.int64).flatten().tolist() for name in expected if name in tensors
        }
        wrong = [
            f"{name}: expected {expected[name]}, found {found}"
            for name, found in stored.items()
            if found != expected[name]
        ]
        if self.codes_dtype in FLOATS and "view_as_float" not in stored:
            wrong.append(f"W_q: expected U8 or I32, found {self.codes_dtype} without view_as_float")
        nbits = float(tensors["nbits"]) if "nbits" in tensors else self.num_bits
        if nbits not in _STORED_BITS[self.num_bits]:
            wrong.append(f"nbits: expected {self.num_bits}, found {nbits:g}")
        if wrong:
            raise FormatError(
                "The metadata of an HQQ layer contradicts its tensors. Nothing was loaded.",
                tensor=f"{module}.W_q",
                problems=wrong,
                fix="Quantize the model again with quant_zero=False and quant_scale=False.",
            )
        return self

    def resolve_stack(self, tensors: Mapping[str, torch.Tensor]) -> Format | None:
        common = with_common(tensors, *(name for name in tensors if name not in ("scale", "zero")))
        return None if common is None else super().resolve_stack(common)

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        first, count = start * panel.shape[1], panel.numel()
        packed = tensors["W_q"].view(torch.int32 if self.num_bits == 3 else torch.uint8)
        columns = packed.shape[1]
        top, bottom = first // columns, -(-(first + count) // columns)
        codes = torch.empty(bottom - top, columns, dtype=torch.float32, device=panel.device)
        slabs, mask = _SLABS[self.num_bits], (1 << self.num_bits) - 1
        for slab in range(slabs):
            low, high = max(top, slab * packed.shape[0]), min(bottom, (slab + 1) * packed.shape[0])
            if low < high:
                part = packed[low - slab * packed.shape[0] : high - slab * packed.shape[0]]
                codes[low - top : high - top] = (part >> ((slabs - 1 - slab) * self.num_bits)) & mask
        rows = slice(top, bottom) if self.axis == 1 else slice(None)
        codes.sub_(tensors["zero"][rows].to(torch.float32)).mul_(tensors["scale"][rows].to(torch.float32))
        panel.view(-1).copy_(codes.view(-1)[first - top * columns :][:count])

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        if weight.numel() % self.group_size:
            raise FormatError(
                "The group size does not divide the weight.",
                expected=f"a multiple of {self.group_size}",
                found=f"{weight.numel()} weights",
                fix="Choose a group_size that divides the number of weights.",
            )
        shape = (-1, self.group_size) if self.axis == 1 else (self.group_size, -1)
        matrix = weight.detach().to(torch.float32).reshape(shape)
        top, slabs = (1 << self.num_bits) - 1, _SLABS[self.num_bits]
        low, high = matrix.amin(self.axis, keepdim=True), matrix.amax(self.axis, keepdim=True)
        scale = torch.where(high == low, 1, (high - low) / top).to(torch.bfloat16)
        zero = (-low / scale.float()).to(torch.bfloat16)
        codes = (matrix / scale.float() + zero.float()).round().clamp(0, top).to(torch.int32)
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[0] % slabs)).unflatten(0, (slabs, -1))
        packed = torch.zeros_like(codes[0])
        for slab in range(slabs):
            packed |= codes[slab] << ((slabs - 1 - slab) * self.num_bits)
        scalars = {"nbits": self.num_bits, "group_size": self.group_size, "axis": self.axis}
        stored = {name: torch.tensor(value, dtype=torch.int32) for name, value in scalars.items()}
        stored["view_as_float"] = torch.tensor(int(self.codes_dtype in FLOATS), dtype=torch.uint8)
        stored["shape"] = torch.tensor([out_features, in_features])
        stored["packing"] = torch.tensor(list(_PACKINGS[self.num_bits].encode()), dtype=torch.uint8)
        packed = packed if self.num_bits == 3 else packed.to(torch.uint8)
        packed = packed.view(torch_dtype(self.codes_dtype)) if self.codes_dtype in FLOATS else packed
        return {"W_q": packed, "scale": scale, "zero": zero, **stored}


def _meta_spec(name: str, found: tuple[int, ...]) -> TensorSpec:
    dtypes, shape = _META[name]
    return TensorSpec(name, dtypes, found[:1] if shape is None else shape, "meta", optional=name != "nbits")
