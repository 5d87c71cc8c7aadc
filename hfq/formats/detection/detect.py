"""Detection of the format of each module from the tensors stored next to it."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping

from hfq.errors import FormatError
from hfq.formats.base import FORMATS, Format
from hfq.formats.configs.safe_regex import limited_matching
from hfq.formats.detection.plugins import load_plugin
from hfq.formats.detection.unsupported import refuse_unreadable
from hfq.formats.layouts.fused_experts import split_experts
from hfq.formats.unquantized import Unquantized
from hfq.tensor_spec import TensorInfo

__all__ = ["NotQuantizedFormatError", "UnquantizedError", "detect_formats", "tensors_by_module"]

_FLOAT_DTYPES = {"F16", "BF16", "F32", "F64", "BOOL", "I64", "I32"}
_NESTED = ".weight."
"""Infix of formats that name their tensors below `weight`.

Examples are `weight.absmax` of bitsandbytes and `weight._data` of optimum-quanto.
"""

_QUANTIZERS = re.compile(
    r"^(?:(.*)\.)?(weight|bias|input|output)_quantizer\.(?:([01])\.)?(scale|zero_point)$"
)
"""Names in older exports of Quark: `weight_quantizer.scale` is today's `weight_scale`."""


class NotQuantizedFormatError(FormatError):
    """Error for a checkpoint in which no module is in a format that hfq reads."""


class UnquantizedError(NotQuantizedFormatError):
    """Error for a checkpoint that is not quantized. hfq can still place and offload it."""


def tensors_by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Groups stored tensors by module, each under its local name.

    Fused tensors of quantized experts are split, so that each expert is a separate module.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in split_experts(tensors).items():
        module, local = _split(name)
        if local in modules.get(module, {}):  # under both names of Quark: the older one is unexpected
            module, _, local = name.rpartition(".")
        modules.setdefault(module, {})[local] = info
    return modules


def _split(name: str) -> tuple[str, str]:
    """Returns the module of a stored tensor and its local name."""
    module, nested, local = name.partition(_NESTED)
    if nested and module:
        return module, f"weight.{local}"
    older = _QUANTIZERS.match(name) if "_quantizer." in name else None
    if older:
        return older[1] or "", f"{older[2]}_{older[4]}{'_2' if older[3] == '1' else ''}"
    module, _, local = name.rpartition(".")
    return module, local


def detect_formats(modules: Mapping[str, Mapping[str, TensorInfo]], config: Mapping) -> dict[str, Format]:
    """Returns the format of each quantized module, detected from its tensors.

    Unquantized modules have no entry in the result, and equal formats are one object.

    Args:
        modules: The result of `tensors_by_module`.
        config: The checkpoint's `quantization_config` with the additions of `detection_hints`; may be empty.

    Raises:
        UnquantizedError: The checkpoint is not quantized.
        NotQuantizedFormatError: No module is in a format that hfq reads.
        FormatError: A config contradicts the tensors.
    """
    is_plugin = load_plugin(config)
    with limited_matching():
        if not is_plugin:
            refuse_unreadable(modules, config)
        detected = {module: _detect(module, tensors, config) for module, tensors in modules.items()}
    found = {module: weight_format for module, weight_format in detected.items() if weight_format is not None}
    if not found:
        raise _nothing_to_read(modules, config)
    return _shared(found)


def _shared(formats: Mapping[str, Format]) -> dict[str, Format]:
    """Returns the formats, with one object for equal ones."""
    known: dict[Format, Format] = {}
    return {
        module: known.setdefault(found, found) if isinstance(found, Hashable) else found
        for module, found in formats.items()
    }


def _detect(module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Format | None:
    for candidate in FORMATS.values():
        found = candidate.detect(module, tensors, config)
        if found is not None:
            return found
    return None


def _nothing_to_read(
    modules: Mapping[str, Mapping[str, TensorInfo]], config: Mapping
) -> NotQuantizedFormatError:
    file = next((info.range.file for tensors in modules.values() for info in tensors.values()), None)
    names = sorted({local for tensors in modules.values() for local in tensors})
    dtypes = sorted({info.dtype for tensors in modules.values() for info in tensors.values()})
    method = config.get("quant_method")
    unknown = [name for name in dtypes if name not in _FLOAT_DTYPES]
    found = f"{sum(map(len, modules.values()))} tensors of {', '.join(dtypes)}, named {', '.join(names[:12])}"
    if method is None and not unknown:
        return UnquantizedError(
            "The checkpoint is not quantized.",
            file=file,
            expected=f"tensors quantized as {_names()}",
            found=f"{found}; no quantization_config",
            fix="Load it with transformers, or with HfqConfig().",
        )
    return NotQuantizedFormatError(
        f"The checkpoint (quant_method={method!r}) contains no module in a format that hfq reads. "
        f"Nothing was loaded.",
        file=file,
        expected=f"tensors quantized as {_names()}",
        found=found,
        fix="Load it with the library that wrote it, or re-export it in one of these formats.",
    )


def _names() -> str:
    return " or ".join(name for name, cls in FORMATS.items() if cls is not Unquantized)
