"""Where a checkpoint says how it was quantized: hints beside the tensors, which decide."""

from __future__ import annotations

from collections.abc import Mapping

from hfq.checkpoint import Checkpoint

__all__ = ["source_config"]


def source_config(checkpoint: Checkpoint) -> dict | None:
    """The checkpoint's own quantization config: in config.json, or in the side file of an older writer."""
    texts = (checkpoint.config, *(value for value in checkpoint.config.values() if isinstance(value, Mapping)))
    for config in texts:
        if isinstance(config.get("quantization_config"), Mapping):
            return dict(config["quantization_config"])
    gptq = checkpoint.side_file("quantize_config.json")
    if gptq is not None:
        return {"quant_method": "gptq", **gptq}
    modelopt = (checkpoint.side_file("hf_quant_config.json") or {}).get("quantization")
    return {"quant_method": "modelopt", **modelopt} if isinstance(modelopt, Mapping) else None
