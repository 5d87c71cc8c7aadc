"""Quantization configs of checkpoints: hints for detection, which the tensors decide."""

from __future__ import annotations

from collections.abc import Mapping

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.declared_config import declared_config
from hfq.errors import FormatError

__all__ = [
    "SIDE_FILES",
    "as_source",
    "check_floats",
    "detection_hints",
    "halves_experts",
    "is_declared",
    "source_config",
]

SIDE_FILES = (
    "quantize_config.json",
    "quantization_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "quanto_qmap.json",
)
"""Side files that other tools store next to the weights and read again."""


def as_source(stored: object) -> dict:
    """Returns a `quantization_config` as a dict.

    Raises:
        FormatError: The value is not an object.
    """
    if not isinstance(stored, Mapping):
        raise FormatError(
            "quantization_config is not an object. Nothing was loaded.",
            file="config.json",
            expected="{quant_method: …}",
            found=repr(stored)[:80],
            fix="Restore the original quantization_config in config.json.",
        )
    return dict(stored)


def source_config(checkpoint: Checkpoint) -> dict | None:
    """Returns the checkpoint's quantization config, or None if there is none.

    The config is in config.json, or in the side file of an older writer.
    """
    stored = declared_config(checkpoint.config)
    if stored is not None:
        return as_source(stored)
    for name in ("quantize_config.json", "quantization_config.json"):
        copy = checkpoint.side_file(name)
        if copy is not None:
            return {"quant_method": "gptq", **copy}
    modelopt = (checkpoint.side_file("hf_quant_config.json") or {}).get("quantization")
    return {"quant_method": "modelopt", **modelopt} if isinstance(modelopt, Mapping) else None


def detection_hints(checkpoint: Checkpoint, source: Mapping | None) -> dict:
    """Returns all hints of a checkpoint about its format, for `detect_formats`.

    Args:
        checkpoint: The checkpoint.
        source: Its `quantization_config`.

    Returns:
        The keys of the config, and the keys that only its copies in side files contain. Four keys are added:
            `__metadata__` (of the safetensors files), `__smoothed__` (True if any int8 layer has ModelOpt's
            `pre_quant_scale`), `quanto_qmap` (optimum-quanto's side file), and `expert_dtype` (DeepSeek-V4
            states it outside of the config).
    """
    expert_dtype = checkpoint.config.get("expert_dtype")
    hints = {
        **({} if expert_dtype is None else {"expert_dtype": expert_dtype}),
        **(source or {}),
        "__metadata__": checkpoint.metadata(),
        "__smoothed__": _is_smoothed(checkpoint),
    }
    for name in (
        "quantize_config.json",
        "quantization_config.json",
    ):  # a side file may still contain keys that config.json lacks
        hints = {**(checkpoint.side_file(name) or {}), **hints}
    qmap = checkpoint.side_file("quanto_qmap.json")
    return hints if qmap is None else {**hints, "quanto_qmap": qmap}


def _is_smoothed(checkpoint: Checkpoint) -> bool:
    scales = (
        name.removesuffix("pre_quant_scale")
        for name in checkpoint.tensors
        if name.endswith(".pre_quant_scale")
    )
    weights = (checkpoint.tensors.get(f"{module}weight") for module in scales)
    return any(weight is not None and weight.dtype == "I8" for weight in weights)


def halves_experts(hints: Mapping) -> bool:
    """Returns True if `gate_proj` and `up_proj` of an expert are halves of the fused projection.

    gptqmodel 7.7 (its `defuser`) cuts every fused projection into halves, even if the model interleaves the
    channels, as gpt-oss does. It cuts biases in the same way. Other tools separate the channels. Only the
    tool's name in the config tells the difference.

    Args:
        hints: The result of `detection_hints`.
    """
    meta = hints.get("meta")
    tools = meta.get("quantizer") if isinstance(meta, Mapping) else None
    named = tools if isinstance(tools, list) else [tools]
    return any(isinstance(tool, str) and tool.startswith("gptqmodel") for tool in named)


def is_declared(checkpoint: Checkpoint) -> bool:
    """Returns True if config.json itself names a quantization."""
    return declared_config(checkpoint.config) is not None


def check_floats(checkpoint: Checkpoint, outcome: str) -> None:
    """Raises an error if the checkpoint is already quantized.

    Args:
        checkpoint: The checkpoint.
        outcome: The outcome for the message, such as "Nothing was written".

    Raises:
        FormatError: The config names a quantization, or a tensor holds codes.
    """
    config = source_config(checkpoint)
    checkpoint.check_safetensors(outcome)
    if config is not None:
        raise FormatError(
            f"The source is already quantized. {outcome}.",
            file=checkpoint.root,
            expected="an unquantized checkpoint",
            found=f"quant_method={config.get('quant_method')!r}",
            fix="Quantize the original float checkpoint instead.",
        )
    coded = next(
        (
            info
            for info in checkpoint.tensors.values()
            if info.dtype.startswith("F8_") or info.dtype in ("I8", "U8")
        ),
        None,
    )
    if coded is not None:
        raise FormatError(
            f"The source contains quantized codes. {outcome}.",
            file=coded.range.file,
            tensor=coded.name,
            found=str(coded),
            expected="an unquantized checkpoint",
            fix="Quantize the original float checkpoint instead.",
        )
