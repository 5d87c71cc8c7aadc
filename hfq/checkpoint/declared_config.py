"""The quantization config that config.json declares."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["declared_config"]


def declared_config(config: Mapping) -> object:
    """Returns the quantization config in the contents of a config.json, or None.

    Args:
        config: The contents. A config of a part, such as `text_config`, may hold it.
    """
    texts = (config, *(value for value in config.values() if isinstance(value, Mapping)))
    found = next(
        (text["quantization_config"] for text in texts if text.get("quantization_config") is not None),
        None,
    )
    own = config.get("quantization")  # mlx-lm's; its copy is quantization_config, and neither names a method
    if isinstance(own, Mapping) and "bits" in own and found in (None, own):
        return {"quant_method": "mlx", **own}
    return found
