"""Values of ggml's blocks of every type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hfq.formats.codecs.ggml.grid_blocks import GRID_BLOCKS
from hfq.formats.codecs.ggml.k_blocks import K_BLOCKS
from hfq.formats.codecs.ggml.small_blocks import SMALL_BLOCKS

__all__ = ["DECODERS", "decode_into"]

DECODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    **SMALL_BLOCKS,
    **K_BLOCKS,
    **GRID_BLOCKS,
}
"""The decoder of each type of blocks; number types have none."""


def decode_into(panel: torch.Tensor, rows: torch.Tensor, name: str, nbytes: int) -> None:
    """Writes the values of rows of blocks, bit-identical to ggml's.

    Args:
        panel: float32 [rows, columns], contiguous, overwritten.
        rows: uint8 [rows, bytes of a row], or [rows, columns] of a number type.
        name: The type in ggml.
        nbytes: Bytes of a block.
    """
    decode = DECODERS.get(name)
    if decode is None:
        panel.copy_(rows)
        return
    blocks = rows.reshape(-1, nbytes)
    decode(blocks, panel.view(blocks.shape[0], -1))
