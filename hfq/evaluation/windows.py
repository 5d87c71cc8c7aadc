"""Cuts a text's tokens into windows, and windows into batches that say which of their tokens are scored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hfq.errors import SetupError

__all__ = ["Batch", "cut"]


@dataclass(frozen=True)
class Batch:
    """Windows of one length that go through a model together.

    Attributes:
        input_ids: int64 [windows, length].
        first: The first position of each window whose token is scored; those before it are context alone.
    """

    input_ids: torch.Tensor
    first: int

    @property
    def targets(self) -> torch.Tensor:
        """The tokens that are scored, int64 [windows * (length - first)]."""
        return self.input_ids[:, self.first :].reshape(-1)

    def scored(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that predict `targets`, of all logits [windows, length, vocabulary]."""
        return logits[:, self.first - 1 : -1].flatten(0, 1)


def cut(tokens: torch.Tensor, length: int, stride: int | None = None, batch_size: int = 16) -> list[Batch]:
    """Windows that begin every `stride` tokens; each token is scored once, in the first window that has
    context for it.

    Where windows do not overlap (`stride` is `length`, the default) the first token of each has no context
    and is not scored. Tokens behind the last whole window are dropped.

    Args:
        tokens: int64 [n].
        length: Tokens of a window.
        stride: How far apart windows begin, 1 to `length`.
        batch_size: Windows of a batch.

    Raises:
        SetupError: A window predicts nothing, there are fewer tokens than one window, or the stride leaves a
            gap.
    """
    stride = length if stride is None else stride
    if length < 2 or batch_size < 1:
        raise SetupError(
            "A window of fewer than two tokens predicts nothing, nor does a batch of no window.",
            expected="2 or more; 1 or more",
            found=f"{length} tokens, {batch_size} windows",
            fix="correct the sequence length or the batch size",
        )
    if not 1 <= stride <= length:
        raise SetupError(
            "Windows begin at most one window apart.",
            expected=f"a stride of 1 to {length}",
            found=stride,
            fix="correct the stride, or leave it out for windows that do not overlap",
        )
    if tokens.numel() < length:
        raise SetupError(
            "The text is shorter than one sequence.",
            expected=f"{length} tokens or more",
            found=f"{tokens.numel()} tokens",
            fix="pass a longer text, or a shorter sequence length",
        )
    windows = tokens.unfold(0, length, stride)
    first = max(length - stride, 1)
    batches = [
        Batch(part, first) for part in (windows if first == 1 else windows[1:]).split(batch_size) if len(part)
    ]
    return batches if first == 1 else [Batch(windows[:1], 1), *batches]
