"""What the configs of the FP8 writers say about one module: hints beside the tensors, each checked for sanity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfq.errors import FormatError
from hfq.formats.base import ActivationScheme, bounded_int
from hfq.formats.compressed_config import group_of, read_activations, read_block, refuse_transforms, unusable

__all__ = ["Hints", "read_hints"]


@dataclass(frozen=True, slots=True)
class Hints:
    """The size of a block or a group, whether scales divide (and who says so), and how activations are quantized."""

    block: tuple[int, int] | None = None
    group_size: int | None = None
    reciprocal: bool = False
    scheme: ActivationScheme | None = None
    is_static: bool = False
    is_declared: bool = False


def read_hints(module: str, config: Mapping) -> Hints:
    """The hints of a `quantization_config` for one module.

    Raises:
        FormatError: The config says of this FP8 module what no FP8 module can be.
    """
    method = str(config.get("quant_method", ""))
    if method == "compressed-tensors":
        return _compressed_tensors(module, config)
    if method == "fbgemm_fp8":
        bound = config.get("activation_scale_ub")
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound > 0):
            raise unusable("activation_scale_ub", bound, "a positive number")
        return Hints(scheme=ActivationScheme("token", upper_bound=bound))
    bounded_int(config, "bits", lambda bits: bits == 8, "8 for FP8 weights", module)
    block = read_block(config.get("weight_block_size"), "weight_block_size")
    kind, meaning = config.get("activation_scheme") or "dynamic", config.get("weight_scale_semantics")
    if kind not in ("dynamic", "static"):
        raise unusable("activation_scheme", kind, "dynamic or static")
    if meaning not in (None, "inverse", "multiplier"):
        raise unusable("weight_scale_semantics", meaning, "inverse or multiplier")
    scheme = None
    if method == "fp8" and kind == "dynamic":
        scheme = ActivationScheme("group", group_size=block[1]) if block else ActivationScheme("token")
    is_static = method == "fp8" and kind == "static"
    return Hints(
        block=block, reciprocal=meaning == "inverse", scheme=scheme, is_static=is_static, is_declared=meaning is not None
    )


def _compressed_tensors(module: str, config: Mapping) -> Hints:
    refuse_transforms(config)
    group = group_of(module, config)
    weights = group.get("weights") or {}
    if weights.get("type", "float") != "float" or weights.get("num_bits", 8) != 8:
        raise FormatError(
            f"quantization_config contradicts the tensors of {module}; nothing was loaded.", file="config.json", tensor=module,
            expected="8-bit float, as the stored F8 weight", found=f"{weights.get('num_bits')}-bit {weights.get('type')}",
            fix="correct config_groups in config.json",
        )  # fmt: skip
    strategy = weights.get("strategy")
    block = read_block(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    group_size = None
    if strategy == "group":
        group_size = bounded_int(weights, "group_size", lambda size: 0 < size < 1 << 24, "a positive number", module)
    activations = group.get("input_activations")
    is_static = isinstance(activations, Mapping) and bool(activations) and activations.get("dynamic", False) is False
    scheme = read_activations(activations, {})
    return Hints(block=block, group_size=group_size, scheme=scheme, is_static=is_static, is_declared=True)
