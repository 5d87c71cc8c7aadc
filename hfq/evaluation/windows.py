"""Windows of a text's tokens, in batches that mark the scored tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hfq.errors import SetupError

__all__ = ["Batch", "cut"]


@dataclass(frozen=True)
class Batch:
    """Windows of equal length that run through a model together.

    Attributes:
        input_ids: int64 [windows, length].
        first: First position of each window whose token is scored. Earlier positions are only context.
    """

    input_ids: torch.Tensor
    first: int

    @property
    def targets(self) -> torch.Tensor:
        """Scored tokens, int64 [windows * (length - first)]."""
        return self.input_ids[:, self.first :].reshape(-1)

    def scored(self, logits: torch.Tensor) -> torch.Tensor:
        """Selects the logits that predict `targets` from all logits [windows, length, vocabulary]."""
        return logits[:, self.first - 1 : -1].flatten(0, 1)


def cut(tokens: torch.Tensor, length: int, stride: int | None = None, batch_size: int = 16) -> list[Batch]:
    """Cuts tokens into windows that start every `stride` tokens.

    Each token is scored once, in the first window with context for it. Without overlap (`stride` equals
    `length`, the default), the first token of each window has no context and is not scored. Tokens after the
    last whole window are dropped.

    Args:
        tokens: int64 [n].
        length: Tokens per window.
        stride: Tokens between the starts of two windows, 1 to `length`.
        batch_size: Windows per batch.

    Raises:
        SetupError: A window has fewer than two tokens, the text is shorter than one window, or the stride
            exceeds the window.
    """
    stride = length if stride is None else stride
    for name, value, least in (("max_seq_length", length, 2), ("batch_size", batch_size, 1)):
        if value < least:
            raise SetupError(
                f"{name}={value} is out of range.",
                expected=f"{least} or more",
                found=value,
                fix=f"Pass a larger `{name}`.",
            )
    if not 1 <= stride <= length:
        raise SetupError(
            f"stride={stride} is out of range for sequences of {length} tokens.",
            expected=f"1 to {length}",
            found=stride,
            fix="Pass a `stride` in this range, or omit it for windows that do not overlap.",
        )
    if tokens.numel() < length:
        raise SetupError(
            "The text is shorter than one sequence.",
            expected=f"at least {length} tokens",
            found=f"{tokens.numel()} tokens",
            fix="Pass a longer text, or a smaller `max_seq_length`.",
        )
    windows = tokens.unfold(0, length, stride)
    first = max(length - stride, 1)
    batches = [
        Batch(part, first) for part in (windows if first == 1 else windows[1:]).split(batch_size) if len(part)
    ]
    return batches if first == 1 else [Batch(windows[:1], 1), *batches]
