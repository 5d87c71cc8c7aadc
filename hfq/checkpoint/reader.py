"""Reads byte ranges of a checkpoint's files, by `pread` into the caller's memory or by a shared zero-copy map."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass

from hfq.checkpoint.header import Header
from hfq.checkpoint.index import Checkpoint
from hfq.errors import CheckpointError, SetupError
from hfq.spec import ByteRange

__all__ = ["Counters", "Reader"]

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MOST_BYTES_A_CALL = 1 << 30


@dataclass
class Counters:
    """What a reader has done so far: bytes and calls of `pread`, files mapped."""

    bytes_read: int = 0
    calls: int = 0
    maps: int = 0


class Reader:
    """One checkpoint's open files.

    A file is opened once and kept open: what was validated is what is read, even when the name is later given to another
    file. Safe to use from several threads and after a fork, since `pread` has no position to share.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.counters = Counters()
        self._headers: dict[str, Header] = checkpoint.headers
        self._descriptors: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def __deepcopy__(self, memo: dict) -> Reader:
        return self

    def __reduce__(self):
        raise SetupError(
            "A model loaded by hfq cannot be pickled.", expected="save_pretrained", found="pickle or torch.save of the model",
            fix="save it with save_pretrained, or load it again in the other process",
        )  # fmt: skip

    def read_into(self, source: ByteRange, target: memoryview) -> None:
        """Fills `target` (writable, of exactly `source.nbytes` bytes) with the bytes of `source`.

        Raises:
            CheckpointError: The file was truncated or replaced since its header was validated.
        """
        descriptor, target = self._descriptor(source.file), target[: source.nbytes]
        done = 0
        while done < source.nbytes:
            window = target[done : done + _MOST_BYTES_A_CALL]
            try:
                count = os.preadv(descriptor, [window], source.offset + done)
            except OSError as error:
                raise CheckpointError(
                    "A checkpoint file cannot be read any more.", file=source.file, found=error.strerror,
                    expected=f"{source.nbytes} bytes from byte {source.offset}", fix="check the disk or the mount",
                ) from error  # fmt: skip
            self.counters.calls += 1
            if count <= 0:
                raise _changed(source.file, f"{source.offset + source.nbytes} bytes", f"{source.offset + done} bytes")
            done += count
        self.counters.bytes_read += done

    def map(self, file: str) -> mmap.mmap:
        """A private copy-on-write map of a whole file: pages are shared with every process, and never written back."""
        descriptor = self._descriptor(file)
        with self._lock:
            if file not in self._maps:
                size = self._check_identity(file, descriptor)
                flags, protection = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                self._maps[file] = mmap.mmap(descriptor, size, flags=flags, prot=protection)
                self.counters.maps += 1
            return self._maps[file]

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                descriptor = self._open(file)
                try:
                    self._check_identity(file, descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._descriptors[file] = descriptor
            return self._descriptors[file]

    def _open(self, file: str) -> int:
        try:
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                "A checkpoint file cannot be opened any more.", file=file, found=error.strerror, fix="restore the file"
            ) from error

    def _check_identity(self, file: str, descriptor: int) -> int:
        status = os.fstat(descriptor)
        found = (status.st_ino, status.st_size, status.st_mtime_ns)
        if found != self._headers[file].identity:
            raise _changed(file, "(inode, size, mtime) = %d, %d, %d" % self._headers[file].identity, "%d, %d, %d" % found)
        return status.st_size


def _changed(file: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        "A checkpoint file changed after it was validated.", file=file, expected=expected, found=found,
        fix="leave a checkpoint's files alone while a model uses them; restore the file and load again",
    )  # fmt: skip
