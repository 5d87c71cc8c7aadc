"""Values of unquantized tensors, in the model and as a GGUF file stores them."""

from __future__ import annotations

import torch

from hfq.formats.gguf.block_rows import positions
from hfq.tensor_spec import Blocks

__all__ = ["model_values", "stored_values"]


def model_values(stored: torch.Tensor, blocks: Blocks | None) -> torch.Tensor:
    """Returns the values of the model for a stored tensor."""
    value = stored
    if blocks is None:
        return value
    if blocks.rows is not None:
        value = value.index_select(0, positions(blocks.rows, value.device))
    if blocks.function == "plus one":
        value = value.to(torch.float32) - 1
    if blocks.function == "minus exponential":
        value = (-value.to(torch.float32)).log()
    return value


def stored_values(value: torch.Tensor, blocks: Blocks | None) -> torch.Tensor:
    """Returns values of the model as a file stores them, as the inverse of `model_values`.

    Rows may also be rows of blocks.
    """
    if blocks is None:
        return value
    if blocks.function == "plus one":
        value = value.to(torch.float32) + 1
    if blocks.function == "minus exponential":
        value = -value.to(torch.float32).exp()
    if blocks.rows is not None:
        places = positions(blocks.rows, value.device)
        value = torch.empty_like(value).index_copy_(0, places, value)
    return value
