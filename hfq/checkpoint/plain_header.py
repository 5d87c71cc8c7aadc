"""Headers in which nothing needs a closer look, read column by column.

Almost all headers are plain. For any other header the caller examines each tensor, and names the fault.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter

from hfq.tensor_spec import DTYPE_BITS, ByteRange, TensorInfo

__all__ = ["read_plain"]

_FIELDS = itemgetter("dtype", "shape", "data_offsets")
_STRINGS_OF_TENSOR = 5  # name, three keys, and dtype
_DTYPES = {dtype: dtype for dtype in DTYPE_BITS}  # one text for all tensors of a dtype
_MOST = 1 << 60
_NEGATIVE = re.compile(rb"[\[,:\s]-")


def read_plain(
    raw: bytes, file: str, data_start: int, most_rank: int, most_letters: int
) -> tuple[dict[str, TensorInfo], dict[str, str]] | None:
    """Returns the tensors and the metadata of a header; None if a check fails or is undecided.

    Args:
        raw: The JSON.
        file: The file.
        data_start: Offset of the first tensor in the file.
        most_rank: Most dimensions of a tensor.
        most_letters: Most letters of a name.
    """
    if b"\\" in raw or (b"-" in raw and _NEGATIVE.search(raw)):
        return None  # a number may be `-0`, or a text have another length than its bytes
    try:
        entries = json.loads(raw.decode("utf-8"))
        metadata = entries.pop("__metadata__", None)
        columns = list(zip(*map(_FIELDS, entries.values()), strict=True)) or [(), (), ()]
        if not _are_plain(entries, columns, metadata, most_rank, most_letters):
            return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    strings = _STRINGS_OF_TENSOR * len(entries) + (0 if metadata is None else 1 + 2 * len(metadata))
    if raw.count(b'"') != 2 * strings:
        return None  # a key stands twice
    return _tensors(entries, columns, file, data_start), metadata or {}


def _are_plain(
    entries: dict[str, dict],
    columns: Sequence[Sequence],
    metadata: dict[str, str] | None,
    most_rank: int,
    most_letters: int,
) -> bool:
    """Returns True if names, dtypes, shapes, and offsets are valid."""
    dtypes, shapes, offsets = columns
    if metadata is not None and not (type(metadata) is dict and _are(str, metadata.values())):
        return False
    if not entries:
        return True
    lengths, letters = set(map(len, entries)), "".join(entries)
    if not (
        min(lengths) > 0 and max(lengths) <= most_letters and letters.isprintable() and "/" not in letters
    ):
        return False
    if not (_are(dict, entries.values()) and set(map(len, entries.values())) == {3} and _are(str, dtypes)):
        return False
    if not (_DTYPES.keys() >= set(dtypes) and _are(list, shapes) and _are(list, offsets)):
        return False
    sizes, ends = list(chain.from_iterable(shapes)), list(chain.from_iterable(offsets))
    if not (_are(int, sizes) and _are(int, ends) and set(map(len, offsets)) == {2}):
        return False
    if max(map(len, shapes)) > most_rank or min(sizes, default=0) < 0:
        return False
    return all(
        0 <= begin <= end < _MOST
        and math.prod(shape) * DTYPE_BITS[dtype] == (end - begin) * 8
        and (begin < end or math.prod(filter(None, shape)) < _MOST)
        for dtype, shape, (begin, end) in zip(*columns, strict=True)
    )


def _are(kind: type, values: Iterable[object]) -> bool:
    return set(map(type, values)) <= {kind}


def _tensors(
    entries: dict[str, dict], columns: Sequence[Sequence], file: str, data_start: int
) -> dict[str, TensorInfo]:
    """Returns the tensors by name. Those of one shape share it."""
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    tensors = {}
    for name, dtype, shape, (begin, end) in zip(entries, *columns, strict=True):
        sizes = tuple(shape)
        sizes = shared.setdefault(sizes, sizes)
        source = ByteRange(file, data_start + begin, end - begin)
        tensors[name] = TensorInfo(name, _DTYPES[dtype], sizes, source)
    return tensors
