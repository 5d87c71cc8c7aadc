"""Parts of blocks: scales, and codes of a few bits."""

from __future__ import annotations

import torch

__all__ = ["halves", "nibbles_into", "words"]


def halves(blocks: torch.Tensor, start: int, count: int = 1) -> torch.Tensor:
    """Returns float16 numbers of each block as float32.

    Args:
        blocks: uint8 [n, bytes].
        start: The first byte.
        count: The numbers.

    Returns:
        float32 [n, count].
    """
    return _copied(blocks, start, 2 * count).view(torch.float16).to(torch.float32)


def words(blocks: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns integers of each block.

    Args:
        blocks: uint8 [n, bytes].
        start: The first byte.
        count: The integers.
        dtype: Their dtype, int16 or int32; bits above are those of the sign.

    Returns:
        int32 [n, count].
    """
    return _copied(blocks, start, dtype.itemsize * count).view(dtype).to(torch.int32)


def nibbles_into(values: torch.Tensor, packed: torch.Tensor) -> None:
    """Writes 4-bit codes as numbers, the lower halves of all bytes first.

    Args:
        values: float32 [..., 2 * bytes].
        packed: uint8 [..., bytes].
    """
    low, high = values.unflatten(-1, (2, packed.shape[-1])).unbind(-2)
    low.copy_(packed & 15)
    high.copy_(packed >> 4)


def _copied(blocks: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Returns some bytes of each block in memory of their own, since they may not be aligned."""
    return blocks[:, start : start + nbytes].clone(memory_format=torch.contiguous_format)
