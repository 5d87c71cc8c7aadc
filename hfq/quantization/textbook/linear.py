"""Affine (linear) quantization: integer codes with a scale and an optional zero point.

A tensor, a channel, a group, or a block shares one scale and one zero point.

    w = scale * (code - zero_point)

Absmax (symmetric): codes in [-(2^(b-1) - 1), 2^(b-1) - 1], zero point 0, scale = max|w| / (2^(b-1) - 1).
Zero-point (asymmetric): codes in [-2^(b-1), 2^(b-1) - 1], scale = (max w - min w) / (2^b - 1).

Sources: Jacob et al. 2018, arXiv 1712.05877, section 2.1; Dettmers et al. 2022, arXiv 2208.07339, section 2;
Gholami et al. 2021, arXiv 2103.13630, section III. The recipe of GLM-130B (Zeng et al. 2023, arXiv
2210.02414, section 3.3) is absmax per output channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hfq.errors import SetupError

__all__ = ["Affine", "Strategy", "absmax", "block_of", "zero_point"]

Strategy = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True)
class Affine:
    """A quantized matrix.

    Attributes:
        codes: int32 [rows, columns].
        scale: float32 [rows / block rows, columns / block columns].
        zero_point: float32 with the shape of `scale`. None means zero everywhere.
        block: (rows, columns) that share a scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    block: tuple[int, int]

    def dequantize(self) -> torch.Tensor:
        """Returns the values, float32 [rows, columns]."""
        centred = _blocked(self.codes.to(torch.float32), self.block)
        if self.zero_point is not None:
            centred = centred - self.zero_point[:, None, :, None]
        return (centred * self.scale[:, None, :, None]).reshape(self.codes.shape)


def absmax(
    weight: torch.Tensor,
    num_bits: int = 8,
    strategy: Strategy = "channel",
    group_size: int = 128,
    block: tuple[int, int] = (128, 128),
) -> Affine:
    """Quantizes symmetrically by the largest magnitude.

    Args:
        weight: [rows, columns], floats.
        num_bits: 2 to 8.
        strategy: Elements that share a scale: all, a row, `group_size` columns of a row, or a `block`.
        group_size: Group size for `"group"`.
        block: (rows, columns) for `"block"`.

    Raises:
        SetupError: Groups or blocks do not divide the matrix.
    """
    block = block_of(weight.shape, strategy, group_size, block)
    blocked = _blocked(weight.to(torch.float32), block)
    top = (1 << (num_bits - 1)) - 1
    scale = blocked.abs().amax((1, 3)) / top
    scale = torch.where(scale == 0, 1, scale)
    codes = (blocked / scale[:, None, :, None]).round().clamp(-top, top)
    return Affine(codes.to(torch.int32).reshape(weight.shape), scale, None, block)


def zero_point(
    weight: torch.Tensor,
    num_bits: int = 8,
    strategy: Strategy = "channel",
    group_size: int = 128,
    block: tuple[int, int] = (128, 128),
) -> Affine:
    """Quantizes the range from the smallest to the largest value. Arguments match `absmax`.

    Raises:
        SetupError: Groups or blocks do not divide the matrix.
    """
    block = block_of(weight.shape, strategy, group_size, block)
    blocked = _blocked(weight.to(torch.float32), block)
    least, top = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1
    low, high = blocked.amin((1, 3)), blocked.amax((1, 3))
    scale = (high - low) / (top - least)
    scale = torch.where(scale == 0, torch.where(low == 0, 1, low.abs()), scale)
    zero = (least - low / scale).round()
    codes = ((blocked / scale[:, None, :, None]).round() + zero[:, None, :, None]).clamp(least, top)
    return Affine(codes.to(torch.int32).reshape(weight.shape), scale, zero, block)


def block_of(
    shape: torch.Size, strategy: Strategy, group_size: int, block: tuple[int, int]
) -> tuple[int, int]:
    """Returns the (rows, columns) that share a scale.

    Raises:
        SetupError: They do not divide the matrix, or the strategy is unknown.
    """
    rows, columns = shape
    blocks = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, group_size), "block": block}
    if strategy not in blocks:
        raise SetupError(
            f"strategy={strategy!r} is not valid.",
            expected=", ".join(blocks),
            found=repr(strategy),
            fix="Use one of these values.",
        )
    found = blocks[strategy]
    if min(found) < 1 or rows % found[0] or columns % found[1]:
        raise SetupError(
            f"The {strategy} size does not divide the matrix.",
            expected=f"multiples of {found}",
            found=str(tuple(shape)),
            fix="Choose a group or block size that divides the matrix.",
        )
    return found


def _blocked(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = matrix.shape
    return matrix.reshape(rows // block[0], block[0], columns // block[1], block[1])
