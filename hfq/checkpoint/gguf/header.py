"""Reads and validates the header of a GGUF file, with hard limits.

Each check raises an error that names the file, and the key or the tensor (format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):

1. the file starts with `GGUF`, in version 2 or 3, and in little-endian order
2. the header ends within the file and within `HeaderLimits`
3. keys are unique ASCII; values have a known type; arrays hold no arrays; strings are UTF-8
4. `general.alignment` is a power of two
5. names of tensors are unique, printable, bounded in length, and are no paths
6. every tensor has a known type, one to four dimensions, and rows of whole blocks
7. tensors lie in their order, each at the next aligned byte, and end where the file ends
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass, field
from typing import TypeAlias

from hfq.checkpoint.gguf.block_types import BLOCK_TYPES, UNREADABLE_TYPES, BlockType
from hfq.checkpoint.header import Header, HeaderLimits, Readable
from hfq.checkpoint.small_file import open_regular
from hfq.errors import CheckpointError, FormatError, error_of_limit
from hfq.tensor_spec import Blocks, ByteRange, TensorInfo

__all__ = ["GgufArray", "GgufHeader", "Value", "parse_gguf", "read_gguf_header"]

_MAGIC = b"GGUF"
_CHUNK = 1 << 16
_MOST_KEYS = 1 << 16
_KEY_LENGTH = (1 << 16) - 1
_NAME_LENGTH = 63  # GGML_MAX_NAME, less the byte that ends it
_MOST_DIMENSIONS = 4
_MOST_ELEMENTS = (1 << 63) - 1
_DEFAULT_ALIGNMENT = 32
_MOST_KEPT = 1 << 16
"""Most values of an array that are kept; longer ones belong to a tokenizer."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The value types that are numbers: type → its code in `struct`."""
_U32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata.

    Attributes:
        count: The number of its values.
        values: The values; None for strings, and for more numbers than a model needs.
    """

    count: int
    values: tuple[int | float, ...] | None


Value: TypeAlias = "int | float | str | GgufArray"
"""A value in the metadata."""


@dataclass(frozen=True, slots=True)
class GgufHeader(Header):
    """A validated header: tensors under their names in the file, and the metadata.

    Attributes:
        keys: The metadata.
        entries: The bytes of each entry of the metadata: key, type, and value.
    """

    keys: dict[str, Value] = field(default_factory=dict)
    entries: dict[str, ByteRange] = field(default_factory=dict)


def read_gguf_header(
    file: str | os.PathLike,
    limits: HeaderLimits = HeaderLimits(),  # noqa: B008
) -> GgufHeader:
    """Reads and validates the header of one GGUF file.

    Args:
        file: The file.
        limits: Limits on the header.

    Raises:
        CheckpointError: The file cannot be read, or a check fails; names the file, and the key or tensor.
        FormatError: A tensor has a type that hfq does not read.
    """
    file = os.fspath(file)
    try:
        with open_regular(file) as stream:
            status = os.fstat(stream.fileno())
            identity = status.st_ino, status.st_size, status.st_mtime_ns
            return parse_gguf(stream, file, identity, limits)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        raise error_of_limit(error, file) or CheckpointError(
            "A checkpoint file cannot be read.", file=file, found=found, fix="Check the path."
        ) from error


def parse_gguf(
    stream: Readable,
    file: str,
    identity: tuple[int, int, int],
    limits: HeaderLimits = HeaderLimits(),  # noqa: B008
) -> GgufHeader:
    """Validates a header from the start of a stream, and reads little further.

    Args:
        stream: The file, or an object that returns its bytes.
        file: Its name in messages.
        identity: (inode, size, mtime in ns) of the file.
        limits: Limits on the header.

    Raises:
        CheckpointError: As `read_gguf_header`.
        FormatError: As `read_gguf_header`.
    """
    cursor = _Cursor(stream, file, identity[1], limits.header_nbytes)
    _check_start(cursor)
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > limits.tensors:
        raise cursor.damaged("it holds too many tensors", f"at most {limits.tensors}", tensor_count)
    if key_count > _MOST_KEYS:
        raise cursor.damaged("it holds too many keys", f"at most {_MOST_KEYS}", key_count)
    keys, entries = dict[str, Value](), dict[str, ByteRange]()
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(key_count):
        start = cursor.position
        key, kind = _key(cursor, keys), cursor.number("I")
        keys[key] = value = _value(cursor, key, kind)
        entries[key] = ByteRange(file, start, cursor.position - start)
        if key == "general.alignment":
            alignment = _alignment(cursor, kind, value)
    parsed = [_tensor(cursor) for _ in range(tensor_count)]
    data_start = _aligned(cursor.position, alignment)
    tensors = dict[str, TensorInfo]()
    end = data_start
    for name, found, shape, offset in parsed:
        nbytes = math.prod(shape) // found.size * found.nbytes
        if name in tensors:
            raise cursor.damaged("a tensor stands twice in its header", tensor=name)
        if offset != end - data_start:
            fault = "overlap" if offset < end - data_start else "leave a hole"
            raise cursor.damaged(
                f"its tensors {fault}", f"byte {end - data_start}", f"byte {offset}", tensor=name
            )
        stored = (*shape[:-1], shape[-1] // found.size * found.nbytes) if found.dtype == "U8" else shape
        source = ByteRange(file, data_start + offset, nbytes)
        tensors[name] = TensorInfo(
            name, found.dtype, stored, source, blocks=Blocks(found.name, is_layer=found.dtype == "U8")
        )
        end = _aligned(source.offset + nbytes, alignment)
    last = max((info.range.offset + info.nbytes for info in tensors.values()), default=cursor.position)
    _check_end(cursor, last, end)
    return GgufHeader(file, tensors, {}, data_start, identity, keys, entries)


class _Cursor:
    """Position in a header, whose bytes are read as they are needed."""

    def __init__(self, stream: Readable, file: str, size: int, limit: int) -> None:
        self._stream = stream
        self.file = file
        self.size = size
        self._limit = limit
        self._data = bytearray()
        self.position = 0

    def take(self, nbytes: int) -> bytes:
        """Returns the next bytes."""
        self._need(nbytes)
        start = self.position
        self.position += nbytes
        return bytes(self._data[start : self.position])

    def number(self, code: str) -> int:
        """Returns the next number, of a type of `struct`."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return value

    def text(self, what: str, most: int) -> str:
        """Returns the next string.

        Args:
            what: The string in messages.
            most: Its most bytes.
        """
        length = self.number("Q")
        if length > most:
            raise self.damaged(f"{what} is too long", f"at most {most} bytes", f"{length} bytes")
        raw = self.take(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8", found=repr(raw[:40])) from None

    def skip_texts(self, count: int) -> None:
        """Skips strings."""
        for _ in range(count):
            self._need(8)
            start = self.position
            length = int.from_bytes(self._data[start : start + 8], "little")
            self.position += 8
            self._need(length)
            self.position += length

    def _need(self, nbytes: int) -> None:
        """Reads until the next bytes are there."""
        end = self.position + nbytes
        if end <= len(self._data):
            return
        if end > self.size:
            raise self.damaged("it ends inside its header", f"at least {end} bytes", f"{self.size} bytes")
        if end > self._limit:
            raise self.damaged("its header is too large", f"at most {self._limit} bytes", "more")
        missing, read = end - len(self._data), len(self._data)
        wanted = min(max(missing, _CHUNK, read), self.size - read)  # twice as many bytes as before
        while wanted:
            part = self._stream.read(wanted)
            if not part:
                raise self.damaged("it ends inside its header", f"{end} bytes", f"{len(self._data)} bytes")
            self._data += part
            wanted -= len(part)

    def damaged(
        self, what: str, expected: object = None, found: object = None, tensor: str | None = None
    ) -> CheckpointError:
        return CheckpointError(
            f"The GGUF file is damaged: {what}.",
            file=self.file,
            tensor=tensor,
            expected=expected,
            found=found,
            fix="Download this file again.",
        )


def _check_start(cursor: _Cursor) -> None:
    """Checks the magic bytes and the version."""
    if cursor.size < 24:
        raise cursor.damaged("it is too short to hold a header", "at least 24 bytes", f"{cursor.size} bytes")
    magic = cursor.take(4)
    if magic != _MAGIC:
        raise cursor.damaged("it does not start as a GGUF file", repr(_MAGIC), repr(magic))
    version = cursor.number("I")
    if version not in (2, 3):
        is_swapped = version != 0 and version & 0xFFFF == 0
        raise FormatError(
            f"{'A big-endian GGUF file' if is_swapped else 'This version of GGUF'} is not supported. "
            "Nothing was loaded.",
            file=cursor.file,
            expected="version 2 or 3, little-endian",
            found=f"version {int.from_bytes(version.to_bytes(4, 'little'), 'big')}, big-endian"
            if is_swapped
            else f"version {version}",
            fix="Convert the model again with convert_hf_to_gguf.py of llama.cpp.",
        )


def _key(cursor: _Cursor, keys: dict[str, Value]) -> str:
    key = cursor.text("a key", _KEY_LENGTH)
    if not key or not key.isascii() or not key.isprintable():
        raise cursor.damaged("a key is not printable ASCII", found=repr(key[:80]))
    if key in keys:
        raise cursor.damaged("a key stands twice in its header", found=key[:80])
    return key


def _value(cursor: _Cursor, key: str, kind: int) -> Value:
    if kind == _STRING:
        return cursor.text(f"the value of {key[:80]}", cursor.size)
    if kind != _ARRAY:
        return _numbers(cursor, key, kind, 1)[0]
    kind, count = cursor.number("I"), cursor.number("Q")
    if kind == _STRING:
        cursor.skip_texts(count)
        return GgufArray(count, None)
    if kind == _ARRAY:
        raise cursor.damaged("an array holds arrays", "numbers or strings", key[:80])
    nbytes = count * struct.calcsize(f"<{_code(cursor, key, kind)}")
    if nbytes > cursor.size:
        raise cursor.damaged("an array is larger than the file", f"{cursor.size} bytes", f"{nbytes} bytes")
    if count > _MOST_KEPT:
        cursor.take(nbytes)
        return GgufArray(count, None)
    return GgufArray(count, _numbers(cursor, key, kind, count))


def _numbers(cursor: _Cursor, key: str, kind: int, count: int) -> tuple[int | float, ...]:
    code = _code(cursor, key, kind)
    raw = cursor.take(count * struct.calcsize(f"<{code}"))
    if kind == _BOOL and raw.strip(b"\0\1"):
        raise cursor.damaged("a truth value is neither 0 nor 1", found=key[:80])
    return struct.unpack(f"<{count}{code}", raw)


def _code(cursor: _Cursor, key: str, kind: int) -> str:
    if kind not in _NUMBERS:
        raise cursor.damaged("a value has an unknown type", "0 to 12", f"{kind} for {key[:80]}")
    return _NUMBERS[kind]


def _alignment(cursor: _Cursor, kind: int, value: Value) -> int:
    is_power = kind == _U32 and isinstance(value, int) and value > 0 and value & (value - 1) == 0
    if not is_power or not isinstance(value, int):
        raise cursor.damaged("general.alignment is not valid", "a power of two of 32 bits", repr(value)[:80])
    return value


def _tensor(cursor: _Cursor) -> tuple[str, BlockType, tuple[int, ...], int]:
    """Returns name, type, shape, and offset in the data of the next tensor."""
    name = cursor.text("the name of a tensor", _NAME_LENGTH)
    if not name or not name.isprintable() or "/" in name or "\\" in name:
        raise cursor.damaged("a tensor has an unacceptable name", "printable, no slash", repr(name))
    rank = cursor.number("I")
    if not 1 <= rank <= _MOST_DIMENSIONS:
        raise cursor.damaged(
            "a tensor has an unacceptable shape", f"1 to {_MOST_DIMENSIONS} sizes", f"{rank} sizes", name
        )
    shape = struct.unpack(f"<{rank}Q", cursor.take(8 * rank))[::-1]  # the file has the fastest one first
    kind, offset = cursor.number("I"), cursor.number("Q")
    found = BLOCK_TYPES.get(kind)
    if found is None:
        raise FormatError(
            "A tensor has a type that hfq does not read. Nothing was loaded.",
            file=cursor.file,
            tensor=name,
            expected="a type that docs/reference/formats.md lists",
            found=f"type {kind}: {UNREADABLE_TYPES.get(kind, 'unknown, newer than this version of hfq')}",
            fix="Use a file with another quantization of this model, or update hfq.",
        )
    if min(shape) < 1 or math.prod(shape) > _MOST_ELEMENTS:
        raise cursor.damaged("a tensor has an unacceptable shape", "sizes of at least 1", list(shape), name)
    if shape[-1] % found.size:
        raise cursor.damaged(
            "a tensor's rows do not consist of whole blocks",
            f"a multiple of {found.size} for {found.name}",
            list(shape),
            name,
        )
    return name, found, shape, offset


def _check_end(cursor: _Cursor, last: int, padded: int) -> None:
    """Checks that the file ends with its last tensor, or with the padding after it."""
    if cursor.size < last:
        raise cursor.damaged(
            f"it is truncated by {last - cursor.size} bytes", f"{last} bytes", f"{cursor.size} bytes"
        )
    if cursor.size > padded:
        raise cursor.damaged(
            f"{cursor.size - padded} bytes follow its last tensor", f"{padded} bytes", f"{cursor.size} bytes"
        )


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
