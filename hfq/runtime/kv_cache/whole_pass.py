"""Notice of forward passes that changed a KV cache and did not end."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

__all__ = ["WholePass"]


class WholePass:
    """Notices whether the forward passes of a model with its KV cache ended.

    Lengths show where an interrupted pass stopped, except in layers with a recurrent state.

    Args:
        model: The model that computes, or one that has it as a module (PEFT). None if lengths show all.
        cache: The cache.

    Attributes:
        has_failed: True if a pass changed the cache and did not end.
    """

    def __init__(self, model: nn.Module | None, cache: Cache) -> None:
        self._cache: weakref.ref[Cache] | None = weakref.ref(cache)  # the model keeps no cache in memory
        self._is_running = self._is_changing = self.has_failed = False
        self._handles: list[RemovableHandle] = []
        if model is not None:
            inner = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)
            self._handles += [
                inner.register_forward_pre_hook(self._begin, with_kwargs=True),
                inner.register_forward_hook(self._end, with_kwargs=True),
            ]

    def __getstate__(self) -> dict[str, Any]:
        return {"_cache": None}  # hooks of a copied model do nothing

    def close(self) -> None:
        """Forgets the model."""
        for handle in self._handles:
            handle.remove()

    def note_change(self) -> None:
        """Notes that the pass that runs changes the cache."""
        self._is_changing = self._is_running

    def settle(self) -> None:
        """Notes that no pass runs."""
        self.has_failed = self.has_failed or self._is_changing
        self.forget_pass()

    def forget_pass(self) -> None:
        """Forgets the pass, whose changes were undone."""
        self._is_running = self._is_changing = False

    def forget(self) -> None:
        """Forgets all passes."""
        self.forget_pass()
        self.has_failed = False

    def _begin(self, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._is_of_cache(args, kwargs):
            self.settle()
            self._is_running = True

    def _end(self, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: object) -> None:
        if self._is_of_cache(args, kwargs):
            self.forget_pass()

    def _is_of_cache(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        cache = None if self._cache is None else self._cache()
        return cache is not None and any(each is cache for each in (*args, kwargs.get("past_key_values")))
