"""Choice of the format of each module, from the tensors stored next to it."""

from __future__ import annotations

from collections.abc import Mapping

from hfq.errors import FormatError
from hfq.formats.base import FORMATS, Format
from hfq.formats.detection.plugins import load_plugin
from hfq.formats.detection.unsupported import refuse_unreadable
from hfq.formats.layouts.fused_experts import split_experts
from hfq.formats.unquantized import Unquantized
from hfq.tensor_spec import TensorInfo

__all__ = ["NotQuantizedFormatError", "UnquantizedError", "detect_formats", "tensors_by_module"]

_FLOAT_DTYPES = {"F16", "BF16", "F32", "F64", "BOOL", "I64", "I32"}
_NESTED = ".weight."
"""Some dialects name their tensors below `weight`: `weight.absmax` of bitsandbytes, `weight._data` of
optimum-quanto.
"""


class NotQuantizedFormatError(FormatError):
    """No module of the checkpoint is packed in a dialect that hfq reads."""


class UnquantizedError(NotQuantizedFormatError):
    """Nothing says that the checkpoint is quantized: it can be placed and streamed as it is."""


def tensors_by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Groups stored tensors by the module they stand beside, each under its local name.

    Fused tensors of packed experts are split: each expert is a module of its own.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in split_experts(tensors).items():
        module, nested, local = name.partition(_NESTED)
        if nested and module:
            modules.setdefault(module, {})[f"weight.{local}"] = info
        else:
            module, _, local = name.rpartition(".")
            modules.setdefault(module, {})[local] = info
    return modules


def detect_formats(modules: Mapping[str, Mapping[str, TensorInfo]], config: Mapping) -> dict[str, Format]:
    """The format of each packed module, decided by the tensors beside it; dense modules are absent from the
    result.

    Args:
        modules: As `tensors_by_module` gives them.
        config: The checkpoint's `quantization_config`, and what `detection_hints` adds to it; may be empty.

    Raises:
        UnquantizedError: Nothing says that the checkpoint is quantized.
        NotQuantizedFormatError: No module is packed in a dialect that hfq reads.
        FormatError: A config contradicts the tensors.
    """
    load_plugin(config)
    refuse_unreadable(modules, config)
    found: dict[str, Format] = {}
    for module, tensors in modules.items():
        for candidate in FORMATS.values():
            detected = candidate.detect(module, tensors, config)
            if detected is not None:
                found[module] = detected
                break
    if not found:
        raise _nothing_to_read(modules, config)
    return found


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
            expected=f"tensors packed as {_names()}",
            found=f"{found}; no quantization_config",
            fix="load it with transformers, or with HfqConfig as it is",
        )
    return NotQuantizedFormatError(
        f"The checkpoint (quant_method={method!r}) holds no module in a dialect that hfq reads. Nothing was "
        f"loaded.",
        file=file,
        expected=f"tensors packed as {_names()}",
        found=found,
        fix="load it with the library that wrote it, or re-export it in one of these dialects",
    )


def _names() -> str:
    return " or ".join(name for name, cls in FORMATS.items() if cls is not Unquantized)
