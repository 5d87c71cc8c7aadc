"""Patches of PEFT, applied after its import; they act only on models that hfq loaded.

Tested with peft 0.21.2.

`LoraModel._create_new_module` (tuners/lora/model.py) has a fixed list of layer classes. `_replace_module` in
the same file moves adapters to the device of `qweight`, which is meta for a layer on disk. `_prepare_model`
runs before the first layer is replicated, and `_check_merge_allowed` before the first layer is merged. hfq
supports neither. `_maybe_include_all_linear_layers` (tuners/tuners_utils.py) finds the layers of "all-linear"
by class. VeRA and others import its name and call it before the injection (tuners/vera/model.py).
`PeftModel.save_pretrained` writes the empty tensors of ZeRO-3 ranks.
`prepare_model_for_kbit_training` (utils/other.py) casts every half-precision parameter to float32, including
scales, unless it knows the quantization method.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from hfq.import_hook import run_pending

__all__ = ["patch_peft"]


def patch_peft(module: Any) -> None:
    """Replaces the functions of PEFT in this module's docstring."""
    from hfq.integrations.peft import lora

    tuners = module.tuners.tuners_utils
    model = module.tuners.lora.model.LoraModel
    if hasattr(tuners._maybe_include_all_linear_layers, "__wrapped__"):
        return
    original = tuners._maybe_include_all_linear_layers
    including = lora.including(original)
    imported = [owner for name, owner in sys.modules.items() if name.startswith("peft.")]
    for owner in imported:
        if vars(owner).get("_maybe_include_all_linear_layers") is original:
            owner._maybe_include_all_linear_layers = including  # type: ignore[attr-defined]
    model._create_new_module = staticmethod(lora.dispatching(model._create_new_module))
    model._replace_module = lora.keeping_devices(model._replace_module)
    model._prepare_model = lora.refuse_replication(model._prepare_model)
    model._check_merge_allowed = lora.refuse_merge(model._check_merge_allowed)
    module.PeftModel.save_pretrained = lora.gathering(module.PeftModel.save_pretrained)
    prepare = _preparing(module.prepare_model_for_kbit_training)
    for owner in (module, module.utils, module.utils.other):
        owner.prepare_model_for_kbit_training = prepare


def _preparing(original: Callable) -> Callable:
    @functools.wraps(original)
    def prepare_model_for_kbit_training(
        model: Any,
        use_gradient_checkpointing: bool = True,
        gradient_checkpointing_kwargs: dict | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from hfq.integrations.peft.training import prepare_model

        if getattr(getattr(model, "hf_quantizer", None), "loading", None) is None:
            return original(model, use_gradient_checkpointing, gradient_checkpointing_kwargs, *args, **kwargs)
        return prepare_model(model, use_gradient_checkpointing, gradient_checkpointing_kwargs)

    return prepare_model_for_kbit_training


run_pending()
