"""Patches for layers that predict further tokens (MTP), in `generate(use_mtp=True)`.

transformers 5.17 and 5.23 load these layers themselves (modeling_layers.py, `MtpModel.from_pretrained`), as
float layers. They find them by the layer numbers of one published checkpoint, and read them again for each
`generate`. For a model that hfq loaded, the patches load them as stored, once, into memory of the device that
computes the last layer. `MTPCandidateGenerator` takes that device from the first parameter of the last layer,
which is meta for a layer on disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hfq.import_hook import run_pending

__all__ = ["patch_candidate_generator", "patch_modeling_layers"]


def patch_modeling_layers(module: Any) -> None:
    """Makes `MtpModel.from_pretrained` read the layers of a model that hfq loaded as stored."""
    original = module.MtpModel.from_pretrained.__func__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def from_pretrained(cls: Any, main_model: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(getattr(main_model, "hf_quantizer", None), "loading", None) is None:
            return original(cls, main_model, *args, **kwargs)
        from hfq.integrations.transformers.mtp_loader import load_mtp_layers

        return load_mtp_layers(cls, main_model)

    module.MtpModel.from_pretrained = classmethod(from_pretrained)


def patch_candidate_generator(module: Any) -> None:
    """Makes `MTPCandidateGenerator` compute on the device of its layers."""
    owner = module.MTPCandidateGenerator
    if not hasattr(owner.__init__, "__wrapped__"):
        owner.__init__ = _on_device_of_layers(owner.__init__)


def _on_device_of_layers(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.device = self.mtp_model.layers[0].enorm.weight.device

    return init


run_pending()
