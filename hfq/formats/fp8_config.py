"""What the configs of the FP8 writers say about one module: hints beside the tensors, each checked for sanity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfq.errors import FormatError
from hfq.formats.base import ActivationScheme, bounded_int
from hfq.formats.patterns import matches

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
            raise _unusable("activation_scale_ub", bound, "a positive number")
        return Hints(scheme=ActivationScheme("token", upper_bound=bound))
    bounded_int(config, "bits", lambda bits: bits == 8, "8 for FP8 weights", module)
    block = _block(config.get("weight_block_size"), "weight_block_size")
    kind, meaning = config.get("activation_scheme") or "dynamic", config.get("weight_scale_semantics")
    if kind not in ("dynamic", "static"):
        raise _unusable("activation_scheme", kind, "dynamic or static")
    if meaning not in (None, "inverse", "multiplier"):
        raise _unusable("weight_scale_semantics", meaning, "inverse or multiplier")
    scheme = None
    if method == "fp8" and kind == "dynamic":
        scheme = ActivationScheme("group", group_size=block[1]) if block else ActivationScheme("token")
    is_static = method == "fp8" and kind == "static"
    return Hints(
        block=block, reciprocal=meaning == "inverse", scheme=scheme, is_static=is_static, is_declared=meaning is not None
    )


def _block(value: object, key: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(sizes) != 2 or any(type(size) is not int or not 0 < size < 1 << 24 for size in sizes):
        raise _unusable(key, value, "two positive sizes, as [128, 128]")
    return sizes[0], sizes[1]


def _unusable(key: str, value: object, expected: str) -> FormatError:
    return FormatError(
        f"quantization_config has an unusable {key}; nothing was loaded.", file="config.json", found=repr(value)[:80],
        expected=expected, fix=f"correct {key} in config.json",
    )  # fmt: skip


def _compressed_tensors(module: str, config: Mapping) -> Hints:
    _refuse_transforms(config)
    group = _group_of(module, config)
    weights = group.get("weights") or {}
    if not isinstance(weights, Mapping):
        raise _unusable("weights", weights, "an object")
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
    activations = group.get("input_activations")
    is_static = isinstance(activations, Mapping) and bool(activations) and activations.get("dynamic", False) is False
    scheme = _activations(activations)
    return Hints(block=block, group_size=group_size, scheme=scheme, is_static=is_static, is_declared=True)


def _refuse_transforms(config: Mapping) -> None:
    """Rotations of the activations and sparse weights change what a weight means."""
    transforms, sparsity = config.get("transform_config"), config.get("sparsity_config")
    if transforms:
        raise _unusable("transform_config", transforms, "none: hfq applies no transforms")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise _unusable("sparsity_config", sparsity, "dense weights")


def _activations(options: object) -> ActivationScheme | None:
    if not isinstance(options, Mapping) or options.get("dynamic") is not True or options.get("type") != "float":
        return None
    strategy = options.get("strategy")
    if strategy == "group":
        size = bounded_int(options, "group_size", lambda size: 0 < size < 1 << 24, "a positive number", "activations")
        if size is None:
            raise _unusable("group_size", size, "a size for activations of strategy group")
        return ActivationScheme("group", group_size=size)
    return ActivationScheme("tensor" if strategy == "tensor" else "token")


def _group_of(module: str, config: Mapping) -> Mapping:
    """The config group whose targets take this linear module: by exact name, else by `re:`, else by class."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _unusable("config_groups", groups, "{name: {targets, weights, …}}")
    ranks: list[tuple[int, Mapping]] = []
    for group in groups.values():
        targets = group.get("targets") or ()
        if not isinstance(targets, (list, tuple)):
            raise _unusable("targets", targets, "a list of names")
        ranks += [(rank, group) for target in targets if (rank := _rank(str(target), module)) is not None]
    return min(ranks, key=lambda pair: pair[0], default=(0, {}))[1]


def _rank(target: str, module: str) -> int | None:
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if matches(target[3:], module, "config_groups") else None
    return 2 if target == "Linear" else None
