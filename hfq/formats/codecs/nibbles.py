"""Lookup of the values of 4-bit codes, stored eight per word or two per byte."""

from __future__ import annotations

import torch

__all__ = ["look_up_nibbles"]


def look_up_nibbles(
    panel: torch.Tensor, packed: torch.Tensor, values: torch.Tensor, *, high_first: bool = False
) -> None:
    """Writes the value of each code.

    The two codes of a byte are looked up together as one 64-bit number. torch copies single elements faster
    than rows of two.

    Args:
        panel: float32 [rows, columns], or [columns], contiguous; overwritten.
        packed: uint8, or little-endian words, [rows, n], or [n]; codes beyond the columns are ignored.
        values: float32 [16], the value of each code.
        high_first: True if the upper half of a byte is the first of its codes.
    """
    by_byte = values.new_empty(16, 16, 2)
    by_byte[..., int(high_first)], by_byte[..., int(not high_first)] = values, values[:, None]
    pairs = by_byte.view(torch.int64).flatten()
    places = packed.contiguous().flatten().view(torch.uint8).to(torch.int32)
    if panel.numel() == 2 * places.numel() and panel.storage_offset() % 2 == 0:
        torch.index_select(pairs, 0, places, out=panel.view(-1).view(torch.int64))
        return
    found = torch.index_select(pairs, 0, places).view(torch.float32).view(*packed.shape[:-1], -1)
    panel.copy_(found[..., : panel.shape[-1]])
