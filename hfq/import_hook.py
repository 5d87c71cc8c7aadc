"""Registers hfq with transformers and PEFT when they are imported, before or after hfq, so that `import hfq`
stays light.
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
