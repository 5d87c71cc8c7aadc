"""Reader of byte ranges of checkpoint files, with `pread` or through a zero-copy map."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn
from weakref import WeakValueDictionary

from hfq.checkpoint.header import Header
from hfq.checkpoint.headers_only import check_has_weights
from hfq.checkpoint.index import Checkpoint
from hfq.errors import CheckpointError, SetupError, error_of_limit
from hfq.tensor_spec import ByteRange, ByteRuns

__all__ = ["Counters", "Reader", "changed", "unreadable"]

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MOST_BYTES_A_CALL = 1 << 30
_MOST_BUFFERS_A_CALL = 1024  # IOV_MAX of Linux


@dataclass
class Counters:
    """Counters of a reader.

    Attributes:
        bytes_read: Bytes read with `pread`.
        calls: Calls of `pread`.
        maps: Mapped files.
        populated: Bytes read into the page cache.
    """

    bytes_read: int = 0
    calls: int = 0
    maps: int = 0
    populated: int = 0


class Reader:
    """The open files of one checkpoint.

    A file is opened once and stays open. So reads use the validated file, even if its name later belongs to
    another file. A reader is safe to use from several threads and after a fork, because `pread` shares no
    file position.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.counters = Counters()
        self._root = checkpoint.root
        self._headers: dict[str, Header] = checkpoint.headers
        self._descriptors: dict[str, int] = {}
        self._maps: WeakValueDictionary[str, mmap.mmap] = WeakValueDictionary()  # tensors keep them
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def __deepcopy__(self, memo: dict) -> Reader:
        return self

    def __reduce__(self) -> NoReturn:
        raise SetupError(
            "A model loaded by hfq cannot be pickled.",
            expected="save_pretrained",
            found="pickle or torch.save of the model",
            fix="Save it with save_pretrained, or load it again in the other process.",
        )

    def read_into(self, source: ByteRange, target: memoryview) -> None:
        """Fills `target` (writable, of exactly `source.nbytes` bytes) with the bytes of `source`.

        Raises:
            CheckpointError: The file was truncated or replaced since its header was validated.
        """
        self.read_vectored(source, [target[: source.nbytes]])

    def read_vectored(self, source: ByteRange, targets: Sequence[memoryview]) -> None:
        """Reads a range into several targets in order, in as few calls as possible.

        Args:
            source: The range.
            targets: Writable bytes, `source.nbytes` in total.

        Raises:
            CheckpointError: The file was truncated or replaced since its header was validated, or the disk
                fails.
        """
        descriptor, pending = self.descriptor(source.file), [target for target in targets if target.nbytes]
        if sum(target.nbytes for target in pending) != source.nbytes:
            raise CheckpointError(
                "The size of a byte range differs from the size of its target. Nothing was read.",
                file=source.file,
                expected=f"{source.nbytes} bytes",
                found=f"{sum(target.nbytes for target in pending)} bytes",
                fix="Report this error: it is a bug in hfq.",
            )
        offset, calls = source.offset, 0
        while pending:
            try:
                count = os.preadv(descriptor, _window(pending), offset)
            except OSError as error:
                raise unreadable(source, error) from error
            calls += 1
            if count <= 0:
                raise changed(source.file, f"{source.offset + source.nbytes} bytes", f"{offset} bytes")
            offset += count
            pending = _without(pending, count)
        self.count(bytes_read=source.nbytes, calls=calls)

    def read_runs(self, source: ByteRuns, target: memoryview) -> None:
        """Reads runs one after another into `target`, without the bytes between them.

        Args:
            source: The runs.
            target: Writable bytes, as many as all runs have.

        Raises:
            CheckpointError: The file was truncated or replaced since its header was validated, or the disk
                fails.
        """
        if source.count == 1:
            self.read_into(ByteRange(source.file, source.offset, source.nbytes), target)
            return
        descriptor = self.descriptor(source.file)
        offset = source.offset
        read = os.preadv
        for start in range(0, source.count * source.nbytes, source.nbytes):
            run = target[start : start + source.nbytes]
            try:
                is_whole = read(descriptor, (run,), offset) == source.nbytes
            except OSError as error:
                raise unreadable(ByteRange(source.file, offset, source.nbytes), error) from error
            if not is_whole:  # cut short by a signal, or by the end of the file
                self.read_into(ByteRange(source.file, offset, source.nbytes), run)
                self.count(bytes_read=-source.nbytes)
            offset += source.stride
        self.count(bytes_read=source.count * source.nbytes, calls=source.count)

    def count(self, **added: int) -> None:
        """Adds to the counters. Any thread may call it."""
        with self._lock:
            for name, value in added.items():
                setattr(self.counters, name, getattr(self.counters, name) + value)

    def reset_after_fork(self) -> None:
        """Replaces the lock in the child of a fork, where the thread that held it does not exist."""
        self._lock = threading.Lock()

    def identity(self, file: str) -> tuple[int, int, int]:
        """Returns (inode, bytes, mtime in ns) of a file when its header was validated."""
        return self._headers[file].identity

    def adopt(self, header: Header, descriptor: int) -> None:
        """Adds an unnamed file by its open descriptor. The reader closes the descriptor."""
        with self._lock:
            self._headers[header.file], self._descriptors[header.file] = header, descriptor

    def identify(self, header: Header) -> None:
        """Replaces the header of a file after the last write to it."""
        with self._lock:
            self._headers[header.file] = header

    def map(self, file: str) -> mmap.mmap:
        """Returns a private copy-on-write map of a file, whose unmodified pages all processes share.

        It lasts as long as something refers to it, such as a tensor.
        """
        found = self._maps.get(file)
        if found is not None:
            return found
        descriptor = self.descriptor(file)
        with self._lock:
            found = self._maps.get(file)
            if found is None:
                size = self._check_identity(file, descriptor)
                flags, protection = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                self._maps[file] = found = mmap.mmap(descriptor, size, flags=flags, prot=protection)
                self.counters.maps += 1
            return found

    def descriptor(self, file: str) -> int:
        """Returns the descriptor of a file, which stays open as long as the reader exists.

        Raises:
            CheckpointError: The file is gone, another one than was validated, or has a header and no weights.
        """
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

    def check_unchanged(self, files: Iterable[str]) -> None:
        """Compares files with their headers' identity, by one fstat of each open descriptor.

        A change that keeps the inode, the size, and the modification time goes unnoticed.

        Raises:
            CheckpointError: The inode, size, or modification time of a file changed.
        """
        for file in files:
            self._check_identity(file, self.descriptor(file))

    def _open(self, file: str) -> int:
        check_has_weights(self._root)
        try:
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise error_of_limit(error, file) or CheckpointError(
                "A checkpoint file cannot be opened any more.",
                file=file,
                found=error.strerror,
                fix="Restore the file and load the model again.",
            ) from error

    def _check_identity(self, file: str, descriptor: int) -> int:
        status = os.fstat(descriptor)
        found = (status.st_ino, status.st_size, status.st_mtime_ns)
        if found != self.identity(file):
            raise changed(
                file, "(inode, size, mtime) = %d, %d, %d" % self.identity(file), "%d, %d, %d" % found
            )
        return status.st_size


def changed(file: str, expected: str, found: str) -> CheckpointError:
    """Returns the error for a file that differs from the one whose header was validated."""
    return CheckpointError(
        "A checkpoint file changed while the model was using it.",
        file=file,
        expected=expected,
        found=found,
        fix="Restore the file and load the model again.",
    )


def unreadable(source: ByteRange, error: OSError) -> CheckpointError:
    """Returns the error for a range that the disk or mount cannot read."""
    return CheckpointError(
        "A checkpoint file cannot be read any more.",
        file=source.file,
        found=error.strerror,
        expected=f"{source.nbytes} bytes from byte {source.offset}",
        fix="Check the disk or the mount.",
    )


def _window(pending: Sequence[memoryview]) -> list[memoryview]:
    """Returns the targets that one call may fill. The last one may be cut."""
    window, room = [], _MOST_BYTES_A_CALL
    for target in pending[:_MOST_BUFFERS_A_CALL]:
        window.append(target[:room])
        room -= window[-1].nbytes
        if not room:
            break
    return window


def _without(pending: Sequence[memoryview], count: int) -> list[memoryview]:
    """Returns the rest of the targets after their first `count` bytes."""
    for index, target in enumerate(pending):
        if count < target.nbytes:
            return [target[count:], *pending[index + 1 :]]
        count -= target.nbytes
    return []
