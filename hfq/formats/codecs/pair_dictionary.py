"""The dictionary of QMoE: short sequences of ternary symbols, two of them in a pair.

A pair is a number a + 3 b, where symbol a is that of the even column. Symbols are independent, and 0 has the
probability 0.885. The dictionary has the 65,536 most probable sequences of 1 to 14 pairs, so that the length
of a code hardly depends on the weights. It is the same for every file, and no file stores it.

Source: `sub1.py` of QMoE (arXiv 2310.16795, section 4.2). Products are in its order, since the rounding of a
product decides between sequences of nearly equal probability.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
from collections.abc import Sequence

import numpy as np
import torch

from hfq.errors import SetupError
from hfq.formats.codecs.constants import table

__all__ = [
    "ENTRIES",
    "LONGEST",
    "ZERO_PROBABILITY",
    "decode_rows",
    "encode_rows",
    "entry_words",
]

ENTRIES = 1 << 16
LONGEST = 14
ZERO_PROBABILITY = 0.885

_PAIRS = 9
_HALF = 7
"""Pairs in a word of an entry."""

_SHA256 = "c09862c453fe122634070a475357ff81a679aff65829d84a56f806c02a54ed45"
"""Digest of `entry_words`, in little-endian order."""


def entry_words() -> np.ndarray:
    """Returns the entries of the dictionary, uint32 [65536, 2].

    Both words of an entry have its length in pairs in their lowest four bits. From bit 4, word h has the
    symbols of pairs 7 h to 7 h + 6, with two bits for each, a before b.
    """
    return _words(_entries())


@functools.cache
def _entries() -> tuple[bytes, ...]:
    """Returns the pairs of each entry, by code.

    Raises:
        SetupError: The arithmetic of this machine makes another dictionary.
    """
    rest = (1 - ZERO_PROBABILITY) / 2
    single = (ZERO_PROBABILITY, rest, rest)
    pairs = [1.0 * first * second for first in single for second in single]
    tails = [bytes([pair]) for pair in range(_PAIRS)]
    heap, found = [(-1.0, b"")], list[bytes]()
    while len(found) < ENTRIES:
        negative, entry = heapq.heappop(heap)
        if entry:
            found.append(entry)
        if len(entry) < LONGEST:
            for pair, tail in enumerate(tails):
                heapq.heappush(heap, (negative * pairs[pair], entry + tail))
    digest = hashlib.sha256(_words(found).astype("<u4").tobytes()).hexdigest()
    if digest != _SHA256:
        raise SetupError(
            "The dictionary of QMoE is another one on this machine. Nothing was decoded.",
            expected=f"SHA-256 {_SHA256}",
            found=digest,
            fix="Run Python on a processor with doubles of IEEE 754.",
        )
    return tuple(found)


def _words(entries: Sequence[bytes]) -> np.ndarray:
    """Returns the result of `entry_words` for these entries."""
    padded = b"".join(entry.ljust(LONGEST, b"\0") for entry in entries)
    pairs = np.frombuffer(padded, np.uint8).reshape(-1, 2, _HALF).astype(np.uint32)
    symbols = (pairs % 3 | pairs // 3 << 2) << np.arange(4, 32, 4, dtype=np.uint32)
    lengths = np.fromiter(map(len, entries), np.uint32)
    return np.bitwise_or.reduce(symbols, 2) | lengths[:, None]


def _lengths() -> torch.Tensor:
    return torch.tensor([len(entry) for entry in _entries()], dtype=torch.uint8)


def _symbols() -> torch.Tensor:
    """Returns the symbols of each entry, uint8 [65536, 28]."""
    words = torch.from_numpy(entry_words().astype(np.int64))
    shifts = torch.arange(2 * _HALF) * 2 + 4
    return (words[:, :, None] >> shifts & 3).flatten(1).to(torch.uint8)


def _children() -> torch.Tensor:
    """Returns the entry that one more pair makes of an entry, int32 [65537, 9]; -1 for none.

    The last row is that of the empty sequence.
    """
    codes = {entry: code for code, entry in enumerate(_entries())}
    found = torch.full((ENTRIES + 1, _PAIRS), -1, dtype=torch.int32)
    rows = [codes.get(entry[:-1], ENTRIES) for entry in _entries()]
    found[rows, [entry[-1] for entry in _entries()]] = torch.arange(ENTRIES, dtype=torch.int32)
    return found


def decode_rows(codes: torch.Tensor, offsets: torch.Tensor, columns: int) -> torch.Tensor | None:
    """Returns the symbols of rows, uint8 [rows, columns].

    Args:
        codes: int16 [codes], unsigned numbers stored as signed ones.
        offsets: int64 [rows + 1], where each row starts in `codes`, and the end; ascending and within them.
        columns: The number of symbols of a row.

    Returns:
        None if the codes of a row make another number of symbols.
    """
    device, pairs = codes.device, -(-columns // 2)
    unsigned = codes.to(torch.int64) & ENTRIES - 1
    lengths = table("qmoe lengths", _lengths, device)[unsigned]
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
    if not bool((ends[offsets].diff() == pairs).all()):
        return None
    symbols = table("qmoe symbols", _symbols, device)[unsigned]
    is_used = torch.arange(2 * LONGEST, device=device) < 2 * lengths[:, None]
    return symbols[is_used].view(-1, 2 * pairs)[:, :columns]


def encode_rows(symbols: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes rows by the longest entry that the next pairs start with.

    Args:
        symbols: Integers 0, 1, or 2, [rows, columns].

    Returns:
        The codes, int16 [codes], and the offsets of the rows, int32 [rows + 1].
    """
    children = table("qmoe children", _children, torch.device("cpu"))
    padded = torch.nn.functional.pad(symbols.to(torch.int64), (0, symbols.shape[1] % 2))
    pairs = (padded[:, ::2] + 3 * padded[:, 1::2]).t().contiguous()
    found = torch.full((symbols.shape[0], len(pairs) + 1), -1, dtype=torch.int32)
    entry = torch.full((symbols.shape[0],), ENTRIES, dtype=torch.int32)
    for column, pair in enumerate(pairs):
        longer = children[entry, pair]
        ends = longer < 0
        found[:, column] = torch.where(ends, entry, -1)
        entry = torch.where(ends, children[ENTRIES, pair], longer)
    found[:, -1] = entry
    is_code = found >= 0
    offsets = torch.nn.functional.pad(is_code.sum(1).cumsum(0), (1, 0))
    return found[is_code].to(torch.int16), offsets.to(torch.int32)
