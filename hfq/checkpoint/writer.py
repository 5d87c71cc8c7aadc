"""Writes a safetensors file atomically: readers see the old file or the complete new one."""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hfq.checkpoint.header import parse_header
from hfq.checkpoint.reader import Reader
from hfq.errors import CheckpointError
from hfq.tensor_spec import ByteRange

__all__ = ["CopiedBytes", "StoredTensor", "write_safetensors"]

_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True)
class CopiedBytes:
    """Bytes of another checkpoint, which are read in chunks when they are written."""

    reader: Reader
    source: ByteRange

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def chunks(self) -> Iterator[memoryview]:
        """Yields the bytes in one buffer that each chunk overwrites."""
        buffer = memoryview(bytearray(min(_CHUNK_NBYTES, self.nbytes)))
        for done in range(0, self.nbytes, _CHUNK_NBYTES):
            part = ByteRange(
                self.source.file, self.source.offset + done, min(_CHUNK_NBYTES, self.nbytes - done)
            )
            self.reader.read_into(part, buffer)
            yield buffer[: part.nbytes]


StoredTensor = tuple[str, tuple[int, ...], memoryview | bytes | CopiedBytes]
"""(safetensors dtype, shape, bytes in C order)"""


def write_safetensors(
    path: str | os.PathLike, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str] | None = None
) -> int:
    """Writes tensors in the given order to a temporary file, which is synced and renamed.

    Args:
        path: The file to create or replace.
        tensors: (dtype, shape, bytes) by name. Consecutive tensors are contiguous on disk.
        metadata: `__metadata__`.

    Returns:
        The size of the file in bytes.

    Raises:
        CheckpointError: A tensor's bytes do not match its dtype and shape (before anything is written), or
            the
            disk is full or not writable (nothing is left behind).
    """
    path = Path(path)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        if not isinstance(data, CopiedBytes) and not memoryview(data).c_contiguous:
            raise _unwritable(path, "the bytes do not lie in a row", "C order", "strided memory", name)
        nbytes = data.nbytes if isinstance(data, CopiedBytes) else memoryview(data).nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = _checked_header(path, header, end, len(tensors))
    try:
        _replace(path, [struct.pack("<Q", len(raw)), raw, *(data for _, _, data in tensors.values())])
    except OSError as error:
        raise CheckpointError(
            "The checkpoint file could not be written. Nothing was left behind.",
            file=path,
            found=error.strerror,
            expected=f"{8 + len(raw) + end} bytes of free space in a writable folder",
            fix="Free space, or choose another folder.",
        ) from error
    return 8 + len(raw) + end


def _checked_header(path: Path, header: dict, nbytes: int, count: int) -> bytes:
    """Returns the header's JSON, validated as hfq validates headers that it reads."""
    try:
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        found = parse_header(raw, os.fspath(path), (0, 8 + len(raw) + nbytes, 0))
        if len(found.tensors) != count:
            raise TypeError("a tensor is named __metadata__")
    except CheckpointError as error:
        raise _unwritable(path, error.message, error.expected, error.found, error.tensor) from error
    except (TypeError, ValueError) as error:
        raise _unwritable(path, "They are not JSON.", "safetensors' types", error) from error
    return raw


def _unwritable(
    path: Path, why: str, expected: object, found: object, tensor: str | None = None
) -> CheckpointError:
    return CheckpointError(
        f"The tensors cannot be stored. Nothing was written. Cause: {why}",
        file=path,
        tensor=tensor,
        expected=expected,
        found=found,
        fix="Pass each tensor's own dtype, shape, and contiguous bytes, under a plain name.",
    )


def _replace(path: Path, parts: list[bytes | memoryview | CopiedBytes]) -> None:
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as stream:  # unlike a file of tempfile, with the permissions of the umask
            for part in parts:
                for chunk in part.chunks() if isinstance(part, CopiedBytes) else (part,):
                    stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
