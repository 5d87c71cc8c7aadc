"""The first pass of `generate` with drafted tokens and a filled KV cache."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from hfq.errors import SetupError

__all__ = ["FirstPass"]

_SEQUENCES = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs whose last dimension is that of the tokens."""

_START_EMPTY = "call reset() of the cache first, which computes all tokens again"


class FirstPass:
    """Leaves the cached tokens out of the input of a model's next forward pass.

    `generate` does so itself, except with drafted tokens (`_assisted_decoding` of transformers 5.17 to 5.23):
    there, the first pass gets the whole conversation. A cache that holds tokens would hold them twice.

    Args:
        model: The model that generates, or one that has it as a module (PEFT).
    """

    _handle: RemovableHandle | None

    def __init__(self, model: nn.Module) -> None:
        inner = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)
        self._model = weakref.ref(inner)  # a cache keeps no model in memory
        self._is_expected, self._handle = False, None

    def expect(self, cache: Cache) -> None:
        """Waits for the pass, if the cache holds tokens."""
        self.forget()
        model, owner = self._model(), weakref.ref(cache)

        def leave_out_cached(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            cache = owner()
            if cache is not None and kwargs.get("past_key_values") is not cache:
                return None  # a draft of the model itself, which has another cache
            self.forget()
            return None if cache is None else (args, _without_cached(kwargs, cache.get_seq_length()))

        self._is_expected = cache.get_seq_length() > 0
        if model is not None and self._is_expected:
            self._handle = model.register_forward_pre_hook(leave_out_cached, with_kwargs=True)

    def forget(self) -> None:
        """Lets the next pass have its input as it is."""
        self._is_expected = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def check(self, new: int, cached: int) -> None:
        """Checks that a pass came from the model that was expected.

        Args:
            new: Tokens of the pass.
            cached: Tokens that the cache holds.

        Raises:
            SetupError: Another model computes the whole conversation.
        """
        is_expected = self._is_expected
        self.forget()
        if is_expected and new > cached:
            raise SetupError(
                "Another model than that of this KV cache drafts tokens, and computes cached ones again.",
                expected="at most the tokens that are not in the cache",
                found=f"{new} tokens, of which {cached} are cached",
                fix=f"Call generate of the model that the cache was made with, or {_START_EMPTY}.",
            )


def _without_cached(inputs: Mapping[str, Any], cached: int) -> dict[str, Any]:
    """Returns the inputs of a pass without the cached tokens.

    Raises:
        SetupError: States of the cached tokens are requested, or the prompt does not have these tokens.
    """
    ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
    given = embeddings if ids is None else ids
    if not isinstance(given, torch.Tensor):  # a call of the model itself, after drafting was interrupted
        return dict(inputs)
    count = given.shape[1]
    if not _is_whole(inputs, count):
        _check_mask(inputs, count, cached)
        return dict(inputs)
    rows = inputs.get("logits_to_keep")
    drafted = rows - 1 if isinstance(rows, int) and rows > 0 else 0
    if count - drafted <= cached:
        raise SetupError(
            "The KV cache holds the whole prompt, so that no token is left to compute.",
            expected=f"more than {cached} token ids, those of cached tokens included",
            found=f"{count - drafted} tokens",
            fix="Pass the token ids of the whole conversation or crop the cache.",
        )
    if inputs.get("output_hidden_states") or inputs.get("output_attentions"):  # as MTP layers need, too
        raise SetupError(
            "With drafted tokens, states of all tokens were requested; those of cached ones are not stored.",
            expected="an empty KV cache",
            found=f"{cached} cached tokens",
            fix=f"Leave out use_mtp=True, output_hidden_states, and output_attentions, or {_START_EMPTY}.",
        )
    changed = {
        name: value[..., cached:]
        for name in _SEQUENCES
        if isinstance(value := inputs.get(name), torch.Tensor) and value.shape[-1] == count
    }
    if embeddings is not None:
        changed["inputs_embeds"] = embeddings[:, cached:]
    if isinstance(positions := inputs.get("cache_position"), torch.Tensor):  # of remote code
        changed["cache_position"] = positions[: count - cached]
    return {**inputs, **changed}


def _is_whole(inputs: Mapping[str, Any], count: int) -> bool:
    """Returns True if the input has the cached tokens, too: then its first position is 0.

    Without positions and a mask (Bloom), calls of `generate` are known by the option that it always passes.
    """
    positions = inputs.get("position_ids")
    if isinstance(positions, torch.Tensor):
        return not positions[..., 0].any()
    mask = inputs.get("attention_mask")
    return mask.shape[-1] == count if isinstance(mask, torch.Tensor) else "use_cache" in inputs


def _check_mask(inputs: Mapping[str, Any], count: int, cached: int) -> None:
    """Checks that the mask of new tokens also covers the cached ones.

    Raises:
        SetupError: `generate` has cut it to the new tokens (transformers 5.17, or a mask with zeros).
    """
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] < count + cached:
        raise SetupError(
            "With drafted tokens, generate cuts the attention mask to the tokens that it is given.",
            expected=f"a mask of {count + cached} tokens",
            found=f"{mask.shape[1]} tokens",
            fix="Pass the token ids of the whole conversation; those in the cache are not computed again.",
        )
