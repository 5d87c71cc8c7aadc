"""Order of AWQ's codes within words: gemm's columns, and gemv_fast's rows of four."""

from __future__ import annotations

import torch

__all__ = ["deinterleave", "interleave", "order_columns", "reorder_columns"]

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def order_columns(words: torch.Tensor) -> torch.Tensor:
    """Reorders gemm's words so that their columns are sequential.

    The codes of the upper half are interleaved with those of the lower half. The result is int32 [rows,
    words].
    """
    halves = [_spread(words & 0xFFFF), _spread(words >> 16 & 0xFFFF)]
    return halves[0].bitwise_or_(halves[1].bitwise_left_shift_(4))


def reorder_columns(codes: torch.Tensor) -> torch.Tensor:
    """Returns codes [rows, columns] in the order in which gemm packs them."""
    return codes.unflatten(1, (-1, 8))[:, :, list(_ORDER)].flatten(1)


def _spread(codes: torch.Tensor) -> torch.Tensor:
    """Returns the four codes of 16 bits, each in the lower half of a byte; overwrites `codes`."""
    codes.bitwise_or_(codes << 8).bitwise_and_(0x00FF00FF)
    return codes.bitwise_or_(codes << 4).bitwise_and_(0x0F0F0F0F)


def deinterleave(words: torch.Tensor) -> torch.Tensor:
    """Returns gemv_fast's words, int16 [out / 4, in], as codes [out, in]."""
    quads, in_features = words.shape
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
    rows = ((words.to(torch.int32)[:, :, None] >> shifts) & 15).view(quads, in_features // 64, 4, 64)
    codes = rows.transpose(1, 2).reshape(4 * quads, in_features // 32, 4, 2, 4)
    codes = codes.transpose(3, 4).reshape(4 * quads, in_features // 32, 4, 4, 2)
    return codes.transpose(2, 3).reshape(4 * quads, in_features)


def interleave(codes: torch.Tensor) -> torch.Tensor:
    """Returns the inverse of `deinterleave`."""
    out_features, in_features = codes.shape
    codes = codes.view(out_features, in_features // 32, 4, 4, 2).transpose(2, 3)
    codes = (
        codes.reshape(out_features, in_features // 32, 4, 4, 2)
        .transpose(3, 4)
        .reshape(out_features // 4, 4, -1, 64)
    )
    nibbles = codes.transpose(1, 2).reshape(out_features // 4, in_features // 64, 64, 4)
    words = (nibbles << torch.tensor([0, 4, 8, 12], dtype=torch.int32)).sum(3)
    return (
        torch.where(words >= 1 << 15, words - (1 << 16), words)
        .view(out_features // 4, in_features)
        .to(torch.int16)
    )
