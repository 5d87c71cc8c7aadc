"""Rows of a layer's KV cache, one per token, in CPU memory or in a file."""

from __future__ import annotations

import io
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hfq.errors import CheckpointError, SetupError

__all__ = ["FileRows", "KvRows", "MemoryRows"]

_CHUNK_NBYTES = 16 << 20

Allocate = Callable[[int], torch.Tensor]
"""Returns CPU memory: uint8 [the number of bytes]."""


class KvRows(ABC):
    """Base of both kinds of rows.

    Args:
        row_nbytes: Bytes of a row.

    Attributes:
        count: Number of rows; rows past it are overwritten by the next ones.
    """

    def __init__(self, row_nbytes: int, count: int = 0) -> None:
        self.row_nbytes, self.count = row_nbytes, count

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.count * self.row_nbytes

    def append(self, rows: torch.Tensor) -> None:
        """Adds rows: uint8 [rows, ...] in CPU memory, contiguous."""
        self._write(rows.reshape(-1), self.nbytes)
        self.count += rows.shape[0]

    @abstractmethod
    def read(self, allocate: Allocate) -> torch.Tensor:
        """Returns all rows: uint8 [nbytes], in memory of `allocate` or in the memory of the rows."""

    @abstractmethod
    def rewrite(self, change: Callable[[torch.Tensor], torch.Tensor], row_nbytes: int) -> None:
        """Replaces the rows by changed rows.

        Args:
            change: Function from rows, uint8 [rows, row_nbytes], to as many rows.
            row_nbytes: Bytes of a changed row.
        """

    @abstractmethod
    def _write(self, data: torch.Tensor, offset: int) -> None: ...


class MemoryRows(KvRows):
    """Rows in one piece of CPU memory, which grows by half.

    Args:
        row_nbytes: Bytes of a row.
        allocate: Allocates the memory, pinned where an accelerator computes.
    """

    def __init__(self, row_nbytes: int, allocate: Allocate) -> None:
        super().__init__(row_nbytes)
        self._allocate = allocate
        self._memory = allocate(0)

    def read(self, allocate: Allocate) -> torch.Tensor:
        return self._memory[: self.nbytes]

    def rewrite(self, change: Callable[[torch.Tensor], torch.Tensor], row_nbytes: int) -> None:
        changed = change(self._memory[: self.nbytes].view(self.count, self.row_nbytes))
        self.row_nbytes = row_nbytes
        self._memory = self._allocate(self.nbytes)
        self._memory.copy_(changed.reshape(-1))

    def _write(self, data: torch.Tensor, offset: int) -> None:
        end = offset + data.numel()
        if end > self._memory.numel():
            larger = self._allocate(end + (end >> 1))
            larger[:offset].copy_(self._memory[:offset])
            self._memory = larger
        self._memory[offset:end].copy_(data)


class FileRows(KvRows):
    """Rows in a file.

    Args:
        row_nbytes: Bytes of a row.
        path: The file; it is made if it does not exist.
        count: Rows that it holds.

    Raises:
        CheckpointError: The file holds fewer rows.
        SetupError: It cannot be opened.
    """

    def __init__(self, row_nbytes: int, path: Path, count: int = 0) -> None:
        super().__init__(row_nbytes, count)
        self._path = path
        self._file = self._open(path)
        self._summed = 0, 0  # the first rows, and their checksum
        found = os.fstat(self._file.fileno()).st_size
        if found < self.nbytes:
            raise _too_short(path, self.nbytes, found)

    def read(self, allocate: Allocate) -> torch.Tensor:
        target = allocate(self.nbytes)
        self._read_into(target, 0)
        return target

    def rewrite(self, change: Callable[[torch.Tensor], torch.Tensor], row_nbytes: int) -> None:
        path = self._path.with_suffix(".new")
        path.unlink(missing_ok=True)
        changed = FileRows(row_nbytes, path)
        try:
            for rows in self._chunks():
                changed.append(change(rows).contiguous())
        except BaseException:
            path.unlink()
            raise
        self._file.close()
        os.replace(path, self._path)
        self._file, self.row_nbytes, self._summed = changed._file, row_nbytes, (0, 0)

    def synchronize(self) -> None:
        """Waits until the disk has the rows."""
        os.fsync(self._file.fileno())

    def checksum(self) -> int:
        """Returns the CRC-32 of all rows; reads only those that an earlier call did not see.

        Raises:
            CheckpointError: The file cannot be read.
        """
        first, checksum = self._summed if self._summed[0] <= self.count else (0, 0)
        for rows in self._chunks(first):
            checksum = zlib.crc32(memoryview(rows.numpy()), checksum)  # type: ignore[arg-type]
        self._summed = self.count, checksum
        return checksum

    def _chunks(self, start: int = 0) -> Iterator[torch.Tensor]:
        step = max(_CHUNK_NBYTES // self.row_nbytes, 1)
        for first in range(start, self.count, step):
            rows = torch.empty(min(step, self.count - first), self.row_nbytes, dtype=torch.uint8)
            self._read_into(rows.view(-1), first * self.row_nbytes)
            yield rows

    def _read_into(self, target: torch.Tensor, offset: int) -> None:
        memory, done = memoryview(target.numpy()), 0  # type: ignore[arg-type]
        while done < len(memory):
            try:
                count = os.preadv(self._file.fileno(), [memory[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    "A file of the KV cache cannot be read.",
                    file=self._path,
                    expected=f"{self.nbytes:,} B",
                    found=error.strerror,
                    fix="Check the disk. Then make the cache again, which starts with the last save.",
                ) from error
            if count == 0:
                raise _too_short(self._path, self.nbytes, offset + done)
            done += count

    def _write(self, data: torch.Tensor, offset: int) -> None:
        memory, done = memoryview(data.numpy()), 0  # type: ignore[arg-type]
        if offset < self._summed[0] * self.row_nbytes:
            self._summed = 0, 0
        try:
            while done < len(memory):
                done += os.pwrite(self._file.fileno(), memory[done:], offset + done)
        except OSError as error:
            raise SetupError(
                "The KV cache cannot be written.",
                file=self._path,
                expected=f"room for {len(memory):,} B more",
                found=error.strerror,
                fix="Free disk space. Then crop the cache to the tokens before the call, or make it again.",
            ) from error

    @staticmethod
    def _open(path: Path) -> io.FileIO:
        try:
            return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
        except OSError as error:
            raise SetupError(
                "A file of the KV cache cannot be opened.",
                file=path,
                expected="a file that can be read and written",
                found=error.strerror,
                fix="Pass a folder that you may write to.",
            ) from error


def _too_short(path: Path, expected: int, found: int) -> CheckpointError:
    return CheckpointError(
        "A file of the KV cache is too short.",
        file=path,
        expected=f"{expected:,} B",
        found=f"{found:,} B",
        fix="Delete the folder, and compute the conversation again.",
    )
