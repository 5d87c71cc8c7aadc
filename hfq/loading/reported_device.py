"""Device that an offloaded model reports."""

from __future__ import annotations

from typing import Any, NoReturn

from hfq.modules.offloaded_parameter import no_copy

__all__ = ["report_device"]


def report_device(model: Any, device: Any) -> None:
    """Makes `model.device` the execution device of one offloaded model, instead of `meta`.

    This is patch 4 of `hfq.integrations.transformers.patches`. Such a model cannot be pickled.
    """
    for module in model.modules():
        if hasattr(module, "base_model_prefix") and any(
            parameter.is_meta for parameter in module.parameters()
        ):
            cls = type(module)
            own = {
                "device": property(lambda _: device),
                "__reduce_ex__": _refuse_copy,
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
            }
            module.__class__ = type(cls.__name__, (cls,), own)


def _refuse_copy(model: Any, protocol: object) -> NoReturn:
    raise no_copy(type(model).__name__)
