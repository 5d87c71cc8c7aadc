"""Checks of `resize_token_embeddings` before transformers changes a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hfq.errors import SetupError
from hfq.loading.model_size import is_loaded_by_hfq
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["checking_resize"]


def checking_resize(original: Callable) -> Callable:
    """Returns `resize_token_embeddings` with a check of quantized embeddings and output heads."""

    @functools.wraps(original)
    def resize_token_embeddings(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if is_loaded_by_hfq(self):
            _check(self, new_num_tokens, pad_to_multiple_of)
        return original(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    return resize_token_embeddings


def _check(model: Any, count: int | None, multiple: int | None) -> None:
    """Raises an error if a quantized layer would get another number of tokens.

    transformers resizes the embedding first, and then raises a TypeError for a quantized head.
    """
    head = model.get_output_embeddings()
    for layer in (model.get_input_embeddings(), head):
        if not isinstance(layer, QuantizedModule):
            continue
        rows = layer.out_features
        asked = rows if count is None else count
        if isinstance(multiple, int) and multiple > 0:
            asked = -(-asked // multiple) * multiple
        if asked == rows:
            continue
        fix = "Resize the unquantized model, and quantize it again."
        if layer is head and _rounds_head(model):
            fix = "Load the model without quantize_output_head, and resize that."
        name = next((name for name, module in model.named_modules() if module is layer), "")
        raise SetupError(
            f"{name} is quantized and cannot get another number of tokens. Nothing was changed.",
            tensor=name,
            expected=f"{rows:,} tokens",
            found=f"{asked:,} tokens",
            fix=fix,
        )


def _rounds_head(model: Any) -> bool:
    loading = getattr(vars(model).get("hf_quantizer"), "loading", None)
    return loading is not None and loading.config.quantize_output_head is not None
