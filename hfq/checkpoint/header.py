"""Reads and validates the header of a safetensors file, with hard limits.

Each check raises an error that names the file and the tensor (format:
https://github.com/huggingface/safetensors#format):

1. the file holds the 8 length bytes and the header they promise, within `HeaderLimits`
2. the header is one UTF-8 JSON object that starts with `{`, without a duplicate key
3. `__metadata__` maps strings to strings
4. every tensor has exactly `dtype`, `shape`, and `data_offsets`; a known dtype; a shape of non-negative
   integers within limits
5. names are printable, bounded in length, and are no paths
6. each tensor's bytes equal dtype × shape
7. tensors neither overlap nor leave holes, and end exactly where the file ends
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from typing import NoReturn, Protocol

from hfq.checkpoint.plain_header import read_plain
from hfq.checkpoint.small_file import open_regular
from hfq.errors import CheckpointError, error_of_limit
from hfq.tensor_spec import DTYPE_BITS, ByteRange, TensorInfo

__all__ = ["Header", "HeaderLimits", "parse_header", "read_header", "read_raw"]

_MAX_ELEMENTS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """Limits on the size of a header."""

    header_nbytes: int = 32 << 20
    tensors: int = 500_000
    rank: int = 8
    name_length: int = 512


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header: tensors by name, metadata, and the identity of its file."""

    file: str
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    identity: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        return self.identity[1]


class Readable(Protocol):
    """An object that returns its bytes in order, as a file does."""

    def read(self, nbytes: int, /) -> bytes: ...


class _Duplicate(Exception):
    pass


def read_header(file: str | os.PathLike, limits: HeaderLimits = HeaderLimits()) -> Header:
    """Reads and validates the header of one safetensors file.

    Args:
        file: The file.
        limits: Limits on the header.

    Raises:
        CheckpointError: The file cannot be read, or a check fails; names the file and the tensor.
    """
    file = os.fspath(file)
    try:
        with open_regular(file) as stream:
            status = os.fstat(stream.fileno())
            raw = read_raw(stream, file, status.st_size, limits)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        raise error_of_limit(error, file) or CheckpointError(
            "A checkpoint file cannot be read.", file=file, found=found, fix="Check the path."
        ) from error
    return parse_header(raw, file, (status.st_ino, status.st_size, status.st_mtime_ns), limits)


def parse_header(
    raw: bytes,
    file: str,
    identity: tuple[int, int, int],
    limits: HeaderLimits = HeaderLimits(),
) -> Header:
    """Validates the JSON of a header for a file of this identity: (inode, size, mtime in ns).

    Raises:
        CheckpointError: As `read_header`.
    """
    braces = raw.count(b"{")
    if braces > 2 * limits.tensors + 2:  # before parsing, which takes many times the memory of the bytes
        raise _too_many(file, limits, f"{braces} objects")
    data_start = 8 + len(raw)
    plain = read_plain(raw, file, data_start, limits.rank, limits.name_length)
    tensors, metadata = plain or _examine(raw, file, data_start, limits)
    if len(tensors) > limits.tensors:
        raise _too_many(file, limits, len(tensors))
    _check_coverage(tensors, file, data_start, identity[1])
    return Header(file, tensors, metadata, data_start, identity)


def _examine(
    raw: bytes, file: str, data_start: int, limits: HeaderLimits
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Returns the tensors and the metadata of a header, each checked by itself.

    Raises:
        CheckpointError: A check fails.
    """
    entries = _parse(raw, file)
    metadata = _metadata(entries.pop("__metadata__", {}), file)
    if len(entries) > limits.tensors:
        raise _too_many(file, limits, len(entries))
    tensors = {name: _tensor(name, entry, file, data_start, limits) for name, entry in entries.items()}
    return tensors, metadata


def _too_many(file: str, limits: HeaderLimits, found: object) -> CheckpointError:
    return _damaged(file, "it holds too many tensors", f"at most {limits.tensors}", found)


def _damaged(
    file: str, what: str, expected: object = None, found: object = None, tensor: str | None = None
) -> CheckpointError:
    return CheckpointError(
        f"The safetensors file is damaged: {what}.",
        file=file,
        tensor=tensor,
        expected=expected,
        found=found,
        fix="Download this file again.",
    )


def read_raw(stream: Readable, file: str, size: int, limits: HeaderLimits = HeaderLimits()) -> bytes:
    """Returns the JSON of a header from the start of a stream, and reads no further.

    Args:
        stream: The file, or an object that returns its bytes.
        file: Its name in messages.
        size: The bytes of the whole file.
        limits: Limits on the header.

    Raises:
        CheckpointError: The file ends inside its header, or the header's length is out of bounds.
    """
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise _damaged(file, "it is too short to hold a header", "at least 8 bytes", f"{size} bytes")
    (length,) = struct.unpack("<Q", prefix)
    if length > limits.header_nbytes or length < 2:
        hint = (
            "; the file looks like a pickle or a zip archive, which hfq never opens"
            if _is_foreign(prefix)
            else _TEXTS.get(prefix[:8], "")
        )
        raise _damaged(
            file, f"its header length is out of bounds{hint}", f"2 to {limits.header_nbytes} bytes", length
        )
    if 8 + length > size:
        raise _damaged(file, "it ends inside its header", f"{8 + length} bytes", f"{size} bytes")
    raw = stream.read(length)
    if len(raw) != length or raw[:1] != b"{":
        raise _damaged(file, "its header is not a JSON object", "{…}", repr(raw[:16]))
    return raw


_TEXTS = {
    b"version ": "; the file looks like a pointer of Git LFS, whose content was not downloaded",
    **dict.fromkeys((b"<!DOCTYP", b"<!doctyp"), "; the file looks like a web page"),
}
"""What a file is that starts with these bytes of text."""


def _is_foreign(prefix: bytes) -> bool:
    return prefix[:2] == b"PK" or prefix[:1] == b"\x80"


def _parse(raw: bytes, file: str) -> dict:
    def unique(pairs: list[tuple[str, object]]) -> dict:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            seen: set[str] = set()
            raise _Duplicate(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
        return entries

    try:
        return json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_refuse, parse_int=_integer
        )
    except _Duplicate as error:
        raise _damaged(file, "a key stands twice in its header", found=repr(str(error))) from None
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "its header is not valid JSON", found=error) from None


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _integer(text: str) -> int:
    return _refuse(text) if text == "-0" else int(text)


def _metadata(value: object, file: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _damaged(file, "__metadata__ must map strings to strings", found=repr(value)[:80])
    try:
        "".join([*value, *value.values()]).encode()
    except UnicodeEncodeError:
        raise _damaged(file, "__metadata__ holds half of a character", found=ascii(value)[:80]) from None
    return value


def _tensor(name: str, entry: object, file: str, data_start: int, limits: HeaderLimits) -> TensorInfo:
    if not name or len(name) > limits.name_length or not name.isprintable() or "/" in name or "\\" in name:
        raise _damaged(
            file,
            "a tensor has an unacceptable name",
            f"1 to {limits.name_length} printable, no slash",
            repr(name[:80]),
        )
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(
            file, "a tensor's entry is malformed", "dtype, shape, data_offsets", repr(entry)[:80], name
        )
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _damaged(file, "a tensor has an unknown dtype", ", ".join(DTYPE_BITS), repr(dtype)[:40], name)
    if not _is_sizes(shape) or len(shape) > limits.rank:
        raise _damaged(
            file, "a tensor has an unacceptable shape", f"up to {limits.rank} sizes", repr(shape)[:80], name
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(
            file, "a tensor has unacceptable data_offsets", "[begin, end]", repr(offsets)[:80], name
        )
    numel, nbytes = math.prod(shape), offsets[1] - offsets[0]
    if numel * DTYPE_BITS[dtype] % 8:
        raise _damaged(
            file,
            "a tensor does not end at a whole byte",
            f"a multiple of {8 // DTYPE_BITS[dtype]} elements",
            f"{numel} elements of {dtype} {shape}",
            name,
        )
    if math.prod(filter(None, shape)) > _MAX_ELEMENTS or numel * DTYPE_BITS[dtype] != nbytes * 8:
        expected = f"{numel * DTYPE_BITS[dtype] // 8} bytes for {dtype} {shape}"
        raise _damaged(
            file, "a tensor's bytes do not match its dtype and shape", expected, f"{nbytes} bytes", name
        )
    return TensorInfo(name, dtype, tuple(shape), ByteRange(file, data_start + offsets[0], nbytes))


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in value)


def _check_coverage(tensors: dict[str, TensorInfo], file: str, data_start: int, size: int) -> None:
    end = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.range.offset, info.nbytes)):
        if info.range.offset != end:
            fault = "overlap" if info.range.offset < end else "leave a hole"
            raise _damaged(
                file, f"its tensors {fault}", f"byte {end}", f"byte {info.range.offset}", info.name
            )
        end += info.nbytes
    if end != size:
        fault = (
            f"it is truncated by {end - size} bytes"
            if end > size
            else f"{size - end} bytes follow its last tensor"
        )
        raise _damaged(file, fault, f"{end} bytes", f"{size} bytes")
