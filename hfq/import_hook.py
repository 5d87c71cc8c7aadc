"""Registers hfq with transformers, PEFT and DeepSpeed once they are imported.

`import hfq` stays light: it calls `register` alone, before or after these libraries are imported. Each entry
of `_CALLBACKS` runs once its library is there, and from then on the library calls hfq:

1. `AutoModelForCausalLM.from_pretrained` and its siblings are wrapped by `patch_auto_factory`, those of model
   classes by `patch_modeling_utils`. With an `HfqConfig`, the wrapper calls `_guarded`
   (integrations/transformers/patches.py): it checks the arguments, opens the checkpoint, and calls
   transformers' own `from_pretrained`.
2. transformers calls `get_hf_quantizer`, whose wrapper (same file) gives the checkpoint's quantization config
   to the `HfqConfig`, and makes the class that `register_with` registered: `HfqQuantizer`
   (integrations/transformers/quantizer.py).
3. transformers calls `HfqQuantizer._process_model_before_weight_loading` with the model on the meta device.
   It asks `choose_loader` (integrations/transformers/load_kinds.py) for a class, and makes this loader:
   `ModelLoader` (loading/model_loader.py) or one that derives from it. The constructor matches the checkpoint
   with the model and replaces the layers that are quantized.
4. `HfqQuantizer._place_model` calls `ModelLoader.place`, which settles the device of every tensor and loads
   the quantized ones; transformers loads the others. It runs at the end of step 3, or, where transformers
   first infers a device map, in `HfqQuantizer.validate_environment`.
5. `HfqQuantizer._process_model_after_weight_loading` calls `ModelLoader.finish`. The model is ready.

`patch_peft` and `patch_deepspeed` serve models that hfq has loaded. The first lets PEFT put adapters on
quantized layers (integrations/peft/lora.py), the second checks a model before DeepSpeed makes an engine of
it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["register", "run_pending"]

_CALLBACKS = {
    "transformers.quantizers.auto": ("hfq.integrations.transformers.quantizer", "register_with"),
    "transformers.modeling_utils": ("hfq.integrations.transformers.patches", "patch_modeling_utils"),
    "transformers.models.auto.auto_factory": ("hfq.integrations.transformers.patches", "patch_auto_factory"),
    "peft": ("hfq.integrations.peft.patches", "patch_peft"),
    "deepspeed": ("hfq.integrations.deepspeed.private_api", "patch_deepspeed"),
}
"""{library module: (module, function)}: the function is called with the library module once it is imported.

- `register_with` enters `HfqConfig` and `HfqQuantizer` in the tables of `transformers.quantizers.auto`.
- `patch_modeling_utils` wraps `get_hf_quantizer`, `PreTrainedModel.from_pretrained` and `save_pretrained`.
- `patch_auto_factory` wraps `from_pretrained` of the auto classes.
- `patch_peft` wraps the functions of PEFT that make, place, save and merge adapters.
- `patch_deepspeed` wraps `DeepSpeedEngine._configure_distributed_model`.
"""

_pending: dict[str, ModuleType] = {}


def register() -> None:
    """Runs each callback now where its module is loaded, and otherwise as soon as it is."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in _CALLBACKS:
        if name in sys.modules:
            _loaded(sys.modules[name])


def run_pending() -> None:
    """Runs the callbacks whose module is loaded and whose owner is, too.

    An owner that is itself being imported, and imports the module it waits for, has no callback yet: so each
    owner calls this at its end.
    """
    for name, module in list(_pending.items()):
        owner, function = _CALLBACKS[name]
        callback = getattr(importlib.import_module(owner), function, None)
        if callback is not None:
            _pending.pop(name, None)
            callback(module)


def _loaded(module: ModuleType) -> None:
    _pending[module.__name__] = module
    run_pending()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: asks the other finders, and wraps the loader of a module that hfq waits for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _CALLBACKS:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Runs the callback after the real loader has executed the module."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        _loaded(module)
