"""What the configs of the FP8 writers say about one module: hints beside the tensors, each checked for sanity."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hfq.errors import FormatError
from hfq.formats.base import ActivationScheme, bounded_int

__all__ = ["Hints", "read_hints"]


@dataclass(frozen=True, slots=True)
class Hints:
    """The size of a block or a group, whether scales divide, and how activations are quantized."""

    block: tuple[int, int] | None = None
    group_size: int | None = None
    reciprocal: bool = False
    scheme: ActivationScheme | None = None


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
        return Hints(scheme=ActivationScheme("token", upper_bound=float(bound) if bound is not None else None))
    bounded_int(config, "bits", lambda bits: bits == 8, "8 for FP8 weights", module)
    block = _block(config.get("weight_block_size"), "weight_block_size")
    scheme = None
    if method == "fp8" and config.get("activation_scheme", "dynamic") == "dynamic":
        scheme = ActivationScheme("group", group_size=block[1]) if block else ActivationScheme("token")
    return Hints(block=block, reciprocal=config.get("weight_scale_semantics") == "inverse", scheme=scheme)


def _block(value: object, key: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(sizes) != 2 or any(type(size) is not int or not 0 < size < 1 << 24 for size in sizes):
        raise FormatError(
            f"quantization_config has an unusable {key}; nothing was loaded.", file="config.json", found=repr(value)[:80],
            expected="two positive sizes, as [128, 128]", fix=f"correct {key} in config.json",
        )  # fmt: skip
    return sizes[0], sizes[1]


def _compressed_tensors(module: str, config: Mapping) -> Hints:
    group = _group_of(module, config)
    weights = group.get("weights") or {}
    if weights.get("type", "float") != "float" or weights.get("num_bits", 8) != 8:
        raise FormatError(
            f"quantization_config contradicts the tensors of {module}; nothing was loaded.", file="config.json", tensor=module,
            expected="8-bit float, as the stored F8 weight", found=f"{weights.get('num_bits')}-bit {weights.get('type')}",
            fix="correct config_groups in config.json",
        )  # fmt: skip
    strategy = weights.get("strategy")
    block = _block(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    group_size = None
    if strategy == "group":
        group_size = bounded_int(weights, "group_size", lambda size: 0 < size < 1 << 24, "a positive number", module)
    return Hints(block=block, group_size=group_size, scheme=_activations(group.get("input_activations")))


def _activations(options: object) -> ActivationScheme | None:
    if not isinstance(options, Mapping) or options.get("dynamic") is not True or options.get("type") != "float":
        return None
    strategy = options.get("strategy")
    if strategy == "group":
        return ActivationScheme("group", group_size=options.get("group_size"))
    return ActivationScheme("tensor" if strategy == "tensor" else "token")


def _group_of(module: str, config: Mapping) -> Mapping:
    """The config group whose targets take this linear module: by exact name or `re:` first, else by class."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        return {}
    by_class: Mapping = {}
    for group in groups.values():
        if not isinstance(group, Mapping):
            continue
        for target in group.get("targets") or ():
            if target == module or (str(target).startswith("re:") and _matches(str(target)[3:], module)):
                return group
            if target == "Linear":
                by_class = by_class or group
    return by_class


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise FormatError(
            "A target in config_groups is not a regular expression.", file="config.json", found=repr(pattern), expected=str(error),
            fix="correct config_groups in config.json",
        ) from None  # fmt: skip
