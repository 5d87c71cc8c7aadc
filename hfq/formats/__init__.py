"""Formats of quantized checkpoints: one file per format, or one folder per family."""

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

for _module in pkgutil.iter_modules(__path__):  # importing its file registers a format
    importlib.import_module(f"{__name__}.{_module.name}")
