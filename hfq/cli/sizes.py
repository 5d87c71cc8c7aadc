"""Sizes as people read them. JSON has exact bytes."""

from __future__ import annotations

__all__ = ["as_size"]

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def as_size(nbytes: float) -> str:
    """Formats bytes with three significant digits: `4.5 GB`, or `-` for none."""
    if nbytes == 0:
        return "-"
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if nbytes >= 0.9995 * scale), (1, "B"))
    value = nbytes / scale
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
