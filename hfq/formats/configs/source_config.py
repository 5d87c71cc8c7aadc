"""Where a checkpoint says how it was quantized: hints beside the tensors, which decide."""

from __future__ import annotations

from collections.abc import Mapping

from hfq.checkpoint import Checkpoint
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
"""What other tools keep of a quantization beside the weights and read again."""


def as_source(stored: object) -> dict:
    """A `quantization_config` as a dict.

    Raises:
        FormatError: It is no object.
    """
    if not isinstance(stored, Mapping):
        raise FormatError(
            "quantization_config is not an object. Nothing was loaded.",
            file="config.json",
            expected="{quant_method: …}",
            found=repr(stored)[:80],
            fix="correct quantization_config in config.json",
        )
    return dict(stored)


def source_config(checkpoint: Checkpoint) -> dict | None:
    """The checkpoint's own quantization config: in config.json, or in the side file of an older writer."""
    stored = _declared(checkpoint)
    if stored is not None:
        return as_source(stored)
    for name in ("quantize_config.json", "quantization_config.json"):
        copy = checkpoint.side_file(name)
        if copy is not None:
            return {"quant_method": "gptq", **copy}
    modelopt = (checkpoint.side_file("hf_quant_config.json") or {}).get("quantization")
    return {"quant_method": "modelopt", **modelopt} if isinstance(modelopt, Mapping) else None


def detection_hints(checkpoint: Checkpoint, source: Mapping | None) -> dict:
    """All that a checkpoint says about its dialect, for `detect_formats`.

    Args:
        checkpoint: The checkpoint.
        source: Its `quantization_config`.

    Returns:
        The config's own keys, those that only its copies in side files still have, `__metadata__` (of the
        safetensors files), `__smoothed__` (whether any int8 layer has ModelOpt's `pre_quant_scale`) and
        `quanto_qmap` (optimum-quanto's side file).
    """
    hints = {
        **(source or {}),
        "__metadata__": checkpoint.metadata(),
        "__smoothed__": _is_smoothed(checkpoint),
    }
    for name in (
        "quantize_config.json",
        "quantization_config.json",
    ):  # what config.json has lost, its copy may still say
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
    """Whether `gate_proj` and `up_proj` of an expert are halves of what the model fuses, even where it takes
    their channels in turns.

    gptqmodel 7.7 cuts every fused projection so (its `defuser`), gpt-oss's, too; other tools take its
    channels apart. Biases are cut alike. Nothing but the tool's name tells.

    Args:
        hints: As of `detection_hints`.
    """
    meta = hints.get("meta")
    tools = meta.get("quantizer") if isinstance(meta, Mapping) else None
    named = tools if isinstance(tools, list) else [tools]
    return any(isinstance(tool, str) and tool.startswith("gptqmodel") for tool in named)


def is_declared(checkpoint: Checkpoint) -> bool:
    """Whether config.json itself names a quantization."""
    return _declared(checkpoint) is not None


def _declared(checkpoint: Checkpoint) -> object:
    texts = (
        checkpoint.config,
        *(value for value in checkpoint.config.values() if isinstance(value, Mapping)),
    )
    found = next(
        (config["quantization_config"] for config in texts if config.get("quantization_config") is not None),
        None,
    )
    own = checkpoint.config.get(
        "quantization"
    )  # mlx-lm's; quantization_config is a copy of it, and neither names a method
    if isinstance(own, Mapping) and "bits" in own and found in (None, own):
        return {"quant_method": "mlx", **own}
    return found


def check_floats(checkpoint: Checkpoint, outcome: str) -> None:
    """Refuses to quantize what is quantized already.

    Args:
        checkpoint: The checkpoint.
        outcome: What has come of it, for the message: "Nothing was written".

    Raises:
        FormatError: The checkpoint says so, or holds codes.
    """
    config = source_config(checkpoint)
    if config is not None:
        raise FormatError(
            f"The source is quantized already. {outcome}.",
            file=checkpoint.root,
            expected="a checkpoint of floats",
            found=f"quant_method={config.get('quant_method')!r}",
            fix="quantize the float checkpoint that it was made of",
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
            f"The source holds codes. {outcome}.",
            file=coded.range.file,
            tensor=coded.name,
            found=str(coded),
            expected="a checkpoint of floats",
            fix="quantize the float checkpoint that it was made of",
        )
