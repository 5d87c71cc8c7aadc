"""Parser of AMD Quark's config for one module.

A scheme is a list of specs: `weight` of a layer's config is one spec, or a list of two for weights that are
quantized in two levels. The config is only a hint: the stored tensors decide, and every value is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hfq.errors import FormatError
from hfq.formats.base import ActivationScheme
from hfq.formats.configs.compressed_tensors_config import unusable
from hfq.formats.configs.safe_regex import matches
from hfq.tensor_spec import TensorInfo

__all__ = ["float_codes", "is_quark", "packs_in_order", "read_dtype", "read_inputs", "weight_specs"]


def is_quark(config: Mapping) -> bool:
    """Returns True if the config is one of Quark."""
    return config.get("quant_method") == "quark"


def weight_specs(module: str, config: Mapping) -> Sequence[Mapping]:
    """Returns the specs of a module's weight: none, one, or two.

    Raises:
        FormatError: The config has no such specs.
    """
    return _specs(_layer_config(module, config).get("weight"))


def float_codes(module: str, config: Mapping) -> str | None:
    """Returns the dtypes of the codes and scales that Quark's config names, such as "fp4 e8m0".

    Returns None if the config is not one of Quark.
    """
    if not is_quark(config):
        return None
    specs = weight_specs(module, config)
    if not specs:
        return "none"
    scale = specs[1].get("dtype") if len(specs) == 2 else specs[0].get("scale_format")
    return f"{specs[0].get('dtype')} {scale}"


def read_dtype(
    module: str, codes: TensorInfo, config: Mapping, allowed: tuple[str, ...], level: int = 0
) -> str:
    """Returns the dtype of a module's codes in the config.

    Args:
        module: The full name of the module on disk.
        codes: The codes.
        config: The checkpoint's `quantization_config`.
        allowed: The dtypes that codes of this dtype and shape can be.
        level: The spec of the codes, for weights that are quantized in two levels.

    Raises:
        FormatError: The config names another dtype, or none.
    """
    specs = weight_specs(module, config)
    named = str(specs[level].get("dtype")) if specs else "none"
    if named not in allowed:
        raise FormatError(
            f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
            file=codes.range.file,
            tensor=codes.name,
            expected=f"dtype {' or '.join(allowed)}, because the stored weight is {codes}",
            found=f"dtype {named}",
            fix="Restore the original quantization_config in config.json.",
        )
    return named


def packs_in_order(config: Mapping) -> bool:
    """Returns True if the codes of a word are in order.

    Raises:
        FormatError: The config names neither this order nor Quark's usual one, which it may omit.
    """
    export = config.get("export")
    if export is not None and not isinstance(export, Mapping):
        raise unusable("export", export, "{pack_method: …}")
    method = export.get("pack_method") if export else None
    if method not in (None, "reorder", "order"):
        raise unusable("pack_method", method, "reorder or order")
    return method == "order"


def read_inputs(module: str, config: Mapping) -> ActivationScheme | None:
    """Returns the activation quantization that the config requests for a module, or None."""
    specs = _specs(_layer_config(module, config).get("input_tensors"))
    if not specs:
        return None
    dtype, scheme = str(specs[0].get("dtype")), str(specs[0].get("qscheme"))
    is_by_token = len(specs) == 1 and scheme == "per_channel" and specs[0].get("is_dynamic") is True
    if dtype == "fp8_e4m3" and is_by_token:
        return ActivationScheme("token")
    return ActivationScheme("tensor", dtype=f"quark {dtype} {scheme}")


def _layer_config(module: str, config: Mapping) -> Mapping:
    """Returns the config of a layer.

    A name takes precedence over a pattern, a pattern over a class, and a class over the global config.

    Raises:
        FormatError: A part of the config has a wrong type.
    """
    named = _table(config, "layer_quant_config")
    if module in named:
        return named[module]
    for pattern, layer in named.items():
        if _fits(pattern, module):
            return layer
    kinds = _table(config, "layer_type_quant_config")
    found: Any = kinds["Linear"] if "Linear" in kinds else config.get("global_quant_config")
    if not isinstance(found, Mapping):
        raise unusable("global_quant_config", found, "{weight: …}")
    return found


def _table(config: Mapping, key: str) -> Mapping[str, Mapping]:
    table = config.get(key) or {}
    if not isinstance(table, Mapping) or not all(isinstance(entry, Mapping) for entry in table.values()):
        raise unusable(key, table, "{name: {weight: …}}")
    return table


def _specs(value: Any) -> Sequence[Mapping]:
    specs = value if isinstance(value, list) else [] if value is None else [value]
    if len(specs) > 2 or not all(isinstance(spec, Mapping) for spec in specs):
        raise unusable("global_quant_config", value, "one spec or two")
    return specs


def _fits(pattern: str, module: str) -> bool:
    """Returns True if a pattern of a shell, with `*` and `?`, matches a module's name."""
    if "[" in pattern:
        raise unusable("layer_quant_config", pattern, "patterns of names, * and ?")
    letters = ({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern)
    return matches(f"{''.join(letters)}$", module, "layer_quant_config")
