"""Codebook quantization: each value becomes the index of its nearest entry in a small table.

The table is fitted to the values (k-means: Han et al. 2016, arXiv 1510.00149, section 3), or fixed and scaled
by the largest magnitude of a block: NF4, the quantiles of a normal distribution (Dettmers et al. 2023, arXiv
2305.14314, appendix E), and the four-bit floats E1M2, E2M1 (OCP MX 1.0, table 5, and FP4 of every maker) and
E3M0 (a sign and powers of two).
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
"""The fixed tables by name, in increasing order; the two zeros of a float format are one entry."""


@dataclass(frozen=True)
class Codebook:
    """A quantized matrix.

    Attributes:
        indices: uint8 [rows, columns].
        table: float32 [entries], or [rows, entries] where each row has one of its own.
        scale: float32 [rows, columns / block_size] that entries are multiplied by, or None.
    """

    indices: torch.Tensor
    table: torch.Tensor
    scale: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """float32 [rows, columns]."""
        index = self.indices.to(torch.int64)
        values = self.table[index] if self.table.dim() == 1 else self.table.gather(1, index)
        if self.scale is None:
            return values
        return (values.unflatten(1, (self.scale.shape[1], -1)) * self.scale[:, :, None]).flatten(1)


def fixed(weight: torch.Tensor, name: str, block_size: int = 32) -> Codebook:
    """Rounds to the nearest entry of a fixed table, scaled so that each block's largest magnitude meets the
    table's.

    Args:
        weight: [rows, columns], floats.
        name: One of `CODEBOOKS`.
        block_size: Columns of a row that share a scale.

    Raises:
        SetupError: There is no such table, or blocks do not divide the columns.
    """
    if name not in CODEBOOKS or block_size < 1 or weight.shape[1] % block_size:
        raise SetupError(
            "A matrix cannot be quantized by this table.",
            expected=f"{', '.join(CODEBOOKS)}; columns divisible by block_size",
            found=f"{name!r}, {weight.shape[1]} columns, block_size={block_size}",
            fix="correct the name or the size of blocks",
        )
    table = torch.tensor(CODEBOOKS[name], dtype=torch.float32)
    blocked = weight.to(torch.float32).unflatten(1, (-1, block_size))
    scale = blocked.abs().amax(2) / table.abs().max()
    scale = torch.where(scale == 0, 1, scale)
    return Codebook(_nearest((blocked / scale[:, :, None]).flatten(1), table), table, scale)


def kmeans(weight: torch.Tensor, num_bits: int = 4, by_row: bool = False, steps: int = 50) -> Codebook:
    """Fits a table of `2**num_bits` entries by Lloyd's algorithm, from entries that are evenly spaced over
    the range.

    Args:
        weight: [rows, columns], floats.
        num_bits: 1 to 8.
        by_row: Whether each row has a table of its own.
        steps: The most iterations; it ends where nothing changes.
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
    """The index of the nearest entry; of two that are equally near, the lower."""
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def _nearest_by_row(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted((table[:, 1:] + table[:, :-1]) / 2, rows.contiguous())
