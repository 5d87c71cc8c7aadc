"""Registration of hfq with torch, transformers, PEFT, and DeepSpeed when they are imported.

`import hfq` only calls `register`, before or after these libraries are imported. Each entry of `_CALLBACKS`
runs as soon as its library is imported. From then on, the library calls hfq in this order:

1. `patch_auto_factory` wraps `AutoModelForCausalLM.from_pretrained` and its siblings. `patch_modeling_utils`
   wraps those of model classes. With an `HfqConfig`, the wrapper calls `_guarded`
   (integrations/transformers/patches.py). It checks the arguments, opens the checkpoint, and calls
   `from_pretrained` of transformers.
2. transformers calls `get_hf_quantizer`, which has a wrapper in the same file. The wrapper passes the
   checkpoint's quantization config to the `HfqConfig`. It then creates the class that `register_with`
   registered: `HfqQuantizer` (integrations/transformers/quantizer.py).
3. transformers calls `HfqQuantizer._process_model_before_weight_loading` with the model on the meta device.
   It asks `choose_loader` (integrations/transformers/load_kinds.py) for a loader class and creates the
   loader. The class is `ModelLoader` (loading/model_loader.py) or a subclass. Its constructor matches the
   checkpoint with the model and replaces the quantized layers.
4. `HfqQuantizer._place_model` calls `ModelLoader.place`, which chooses the device of every tensor and loads
   the quantized ones. transformers loads the others. This call runs at the end of step 3. If transformers
   first infers a device map, it runs in `HfqQuantizer.validate_environment`.
5. `HfqQuantizer._process_model_after_weight_loading` calls `ModelLoader.finish`. The model is ready.

The other patches handle models that hfq has already loaded. `patch_modeling_layers` and
`patch_candidate_generator` read layers that predict further tokens, for `generate(use_mtp=True)`.
`patch_peft` lets PEFT add adapters to quantized layers (integrations/peft/lora.py). `patch_deepspeed` checks
a model before DeepSpeed creates an engine for it. `patch_data_parallel` keeps torch from broadcasting
quantized weights (integrations/data_parallel.py).
"""

from __future__ import annotations

import importlib
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
    "transformers.modeling_layers": ("hfq.integrations.transformers.mtp_layers", "patch_modeling_layers"),
    "transformers.generation.candidate_generator": (
        "hfq.integrations.transformers.mtp_layers",
        "patch_candidate_generator",
    ),
    "peft": ("hfq.integrations.peft.patches", "patch_peft"),
    "deepspeed": ("hfq.integrations.deepspeed.private_api", "patch_deepspeed"),
    "torch.nn.parallel.distributed": ("hfq.integrations.data_parallel", "patch_data_parallel"),
}
"""Functions that run after a library module is imported.

The entries are {library module: (module, function)}. Each function receives the library module.

- `register_with` adds `HfqConfig` and `HfqQuantizer` to the tables of `transformers.quantizers.auto`.
- `patch_modeling_utils` wraps `get_hf_quantizer`, `PreTrainedModel.from_pretrained` and `save_pretrained`.
- `patch_auto_factory` wraps `from_pretrained` of the auto classes.
- `patch_modeling_layers` wraps `from_pretrained` of layers that predict further tokens.
- `patch_candidate_generator` wraps the constructor of the generator that drafts with them.
- `patch_peft` wraps the functions of PEFT that create, place, save, and merge adapters.
- `patch_deepspeed` wraps `DeepSpeedEngine._configure_distributed_model`.
- `patch_data_parallel` wraps `DistributedDataParallel.__init__`.
"""

_pending: dict[str, ModuleType] = {}


def register() -> None:
    """Runs each callback now if its module is loaded, and otherwise when it is imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in _CALLBACKS:
        if name in sys.modules:
            _loaded(sys.modules[name])


def run_pending() -> None:
    """Runs the callbacks whose library module and hfq module are both loaded.

    A module of hfq may import the library that its callback waits for. The callback is not yet defined at
    that moment, so each such module calls this function at its end.
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


class _Finder:
    """Import finder that wraps the loader of a module in `_CALLBACKS`.

    It finds nothing itself and asks the other finders. It derives from no class of `importlib.abc`, whose
    import takes as long as the rest of `import hfq`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _CALLBACKS:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Import loader that runs the callback after the real loader has executed the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        _loaded(module)
