"""Formats of other packages, loaded from entry points of the group `hfq.formats`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from hfq.errors import SetupError

__all__ = ["GROUP", "METHODS", "load_plugin"]

GROUP = "hfq.formats"
METHODS = frozenset(
    {
        "gptq",
        "awq",
        "fp8",
        "fbgemm_fp8",
        "compressed-tensors",
        "bitsandbytes",
        "torchao",
        "quanto",
        "hqq",
        "modelopt",
        "auto-round",
        "intel/auto-round",
        "mxfp4",
        "quark",
        "bitnet",
        "blockwise_int8",
        "gemma",
        "gguf",
        "metal",
        "mxfp8",
        "w8a8_int8",
        "hfq",
    }
)
"""The values of `quant_method` in checkpoints that hfq's own formats read."""

_loaded: set[str] = set()


def load_plugin(config: Mapping) -> bool:
    """Imports the package that provides the format of an unknown `quant_method`.

    Importing the package registers the format. The package declares it as an entry point:

        [project.entry-points."hfq.formats"]
        my_method = "my_package.my_format"

    Args:
        config: The checkpoint's `quantization_config`.

    Returns:
        True if a package provides the format.

    Raises:
        SetupError: The entry point exists but cannot be loaded.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method in METHODS:
        return False
    for entry in () if method in _loaded else entry_points(group=GROUP, name=method):
        try:
            entry.load()
        except Exception as error:
            raise SetupError(
                f"The format registered for quant_method={method!r} cannot be loaded.",
                expected=f"an importable {entry.value}",
                found=f"{type(error).__name__}: {error}",
                fix="Reinstall the package that provides the format, or uninstall it.",
            ) from error
        _loaded.add(method)
    return method in _loaded
