"""Formats of quantized checkpoints: one file each, or a folder for a family, imported with this package."""

from __future__ import annotations

import importlib
import pkgutil

from hfq.formats.base import FORMATS, ActivationScheme, Format, FormatVariant
from hfq.formats.detection.detect import (
    NotQuantizedFormatError,
    UnquantizedError,
    detect_formats,
    tensors_by_module,
)
from hfq.formats.unquantized import Unquantized

__all__ = [
    "FORMATS",
    "ActivationScheme",
    "Unquantized",
    "FormatVariant",
    "Format",
    "NotQuantizedFormatError",
    "UnquantizedError",
    "detect_formats",
    "tensors_by_module",
]

for _module in pkgutil.iter_modules(__path__):  # a format registers itself when its file is imported
    importlib.import_module(f"{__name__}.{_module.name}")
