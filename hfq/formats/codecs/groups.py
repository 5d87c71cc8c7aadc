"""Scales and zero points of groups of channels, applied to panels of weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hfq.errors import FormatError

__all__ = ["apply_groups", "block_amax", "check_divides", "rows_of"]


def rows_of(values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns the scales of output rows [start, stop).

    The result is float32 [rows, groups], or [1, 1] if all rows share one scale.

    Args:
        values: [] or [1] for one scale per tensor, [out] or [out, 1] per channel, [out, groups] per group.
        start: The first row.
        stop: The row after the last.
    """
    if values.numel() == 1:
        return values.reshape(1, 1).to(torch.float32)
    values = values[:, None] if values.dim() == 1 else values
    return values[start:stop].to(torch.float32)


def apply_groups(
    panel: torch.Tensor,
    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    values: torch.Tensor,
    group_size: int,
) -> None:
    """Applies an operation in place to each group of a panel.

    Args:
        panel: float32 [rows, in_features], contiguous.
        operation: An in-place operation, such as `torch.Tensor.mul_`.
        values: float32 [rows or 1, groups], one for each group.
        group_size: Channels of a group; the last group may be shorter.
    """
    groups, in_features = values.shape[1], panel.shape[1]
    if groups == 1:
        operation(panel, values)
    elif groups * group_size == in_features:
        operation(panel.unflatten(1, (groups, group_size)), values[:, :, None])
    else:
        operation(panel, values.repeat_interleave(group_size, 1)[:, :in_features])


def block_amax(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Returns the largest amplitude of each block of a weight.

    Blocks at the ends of the weight may be smaller.

    Args:
        weight: float32 [rows, columns].
        block: (rows, columns) of a block.
    """
    padding = (0, -weight.shape[1] % block[1], 0, -weight.shape[0] % block[0])
    padded = torch.nn.functional.pad(weight, padding)
    return padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).abs().amax((1, 3))


def check_divides(in_features: int, size: int, variant: str, what: str = "group_size") -> None:
    """Checks that an input consists of whole groups, for formats that require it.

    Raises:
        FormatError: Names both sizes.
    """
    if size < 1 or in_features % size:
        raise FormatError(
            f"{variant} cannot hold a layer of this input size.",
            expected=f"a multiple of {what}={size}",
            found=f"{in_features} input channels",
            fix="Choose a group size that divides the input, or add the layer to modules_to_not_convert.",
        )
