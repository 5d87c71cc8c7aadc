"""Perplexity of a causal language model on a text."""

from __future__ import annotations

import math

import torch

__all__ = ["perplexity"]


def perplexity(model: torch.nn.Module, tokens: torch.Tensor, context: int = 256, batch_size: int = 16) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window.

    Args:
        model: Takes `input_ids` and `labels` and returns a `loss`, as transformers' causal models do.
        tokens: int64 [length]; cut into windows of `context`, the rest is dropped.
        context: Tokens of a window.
        batch_size: Windows of a forward.

    Raises:
        ValueError: There are fewer tokens than one window, or a window has fewer than two.
    """
    if context < 2:
        raise ValueError(f"a window of {context} tokens predicts nothing")
    windows = tokens[: tokens.numel() // context * context].view(-1, context)
    if not len(windows):
        raise ValueError(f"{tokens.numel()} tokens are fewer than one window of {context}")
    total = 0.0
    with torch.no_grad():
        for batch in windows.split(batch_size):
            total += model(input_ids=batch, labels=batch).loss.item() * len(batch)
    return math.exp(total / len(windows))
