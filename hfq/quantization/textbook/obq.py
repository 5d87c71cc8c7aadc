"""Optimal Brain Quantization: exact greedy quantization of one row at a time.

GPTQ approximates this method. Frantar & Alistarh 2022, arXiv 2208.11580, algorithm 3. Each step rounds the
remaining weight whose rounding costs least, and adjusts the others to compensate. The cost of a row is cubic
in its length, so this is for small layers only.
"""

from __future__ import annotations

import torch

__all__ = ["obq"]


def obq(
    weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of a small layer on a given grid with one scale and zero point per row.

    Args:
        weight: [out, in], floats.
        hessian: [in, in], positive definite.
        scales: [out].
        zeros: [out].
        top: Largest code.

    Returns:
        Codes in [0, top], int64 [out, in], with weight = scale * (code - zero); and the order in which the
            channels of each row were rounded, int64 [out, in].
    """
    inverse = torch.linalg.inv(hessian.double())
    rows = [
        _row(row.double(), inverse, float(scale), float(zero), top)
        for row, scale, zero in zip(weight, scales, zeros, strict=True)
    ]
    return torch.stack([codes for codes, _ in rows]), torch.tensor([order for _, order in rows])


def _row(
    row: torch.Tensor, inverse: torch.Tensor, scale: float, zero: float, top: int
) -> tuple[torch.Tensor, list[int]]:
    row, inverse = row.clone(), inverse.clone()
    codes = torch.empty(len(row), dtype=torch.int64)
    remaining, order = list(range(len(row))), []
    while remaining:
        index = torch.tensor(remaining)
        nearest = (row[index] / scale + zero).round().clamp(0, top)
        errors = row[index] - (nearest - zero) * scale
        place = int((errors.square() / inverse[index, index]).argmin())
        channel = remaining.pop(place)
        order.append(channel)
        codes[channel] = int(nearest[place])
        column = inverse[:, channel] / inverse[channel, channel]
        row -= errors[place] * column
        inverse -= column[:, None] * inverse[channel][None]
    return codes, order
