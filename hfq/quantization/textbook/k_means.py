"""Codebook quantization: each value becomes the index of its nearest entry in a small table.

The table is either fitted to the values (k-means: Han et al. 2016, arXiv 1510.00149, section 3), or fixed and
scaled by the largest magnitude of a block. Fixed tables are NF4, the quantiles of a normal distribution
(Dettmers et al. 2023, arXiv 2305.14314, appendix E), and 4-bit floats. The floats are E1M2, E2M1 (OCP MX 1.0,
table 5, and every vendor's FP4), and E3M0 (a sign and powers of two).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hfq.errors import SetupError
from hfq.formats.bitsandbytes import NF4_VALUES

__all__ = ["CODEBOOKS", "Codebook", "fixed", "kmeans"]


def _signed(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
    return (*(-value for value in reversed(magnitudes[1:])), *magnitudes)


CODEBOOKS: dict[str, tuple[float, ...]] = {
    "nf4": NF4_VALUES,
    "fp4_e1m2": _signed((0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5)),
    "fp4_e2m1": _signed((0, 0.5, 1, 1.5, 2, 3, 4, 6)),
    "fp4_e3m0": _signed((0, 0.25, 0.5, 1, 2, 4, 8, 16)),
}
"""Fixed tables by name, in increasing order. The two zeros of a float format are one entry."""


@dataclass(frozen=True)
class Codebook:
    """A quantized matrix.

    Attributes:
        indices: uint8 [rows, columns].
        table: float32 [entries], or [rows, entries] with one table per row.
        scale: float32 [rows, columns / block_size], multiplied with the entries; or None.
    """

    indices: torch.Tensor
    table: torch.Tensor
    scale: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """Returns the values, float32 [rows, columns]."""
        index = self.indices.to(torch.int64)
        values = self.table[index] if self.table.dim() == 1 else self.table.gather(1, index)
        if self.scale is None:
            return values
        return (values.unflatten(1, (self.scale.shape[1], -1)) * self.scale[:, :, None]).flatten(1)


def fixed(weight: torch.Tensor, name: str, block_size: int = 32) -> Codebook:
    """Rounds to the nearest entry of a fixed table, scaled per block.

    The scale maps each block's largest magnitude to the largest magnitude of the table.

    Args:
        weight: [rows, columns], floats.
        name: Key of `CODEBOOKS`.
        block_size: Number of columns in a row that share a scale.

    Raises:
        SetupError: The table does not exist, or block_size does not divide the columns.
    """
    if name not in CODEBOOKS or block_size < 1 or weight.shape[1] % block_size:
        raise SetupError(
            "The matrix cannot be quantized with this table.",
            expected=f"a table {', '.join(CODEBOOKS)}, and columns divisible by block_size",
            found=f"{name!r}, {weight.shape[1]} columns, block_size={block_size}",
            fix="Use one of these tables, and a block_size that divides the columns.",
        )
    table = torch.tensor(CODEBOOKS[name], dtype=torch.float32)
    blocked = weight.to(torch.float32).unflatten(1, (-1, block_size))
    scale = blocked.abs().amax(2) / table.abs().max()
    scale = torch.where(scale == 0, 1, scale)
    return Codebook(_nearest((blocked / scale[:, :, None]).flatten(1), table), table, scale)


def kmeans(weight: torch.Tensor, num_bits: int = 4, by_row: bool = False, steps: int = 50) -> Codebook:
    """Fits a table of `2**num_bits` entries by Lloyd's algorithm.

    The initial entries are evenly spaced over the range.

    Args:
        weight: [rows, columns], floats.
        num_bits: 1 to 8.
        by_row: True if each row gets its own table.
        steps: Most iterations. The algorithm stops early when no index changes.
    """
    rows = weight.to(torch.float32) if by_row else weight.to(torch.float32).reshape(1, -1)
    spread = torch.linspace(0, 1, 1 << num_bits)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    table = low + (high - low) * spread
    index = _nearest_by_row(rows, table)
    for _ in range(steps):
        counts = torch.zeros_like(table).scatter_add_(1, index, torch.ones_like(rows))
        sums = torch.zeros_like(table).scatter_add_(1, index, rows)
        table = torch.where(counts > 0, sums / counts.clamp(min=1), table).sort(1)[0]
        previous, index = index, _nearest_by_row(rows, table)
        if torch.equal(previous, index):
            break
    return Codebook(index.to(torch.uint8).reshape(weight.shape), table if by_row else table[0])


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Returns the index of the nearest entry, or the lower one of two equally near."""
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def _nearest_by_row(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted((table[:, 1:] + table[:, :-1]) / 2, rows.contiguous())
