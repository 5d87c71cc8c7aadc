"""Parser of the configs of GPTQ writers for one module.

The config is only a hint: the stored tensors decide, and every value is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from hfq.errors import FormatError
from hfq.formats.base import bounded_int
from hfq.formats.configs.safe_regex import matches
from hfq.tensor_spec import TensorInfo

__all__ = [
    "BITS",
    "PLANAR_BITS",
    "ZeroReading",
    "check_zero_points",
    "is_awq",
    "is_gguf",
    "is_planar",
    "module_options",
    "names_writer",
    "read_group_size",
    "read_zero_reading",
    "stored_bits",
]

BITS = (2, 3, 4, 8)
PLANAR_BITS = (2, 3, 4, 5, 6, 7, 8)
ZeroReading = Literal["stored", "field_plus_one", "masked_plus_one", "word_plus_one"]
"""Computation of a zero point from its stored value: unchanged, or plus one in three ways."""

_CHECKPOINT_FORMATS = ("gptq", "gptq_v2", "gptq_p")


def is_awq(tensors: Mapping[str, TensorInfo], config: Mapping) -> bool:
    """Returns True if a `qweight` is in AWQ format.

    The shapes of the other tensors decide. The config decides if the shapes fit both formats.
    """
    qweight = tensors["qweight"]
    qzeros = tensors.get("qzeros")
    scales = tensors.get("scales")
    names_awq = "awq" in str(config.get("quant_method", "")) or "awq" in str(config.get("packing_format", ""))
    if qweight.dtype == "I16" or "scaled_zeros" in tensors:
        return config.get("quant_method") != "gptq"
    if scales is None or len(qweight.shape) != 2 or len(scales.shape) != 2:
        return names_awq
    if "g_idx" in tensors:
        return False
    if qweight.shape[1] != scales.shape[1]:
        return True
    rows = qweight.shape[0]
    if (
        qzeros is None
        or len(qzeros.shape) != 2
        or qzeros.shape[0] != rows
        or scales.shape != (rows, 8 * qzeros.shape[1])
    ):
        return False
    if not (names_awq or config.get("quant_method")):
        raise FormatError(
            "The format of a layer is ambiguous: it can be GPTQ or AWQ gemv. Nothing was loaded.",
            file=qweight.range.file,
            tensor=qweight.name,
            expected="quant_method in quantization_config",
            found=f"qweight {qweight} and scales {scales}",
            fix="Restore the original quantization_config in config.json.",
        )
    return names_awq


def is_gguf(config: Mapping) -> bool:
    """Returns True if the config says that a `qweight` holds blocks of ggml."""
    return config.get("quant_method") == "gguf"


def is_planar(config: Mapping) -> bool:
    """Returns True if the config names gptqmodel's planar layout."""
    return (config.get("checkpoint_format") or config.get("format")) == "gptq_p"


def names_writer(config: Mapping) -> bool:
    """Returns True if the config tells which tool stored the zero points.

    It names the tool, or a layout other than v1. Tools read v1 in different ways.
    """
    meta = config.get("meta")
    named = (meta.get("quantizer") if isinstance(meta, Mapping) else None) or config.get("quantizer")
    label = config.get("checkpoint_format") or config.get("format")
    return bool(named) or label in ("gptq_v2", "gptq_p")


def check_zero_points(module: str, stored: torch.Tensor, weight_format: Any) -> None:
    """Raises an error if the zero points contradict the config or their encoding is unknown.

    Args:
        module: The module's name, for messages.
        stored: The zero points as stored, int32 [out, groups].
        weight_format: The `Gptq` that reads them.

    Raises:
        FormatError: The zero points contradict the config, or nothing tells how they are encoded.
    """
    is_constant = not stored.numel() or bool((stored == stored[0, 0]).all())
    if weight_format.says_symmetric and not is_constant:
        raise FormatError(
            "The config says sym=true, but the zero points differ. Nothing was loaded.",
            tensor=f"{module}.qzeros",
            expected="one zero point",
            found=f"{stored.unique().numel()} different ones",
            fix="Restore the original `sym` and `checkpoint_format` in config.json.",
        )
    top = (1 << weight_format.num_bits) - 1
    is_wrapped = weight_format.zero_reading == "field_plus_one" and bool((stored == top).any())
    if not weight_format.names_writer and not is_constant and (is_wrapped or weight_format.is_nameless):
        raise FormatError(
            "The encoding of the zero points is unknown. Nothing was loaded.",
            tensor=f"{module}.qzeros",
            expected="checkpoint_format or meta.quantizer in quantization_config, for asymmetric zero points",
            found="neither",
            fix="Restore the original config.json or quantize_config.json of the checkpoint.",
        )


def stored_bits(tensors: Mapping[str, TensorInfo], allowed: tuple[int, ...] = BITS) -> int | None:
    """Returns the bits that the shapes of `qzeros` and `scales` imply.

    Returns None if either is absent or has an invalid shape.
    """
    qzeros, scales = tensors.get("qzeros"), tensors.get("scales")
    if (
        qzeros is None
        or scales is None
        or len(qzeros.shape) != 2
        or len(scales.shape) != 2
        or not scales.shape[1]
    ):
        return None
    candidates = [bits for bits in allowed if -(-scales.shape[1] * bits // 32) == qzeros.shape[1]]
    return candidates[0] if len(candidates) == 1 else None


def module_options(module: str, config: Mapping) -> dict:
    """Returns the config's options for one module.

    The first matching rule of `dynamic` overrides the other options.
    """
    options = dict(config) | _extra_options(module, config)
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise _bad_config("dynamic", rules, "{pattern: {option: value}}")
    for rule, overrides in rules.items():
        negative = rule.startswith("-:")
        if matches(rule.removeprefix("-:").removeprefix("+:"), module, "dynamic"):
            if not negative and not isinstance(overrides, Mapping):
                raise _bad_config("dynamic", overrides, "{option: value}")
            return options if negative else options | dict(overrides)
    return options


def _extra_options(module: str, config: Mapping) -> dict:
    """Returns auto-round's overrides for one module: by its name, else by a pattern."""
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(options, Mapping) for options in extra.values()):
        raise _bad_config("extra_config", extra, "{module: {option: value}}")
    if module in extra:
        return dict(extra[module])
    special = {name: options for name, options in extra.items() if set(name) & set("*+?[(^$|\\")}
    return next(
        (dict(options) for name, options in special.items() if matches(name, module, "extra_config")), {}
    )


def read_group_size(module: str, tensors: Mapping[str, TensorInfo], options: Mapping, num_bits: int) -> int:
    allowed = "-1 or a positive number of channels"
    hinted = bounded_int(
        options, "group_size", lambda size: size == -1 or 0 < size < 1 << 24, allowed, module
    )
    if hinted is not None:
        return hinted
    groups = tensors["scales"].shape[0] if "scales" in tensors and tensors["scales"].shape else 1
    in_features = tensors["qweight"].shape[0] * 32 // num_bits if tensors["qweight"].shape else 0
    return -1 if groups <= 1 else max(-(-in_features // groups), 1)


def read_zero_reading(module: str, config: Mapping, num_bits: int) -> ZeroReading:
    labels = [config[key] for key in ("checkpoint_format", "format") if config.get(key)]
    label = labels[0] if labels else "gptq"
    if any(other != label for other in labels):
        raise _bad_config("checkpoint_format", labels, "the same as `format`")
    if not isinstance(label, str) or label not in _CHECKPOINT_FORMATS:
        raise FormatError(
            f"checkpoint_format={label!r} is a GPTQ layout that hfq does not support. Nothing was loaded.",
            tensor=module,
            file="config.json",
            expected=" or ".join(_CHECKPOINT_FORMATS),
            found=repr(label),
            fix="Export the checkpoint again with checkpoint_format='gptq'.",
        )
    if label in ("gptq_v2", "gptq_p"):
        return "stored"
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if "gptqmodel" not in f"{quantizer} {config.get('quantizer')}".lower():
        return "field_plus_one"
    return "word_plus_one" if num_bits != 3 else "masked_plus_one"


def _bad_config(key: str, found: object, expected: str) -> FormatError:
    return FormatError(
        f"{key} in quantization_config is not valid. Nothing was loaded.",
        file="config.json",
        expected=expected,
        found=repr(found)[:80],
        fix=f"Restore the original {key} in config.json.",
    )
