"""Patch of torch's `DistributedDataParallel`, which acts only on models that hfq loaded.

Tested with torch 2.11 and 2.13.

`DistributedDataParallel.__init__` (nn/parallel/distributed.py) broadcasts every parameter and buffer of rank
0 to the other ranks. gloo has no float8 dtypes, a weight on disk has no values, and a mapped weight would
become a private copy on every rank. All ranks load the same checkpoint, so hfq leaves these tensors out.
Parameters that train, and unquantized ones that are not mapped, are broadcast as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from hfq.import_hook import run_pending

__all__ = ["patch_data_parallel"]


def patch_data_parallel(module: Any) -> None:
    """Wraps `DistributedDataParallel.__init__`."""
    owner = module.DistributedDataParallel
    if not hasattr(owner.__init__, "__wrapped__"):
        owner.__init__ = _leaving_out(owner.__init__)


def _leaving_out(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        names = set(_loaded_names(module))
        if names:
            names.update(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            self._set_params_and_buffers_to_ignore_for_model(module, names)
        original(self, module, *args, **kwargs)

    return __init__


def _loaded_names(model: Any) -> Iterator[str]:
    """Yields the names of the quantized, offloaded, and frozen mapped parameters of a model."""
    from hfq.modules.quantized_module import QuantizedModule

    loads = [getattr(vars(module).get("hf_quantizer"), "loading", None) for module in model.modules()]
    mapped = [loading.mapped for loading in loads if loading is not None and loading.mapped is not None]
    if not any(load is not None for load in loads):
        return
    for name, module in model.named_modules(remove_duplicate=False):
        for local, parameter in module.named_parameters(recurse=False):
            is_mapped = not parameter.requires_grad and any(parameter in tensors for tensors in mapped)
            if isinstance(module, QuantizedModule) or parameter.is_meta or is_mapped:
                yield f"{name}.{local}" if name else local


run_pending()
