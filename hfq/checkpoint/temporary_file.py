"""Unnamed files in memory or on disk; the system removes them with their reader."""

from __future__ import annotations

import os
import shutil
import tempfile

from hfq.checkpoint.header import Header
from hfq.checkpoint.reader import Reader
from hfq.errors import CheckpointError

__all__ = ["TemporaryFile"]

_WITHOUT_NAME = getattr(os, "O_TMPFILE", 0)


class TemporaryFile:
    """An unnamed file that is written once and then read like a file of the checkpoint.

    Args:
        reader: Reader that reads the file after `finish`, and closes it.
        label: Name of the file in byte ranges and in messages.
        nbytes: Size in bytes.
        folder: Folder on whose disk the file is stored, created if it is absent. None: stored in memory.

    Raises:
        CheckpointError: The folder cannot be written, or its disk has too little room.
    """

    def __init__(
        self, reader: Reader, label: str, nbytes: int, folder: str | os.PathLike | None = None
    ) -> None:
        self.label, self.nbytes = label, nbytes
        try:
            self._descriptor = _in_memory(nbytes) if folder is None else _on_disk(os.fspath(folder), nbytes)
        except OSError as error:
            raise self._failed(error.strerror) from error
        reader.adopt(self._header(), self._descriptor)
        self._reader = reader

    def write(self, offset: int, data: memoryview) -> None:
        """Writes bytes at an offset.

        Raises:
            CheckpointError: The disk is full, or fails.
        """
        flat, done = data.cast("B"), 0
        try:
            while done < flat.nbytes:
                done += os.pwrite(self._descriptor, flat[done:], offset + done)
        except OSError as error:
            raise self._failed(error.strerror) from error

    def finish(self) -> None:
        """Ends writing and records the identity of the file for the reader."""
        self._reader.identify(self._header())

    def empty(self) -> None:
        """Frees the bytes of the file. A later read raises an error."""
        os.ftruncate(self._descriptor, 0)

    def _header(self) -> Header:
        status = os.fstat(self._descriptor)
        return Header(self.label, {}, {}, 0, (status.st_ino, status.st_size, status.st_mtime_ns))

    def _failed(self, why: str | None) -> CheckpointError:
        return CheckpointError(
            "Quantized layers could not be written. Nothing was loaded.",
            file=self.label,
            expected=f"{self.nbytes:,} bytes of free space",
            found=why,
            fix="Free space, or choose another offload_folder.",
        )


def _in_memory(nbytes: int) -> int:
    descriptor = os.memfd_create("hfq-packed", getattr(os, "MFD_CLOEXEC", 1))
    os.ftruncate(descriptor, nbytes)
    return descriptor


def _on_disk(folder: str, nbytes: int) -> int:
    os.makedirs(folder, exist_ok=True)  # as accelerate does
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CheckpointError(
            "The disk has too little free space to quantize this model on load. Nothing was loaded.",
            file=folder,
            expected=f"{nbytes:,} bytes",
            found=f"{free:,} bytes free",
            fix="Free space, or choose another offload_folder.",
        )
    descriptor = _open_without_name(folder)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # reserves the space before any layer is quantized
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_without_name(folder: str) -> int:
    """Opens a file without a name, which the system removes when it is closed."""
    if _WITHOUT_NAME:
        try:
            return os.open(folder, _WITHOUT_NAME | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            pass  # the file system does not support O_TMPFILE: create a named file and unlink it
    descriptor, name = tempfile.mkstemp(prefix=".hfq-packed-", dir=folder)
    os.unlink(name)
    return descriptor
