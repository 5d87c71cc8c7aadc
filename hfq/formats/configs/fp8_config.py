"""Parser of the configs of FP8 writers for one module.

The config is only a hint: the stored tensors decide, and every value is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfq.errors import FormatError
from hfq.formats.base import ActivationScheme, bounded_int
from hfq.formats.configs.compressed_tensors_config import (
    format_of,
    group_of,
    read_activations,
    read_block,
    refuse_transforms,
    unusable,
)
from hfq.formats.configs.quark_config import read_inputs
from hfq.tensor_spec import TensorInfo

__all__ = ["Hints", "guess_block", "is_fp4_expert", "read_hints"]


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of a config for one FP8 module.

    They are the block or group size, whether scales divide, whether the config states that, and the
    quantization of activations.
    """

    block: tuple[int, int] | None = None
    group_size: int | None = None
    reciprocal: bool = False
    scheme: ActivationScheme | None = None
    is_static: bool = False
    is_declared: bool = False
    is_power: bool = False


def read_hints(module: str, config: Mapping) -> Hints:
    """Returns the hints of a `quantization_config` for one module.

    Raises:
        FormatError: The config contradicts an FP8 module.
    """
    method = str(config.get("quant_method", ""))
    meaning = config.get("weight_scale_semantics")
    if meaning not in (None, "inverse", "multiplier"):
        raise unusable("weight_scale_semantics", meaning, "inverse or multiplier")
    is_power = config.get("scale_fmt") == "ue8m0" or "mxfp8" in format_of(module, config)
    declared: dict[str, Any] = {
        "is_power": is_power,
        "reciprocal": meaning == "inverse",
        "is_declared": meaning is not None,
    }
    if method == "compressed-tensors":
        return dataclasses.replace(_compressed_tensors(module, config), **{**declared, "is_declared": True})
    if method == "fbgemm_fp8":
        bound = config.get("activation_scale_ub")
        if bound is not None and (
            isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound > 0
        ):
            raise unusable("activation_scale_ub", bound, "a positive number")
        return Hints(scheme=ActivationScheme("token", upper_bound=bound), **declared)
    if method == "quark":
        return Hints(scheme=read_inputs(module, config), **(declared | {"is_declared": True}))
    bounded_int(config, "bits", lambda bits: bits == 8, "8 for FP8 weights", module)
    block = read_block(config.get("weight_block_size"), "weight_block_size")
    kind = config.get("activation_scheme") or "dynamic"
    if kind not in ("dynamic", "static"):
        raise unusable("activation_scheme", kind, "dynamic or static")
    scheme = None
    if method == "fp8" and kind == "dynamic":
        scheme = ActivationScheme("group", group_size=block[1]) if block else ActivationScheme("token")
    is_static = method == "fp8" and kind == "static"
    return Hints(block=block, scheme=scheme, is_static=is_static, **declared)


def _compressed_tensors(module: str, config: Mapping) -> Hints:
    refuse_transforms(config)
    group = group_of(module, config)
    weights = group.get("weights") or {}
    if weights.get("type", "float") != "float" or weights.get("num_bits", 8) != 8:
        raise FormatError(
            f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
            file="config.json",
            tensor=module,
            expected="8-bit float, because the stored weight is F8",
            found=f"{weights.get('num_bits')}-bit {weights.get('type')}",
            fix="Restore the original config_groups in config.json.",
        )
    strategy = weights.get("strategy")
    block = read_block(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    group_size = None
    if strategy == "group":
        group_size = bounded_int(
            weights, "group_size", lambda size: 0 < size < 1 << 24, "a positive number", module
        )
    activations = group.get("input_activations")
    is_static = (
        isinstance(activations, Mapping) and bool(activations) and activations.get("dynamic", False) is False
    )
    scheme = read_activations(activations, {})
    return Hints(block=block, group_size=group_size, scheme=scheme, is_static=is_static)


def is_fp4_expert(tensors: Mapping[str, TensorInfo], config: Mapping) -> bool:
    """Returns True if a module is an FP4 expert of DeepSeek-V4.

    Its codes are stored as I8. The dtype of the scale or the config tells it.
    """
    weight, scale = tensors.get("weight"), tensors.get("scale")
    if (
        weight is None
        or weight.dtype != "I8"
        or len(weight.shape) != 2
        or config.get("quant_method") != "fp8"
    ):
        return False
    return config.get("expert_dtype") == "fp4" or (scale is not None and scale.dtype == "F8_E8M0")


def guess_block(module: str, weight: TensorInfo, scale: TensorInfo, is_grid_of_4: bool) -> tuple[int, int]:
    """Returns the block size of a grid of scales if the config does not state it.

    The result is 128 × 128 if that tiles the weight. For a grid of ModelOpt, it is the weight's size divided
    by the grid's.
    """
    out_features, in_features = weight.shape
    side = out_features // scale.shape[0] if is_grid_of_4 and scale.shape[0] else 128
    is_exact = (
        is_grid_of_4
        and (side * scale.shape[0], side * scale.shape[2]) == weight.shape
        and side & (side - 1) == 0
    )
    if is_exact:
        return side, side
    if out_features % 128 == in_features % 128 == 0 or scale.numel == 1:
        return 128, 128
    raise FormatError(
        f"The config does not state the block size of {module}. Nothing was loaded.",
        file=scale.range.file,
        tensor=scale.name,
        expected="weight_block_size in quantization_config, for a weight that 128 × 128 does not tile",
        found=f"{weight} under {scale}",
        fix="Restore the original weight_block_size in config.json.",
    )
