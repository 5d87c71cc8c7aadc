"""Bit packing of integers into int32 words, as in GPTQ and compressed-tensors.

The words form a little-endian bit stream.
"""

from __future__ import annotations

import torch

from hfq.formats.codecs.nibbles import look_up_nibbles

__all__ = [
    "pack_planes",
    "pack_stream",
    "pack_words",
    "unpack_planes",
    "unpack_rows",
    "unpack_stream",
    "unpack_words",
]

_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""The widths of the bit planes of a code, the lowest first."""

_PACKED_AT_ONCE = 1 << 20
"""The number of codes that are packed together in int64."""


def unpack_stream(words: torch.Tensor, num_bits: int, count: int) -> torch.Tensor:
    """Unpacks a bit stream along dim 0.

    Code `i` is bits `[i * num_bits, (i + 1) * num_bits)` of the bit stream.

    Args:
        words: int32 [W, n].
        num_bits: 1 to 8.
        count: The number of codes to unpack; at most `W * 32 // num_bits`.

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
    """Packs codes along dim 0, as the inverse of `unpack_stream`.

    Args:
        codes: Integers [count, n] in `[0, 2**num_bits)`.
        num_bits: 1 to 8.

    Returns:
        int32 [ceil(count * num_bits / 32), n].
    """
    count, columns = codes.shape
    if 32 % num_bits == 0:
        share = 32 // num_bits
        packed = torch.zeros(-(-count // share), columns, dtype=torch.int32, device=codes.device)
        for place in range(min(share, count)):
            part = codes[place::share].to(torch.int32, copy=True)
            packed[: len(part)].bitwise_or_(part.bitwise_left_shift_(place * num_bits))
        return packed
    if codes.numel() > _PACKED_AT_ONCE:
        parts = codes.split(max(_PACKED_AT_ONCE // max(count, 1), 1), dim=1)
        return torch.cat([pack_stream(part, num_bits) for part in parts], dim=1)
    words = torch.zeros(-(-count * num_bits // 32) + 1, columns, dtype=torch.int64, device=codes.device)
    bits = torch.arange(count, device=codes.device) * num_bits
    wide = codes.to(torch.int64) << (bits % 32)[:, None]
    words.index_add_(0, bits // 32, wide & 0xFFFFFFFF)
    words.index_add_(0, bits // 32 + 1, wide >> 32)
    return _signed(words)[:-1]


def unpack_words(words: torch.Tensor, num_bits: int, count: int) -> torch.Tensor:
    """Unpacks along dim 0 like `unpack_stream`, if no code straddles two words.

    Each word holds `32 // num_bits` codes. Its remaining bits are unused.
    """
    shifts = torch.arange(32 // num_bits, dtype=torch.int32, device=words.device) * num_bits
    codes = (words[:, None, :] >> shifts[None, :, None]) & ((1 << num_bits) - 1)
    return codes.flatten(0, 1)[:count]


def pack_words(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Packs codes along dim 0, as the inverse of `unpack_words`."""
    share = 32 // num_bits
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, 0, 0, -codes.shape[0] % share))
    shifts = torch.arange(share, device=codes.device) * num_bits
    return _signed((padded.unflatten(0, (-1, share)) << shifts[None, :, None]).sum(1))


def unpack_rows(
    panel: torch.Tensor, words: torch.Tensor, num_bits: int, is_straddling: bool, offset: int
) -> None:
    """Writes the codes of rows, minus an offset, as floats.

    Args:
        panel: float32 [rows, count], contiguous; overwritten.
        words: int32 [rows, W], in the layout of `unpack_stream` or `unpack_words` along dim 1.
        num_bits: 1 to 8.
        is_straddling: True if codes straddle words, as for `unpack_stream`.
        offset: The number that is subtracted from each code.
    """
    count = panel.shape[1]
    if num_bits == 4:
        look_up_nibbles(panel, words, torch.arange(16.0, device=panel.device) - offset)
    elif num_bits == 8:
        panel.copy_(words.view(torch.uint8)[:, :count]).sub_(offset)
    else:
        unpack = unpack_stream if is_straddling else unpack_words
        torch.sub(unpack(words.t(), num_bits, count).t(), offset, out=panel)


def unpack_planes(words: torch.Tensor, num_bits: int, count: int) -> torch.Tensor:
    """Unpacks along dim 0 like `unpack_stream`, for gptqmodel's planar layout (`gptq_p`).

    32 codes occupy `num_bits` words: first the words of the low plane, then those of the higher planes. A
    plane of width w holds w bits of each code, and each of its words holds 32 / w codes.

    Args:
        words: int32 [W, n], W a multiple of `num_bits`.
        num_bits: 2 to 8.
        count: The number of codes to unpack, at most `W * 32 // num_bits`.
    """
    blocks = words.unflatten(0, (-1, num_bits))
    codes = torch.zeros(blocks.shape[0], 32, words.shape[1], dtype=torch.int32, device=words.device)
    first = offset = 0
    for width in _PLANES[num_bits]:
        shifts = torch.arange(0, 32, width, dtype=torch.int32, device=words.device)
        plane = (blocks[:, first : first + width, None] >> shifts[:, None]) & ((1 << width) - 1)
        codes |= plane.flatten(1, 2) << offset
        first, offset = first + width, offset + width
    return codes.flatten(0, 1)[:count]


def pack_planes(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Packs a multiple of 32 codes along dim 0, as the inverse of `unpack_planes`."""
    blocks = codes.to(torch.int64).unflatten(0, (-1, 32))
    words, offset = [], 0
    for width in _PLANES[num_bits]:
        shifts = torch.arange(0, 32, width, device=codes.device)
        plane = (blocks >> offset) & ((1 << width) - 1)
        words.append((plane.unflatten(1, (width, -1)) << shifts[:, None]).sum(2))
        offset += width
    return _signed(torch.cat(words, 1).flatten(0, 1))


def _signed(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
