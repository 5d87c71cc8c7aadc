"""Device and dtype that a model reports, if its first parameter cannot tell them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hfq.modules.offloaded_parameter import no_copy
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["report_device", "report_dtype"]


def report_device(model: Any, device: Any) -> None:
    """Makes `model.device` the execution device of one offloaded model, instead of `meta`.

    This is patch 4 of `hfq.integrations.transformers.patches`. Such a model cannot be pickled.
    """
    for module in model.modules():
        if hasattr(type(module), "base_model_prefix") and any(
            parameter.is_meta for parameter in module.parameters()
        ):
            _report(module, device=property(lambda _: device), __reduce_ex__=_refuse_copy)


def report_dtype(model: Any) -> None:
    """Makes `model.dtype` the dtype of activations, instead of that of codes or scales.

    This is patch 4 of `hfq.integrations.transformers.patches`, too.
    """
    for module in model.modules():
        if hasattr(type(module), "base_model_prefix") and isinstance(_first_float(module), QuantizedModule):
            _report(module, dtype=property(lambda self: _first_float(self).dtype))


def _refuse_copy(model: Any, protocol: object) -> NoReturn:
    raise no_copy(type(model).__name__)


def _first_float(model: Any) -> Any:
    """Returns the first quantized module or floating parameter, in the order of `parameters()`."""
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            return module
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                return parameter
    return torch.empty(0)


def _report(module: Any, **own: object) -> None:
    """Gives one module a class of its own, with the name of its class and other members."""
    cls = type(module)
    own |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    module.__class__ = type(cls.__name__, (cls,), own)
