"""Quantization: one file per method, and the driver that runs them over a checkpoint block by block. `hfq.quantize(…)` calls it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfq.quantization.progress import QuantizeReport


class _Callable(ModuleType):
    """This package, which is called by its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> QuantizeReport:
        """See `hfq.quantization.driver.quantize`."""
        from hfq.quantization.driver import quantize

        return quantize(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
