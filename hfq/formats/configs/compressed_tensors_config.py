"""Parser of the config of compressed-tensors for one module.

The config is only a hint: the stored tensors decide, and every value is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hfq.errors import FormatError
from hfq.formats.base import ActivationScheme, bounded_int
from hfq.formats.configs.safe_regex import matches
from hfq.tensor_spec import TensorInfo

__all__ = [
    "format_of",
    "group_of",
    "is_embedding",
    "read_activations",
    "read_block",
    "refuse_float",
    "refuse_transforms",
    "unusable",
]

_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)$")


def group_of(module: str, config: Mapping) -> Mapping:
    """Returns the config group that targets a module.

    An exact name takes precedence over a `re:` pattern, and a pattern over a class. The class must be evident
    from the module's name.

    Raises:
        FormatError: The groups, or the weights entry of the group, have a wrong type.
    """
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise unusable("config_groups", groups, "{name: {targets, weights, …}}")
    ranks: list[tuple[int, Mapping]] = []
    for group in groups.values():
        targets = group.get("targets") or ()
        if not isinstance(targets, (list, tuple)):
            raise unusable("targets", targets, "a list of names")
        ranks += [(rank, group) for target in targets if (rank := _rank(str(target), module)) is not None]
    found = min(ranks, key=lambda pair: pair[0], default=(0, {}))[1]
    if not isinstance(found.get("weights") or {}, Mapping):
        raise unusable("weights", found.get("weights"), "an object")
    return found


def format_of(module: str, config: Mapping) -> str:
    """Returns the compression format that the config names for a module, or an empty string."""
    return str(group_of(module, config).get("format") or config.get("format") or "")


def refuse_transforms(config: Mapping) -> None:
    """Raises an error if the config requests transforms or sparse weights.

    Rotations of the activations and sparse weights change the meaning of a weight.

    Raises:
        FormatError: The config requests either.
    """
    transforms, sparsity = config.get("transform_config"), config.get("sparsity_config")
    if transforms:
        raise unusable("transform_config", transforms, "no transforms")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise unusable("sparsity_config", sparsity, "no sparse weights")


def read_activations(options: object, tensors: Mapping[str, TensorInfo]) -> ActivationScheme | None:
    """Returns the activation quantization that `input_activations` of a group requests.

    Raises:
        FormatError: The options have no usable group size.
    """
    if not isinstance(options, Mapping) or not options:
        return None
    kind, bits = options.get("type", "int"), options.get("num_bits", 8)
    strategy, is_dynamic = options.get("strategy"), options.get("dynamic") is True
    if (kind, bits) == ("float", 8) and is_dynamic:
        if strategy == "group":
            size = bounded_int(
                options, "group_size", lambda size: 0 < size < 1 << 24, "a positive number", "activations"
            )
            if size is None:
                raise unusable("group_size", size, "a positive size for activations of strategy 'group'")
            return ActivationScheme("group", group_size=size)
        return ActivationScheme("tensor" if strategy == "tensor" else "token")
    if (kind, bits) == ("float", 8) and options.get("dynamic") is False and strategy in ("tensor", None):
        return None if "input_scale" not in tensors else ActivationScheme("tensor", scale_name="input_scale")
    if (
        (kind, bits) == ("int", 8)
        and is_dynamic
        and options.get("symmetric", True)
        and strategy in ("token", "tensor")
    ):
        return ActivationScheme(strategy, dtype="int8")
    return ActivationScheme("token", dtype=f"{bits}-bit {kind}")


def read_block(value: object, key: str) -> tuple[int, int] | None:
    """Returns the (out, in) size of a block.

    The value is `[128, 128]`, or "128x128" as compressed-tensors 0.9 wrote it. None returns None.

    Raises:
        FormatError: The value is not a pair of positive sizes.
    """
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,8}x[0-9]{1,8}", value):
        value = [int(size) for size in value.split("x")]
    sizes = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(sizes) != 2 or any(type(size) is not int or not 0 < size < 1 << 24 for size in sizes):
        raise unusable(key, value, "two positive sizes, such as [128, 128]")
    return sizes[0], sizes[1]


def refuse_float(module: str, codes: TensorInfo, weights: Mapping, config: Mapping) -> None:
    """Raises an error if the config calls integer codes floats."""
    if weights.get("type", "int") != "int" or config.get("quant_method") in ("fp8", "fbgemm_fp8"):
        raise FormatError(
            f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
            file=codes.range.file,
            tensor=codes.name,
            expected="float codes, as config.json says",
            found=str(codes),
            fix="Restore the original config_groups in config.json.",
        )


def unusable(key: str, value: object, expected: str) -> FormatError:
    """Returns the error for an unusable option of a `quantization_config`."""
    return FormatError(
        f"{key} in quantization_config is not supported. Nothing was loaded.",
        file="config.json",
        found=repr(value)[:80],
        expected=expected,
        fix=f"Restore the original {key} in config.json, or use the library that wrote the checkpoint.",
    )


def is_embedding(module: str) -> bool:
    """Returns True if a module's name is that of an embedding."""
    return _EMBEDDING.search(module) is not None


def _rank(target: str, module: str) -> int | None:
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if matches(target[3:], module, "config_groups") else None
    if target == "Embedding" and is_embedding(module):
        return 2
    return 3 if target == "Linear" else None
