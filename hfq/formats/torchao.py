"""torchao as transformers saves it to safetensors, with tensor schemas in `__metadata__`.

    <m>._weight_qdata       F8_E4M3, F8_E5M2 or I8 [out, in]    also for 1 to 7 bits: one byte per code
    <m>._weight_scale       [out, 1], [1, 1], [] or [out, groups]
    <m>._weight_zero_point  I8, of the scale's shape
    metadata "<m>.weight"   JSON {"_type": "Float8Tensor" | "Int8Tensor" | "IntxUnpackedToInt8Tensor",
                                  "_data": {…}, "_tensor_data_names": [...]}

    W[n, k] = (qdata[n, k] - zero_point[n, g]) * scale[n, g]

A file without its metadata does not describe its contents, and hfq raises an error.

Format: torchao's `prototype/safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from hfq.errors import FormatError
from hfq.formats.base import ActivationScheme, FormatVariant
from hfq.formats.layouts.scaled import ScaledCodes, other_tensors
from hfq.tensor_spec import TensorInfo

__all__ = ["Torchao"]

_PREFIX = "_weight_"
_TYPES = {
    "Float8Tensor": ("F8_E4M3", "F8_E5M2"),
    "Int8Tensor": ("I8",),
    "IntxUnpackedToInt8Tensor": ("I8",),
}
_PARTS = ("qdata", "scale", "zero_point", "act_quant_scale", "act_quant_zero_point")


@dataclass(frozen=True)
class Torchao(ScaledCodes):
    """torchao with the parameters of one module; see the module docstring."""

    name = "torchao"
    codes = "_weight_qdata"
    scale = "_weight_scale"
    zero = "_weight_zero_point"
    variants = (
        FormatVariant(
            "torchao float8 (e4m3, e5m2)",
            "torchao, transformers",
            "_weight_qdata F8, _weight_scale, metadata",
            ("torchao-float8",),
            ("torchao-float8wo-e4m3-row",),
        ),
        FormatVariant(
            "torchao int8, intx",
            "torchao, transformers",
            "_weight_qdata I8, _weight_scale, _weight_zero_point, metadata",
            ("torchao-int8", "torchao-intx-asym"),
            ("torchao-int8wo", "torchao-intx3-g32-asym"),
        ),
    )
    scheme: ActivationScheme | None = None

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Torchao | None:
        stored = [name for name in tensors if name.startswith(_PREFIX)]
        if not stored:
            return None
        file = tensors[stored[0]].range.file
        schema = _read_schema(module, config, file)
        kind = str(schema.get("_type"))
        codes, scale, zero = (tensors.get(_PREFIX + part) for part in _PARTS[:3])
        if kind not in _TYPES or (codes is not None and codes.dtype not in _TYPES[kind]):
            raise FormatError(
                "A tensor of torchao has an unsupported type. Nothing was loaded.",
                file=file,
                tensor=codes.name if codes is not None else module,
                expected=" or ".join(_TYPES),
                found=f"{kind}: {codes}",
                fix="Load it with torchao, or quantize the model again with a weight-only float8, int8, or "
                "intx config.",
            )
        data = schema.get("_data")
        names = schema.get("_tensor_data_names")
        block = data.get("block_size") if isinstance(data, Mapping) else None
        if codes is not None and scale is not None and not _fits(block, codes.shape, scale.shape):
            raise FormatError(
                f"The metadata of {module}.weight contradicts its tensors. Nothing was loaded.",
                file=file,
                tensor=scale.name,
                expected=f"scales of blocks {block}",
                found=str(scale),
                fix="Download the original file.",
            )
        is_dynamic = isinstance(data, Mapping) and (
            data.get("act_quant_kwargs") or data.get("activation_quantization")
        )
        return cls(
            codes_dtype=codes.dtype if codes is not None else _TYPES[kind][0],
            scale_shape=scale.shape if scale is not None and len(scale.shape) <= 2 else (1, 1),
            zero_dtype="I8"
            if zero is not None or (isinstance(names, list) and "zero_point" in names)
            else None,
            others=other_tensors(tensors, tuple(_PREFIX + part for part in _PARTS[3:])),
            scheme=ActivationScheme("token", dtype=f"torchao {kind}") if is_dynamic else None,
        )


def _fits(block: object, codes: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Returns True if scales of this shape fit the block size of the metadata.

    Blocks must be whole rows or groups of a row. The metadata may omit the block size.
    """
    if len(codes) != 2 or len(scale) > 2:
        return True  # not a linear layer: the check of the shapes raises an error
    rows, groups = (*scale, 1, 1)[:2] if len(scale) != 0 else (1, 1)
    found = [codes[0] // max(rows, 1), codes[1] // max(groups, 1)]
    return block is None or (isinstance(block, list) and block == found)


def _read_schema(module: str, config: Mapping, file: str) -> Mapping:
    """Returns the entry of the file's metadata for a module's weight."""
    stored = (config.get("__metadata__") or {}).get(f"{module}.weight")
    try:
        schema = json.loads(stored) if isinstance(stored, str) else None
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, Mapping):
        raise FormatError(
            "The metadata of a torchao file is missing. Nothing was loaded.",
            file=file,
            tensor=f"{module}.weight",
            expected=f'an entry "{module}.weight" in __metadata__',
            found=repr(stored)[:80] if stored else "none",
            fix="Download the original file. A tool may have dropped the __metadata__ of this copy.",
        )
    return schema
