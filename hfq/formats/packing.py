"""Packed integers: little-endian bit streams in int32 words, as GPTQ and compressed-tensors lay them out."""

from __future__ import annotations

import torch

__all__ = ["pack_stream", "unpack_stream"]


def unpack_stream(words: torch.Tensor, num_bits: int, count: int) -> torch.Tensor:
    """Unpacks along dim 0: code `i` is bits `[i * num_bits, (i + 1) * num_bits)` of the words' bit stream.

    Args:
        words: int32 [W, n].
        num_bits: 1 to 8.
        count: The codes to take; at most `W * 32 // num_bits`.

    Returns:
        int32 [count, n], values in `[0, 2**num_bits)`.
    """
    mask = (1 << num_bits) - 1
    if 32 % num_bits == 0:
        shifts = torch.arange(0, 32, num_bits, dtype=torch.int32, device=words.device)
        codes = (words[:, None, :] >> shifts[None, :, None]) & mask
        return codes.flatten(0, 1)[:count]
    bits = torch.arange(count, device=words.device) * num_bits
    word, shift = bits // 32, (bits % 32).to(torch.int32)
    low_mask = ((1 << (32 - shift).clamp(max=num_bits)) - 1).to(torch.int32)[:, None]
    low = (words[word] >> shift[:, None]) & low_mask
    straddling = shift + num_bits > 32
    following = words[(word + 1).clamp(max=words.shape[0] - 1)]
    high = (following << (32 - shift).clamp(max=31)[:, None]) & mask
    return torch.where(straddling[:, None], low | high, low)


def pack_stream(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The inverse of `unpack_stream`.

    Args:
        codes: Integers [count, n] in `[0, 2**num_bits)`.
        num_bits: 1 to 8.

    Returns:
        int32 [ceil(count * num_bits / 32), n].
    """
    count, columns = codes.shape
    words = torch.zeros(-(-count * num_bits // 32) + 1, columns, dtype=torch.int64, device=codes.device)
    bits = torch.arange(count, device=codes.device) * num_bits
    wide = codes.to(torch.int64) << (bits % 32)[:, None]
    words.index_add_(0, bits // 32, wide & 0xFFFFFFFF)
    words.index_add_(0, bits // 32 + 1, wide >> 32)
    return torch.where(words >= 1 << 31, words - (1 << 32), words)[:-1].to(torch.int32)
