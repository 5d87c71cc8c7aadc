"""What the system knows of a file: which file system it is on, which of its pages are in memory; and bringing
pages in.

Everything degrades to "unknown" where the system cannot tell. Calls go through ctypes, which lets other
threads run meanwhile (`mmap.madvise` does not).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from hfq.checkpoint.reader import changed, unreadable
from hfq.tensor_spec import ByteRange

__all__ = ["WINDOW", "filesystem_type", "is_network", "populate", "resident_fraction"]

WINDOW = 16 << 20
"""Bytes that are brought in at once: large enough for a disk's full speed, small enough not to count in a
process's memory.
"""

_NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "ceph",
        "beegfs",
        "gpfs",
        "glusterfs",
        "9p",
        "afs",
        "orangefs",
        "pvfs2",
        "wekafs",
        "virtiofs",
    }
)
_LOCAL_FUSE = frozenset(
    {
        "fuse.ntfs-3g",
        "fuse.exfat",
        "fuse.fuse-overlayfs",
        "fuse.bindfs",
        "fuse.mergerfs",
        "fuse.squashfuse",
        "fuse.gocryptfs",
        "fuse.encfs",
        "fuse.lxcfs",
    }
)
_SCRATCH_NBYTES = 4 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; Python does not name it
_DAMAGED = (errno.EIO, getattr(errno, "EHWPOISON", 133))
_OCTAL = re.compile(r"\\([0-7]{3})")


def is_network(path: str | os.PathLike) -> bool:
    """Whether a file lies on a network file system, where page faults one by one are slow and many reads at
    once are fast.

    FUSE counts as network but for the ones that are known to be local. False where the system does not tell.
    """
    kind = filesystem_type(path) or ""
    return kind in _NETWORK or ((kind == "fuse" or kind.startswith("fuse.")) and kind not in _LOCAL_FUSE)


def filesystem_type(path: str | os.PathLike, mountinfo: str | None = None) -> str | None:
    """The type of the file system that holds a file (`ext4`, `nfs4`, …), links followed; None where it is
    unknown.

    Args:
        path: The file, which need not exist.
        mountinfo: The text of /proc/self/mountinfo; read where it is not given.
    """
    if mountinfo is None:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
                mountinfo = stream.read()
        except OSError:
            return None
    path = os.path.realpath(path)
    kind = None
    longest = -1
    for line in mountinfo.splitlines():
        mount, _, rest = line.partition(" - ")
        if len(mount.split(" ")) < 5 or not rest:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), mount.split(" ")[4])
        is_within = point == "/" or path == point or path.startswith(f"{point}/")
        if is_within and len(point) >= longest:  # a later mount at the same point hides an earlier one
            kind, longest = rest.split(" ")[0], len(point)
    return kind


def resident_fraction(descriptor: int, source: ByteRange) -> float | None:
    """The share of a range's pages that are in the page cache, 0 to 1; None where the system does not tell.

    Linux tells the owner of a file, and who may write it: to others it calls every page resident.
    """
    libc = _libc()
    if libc is None or not source.nbytes or not _may_ask(descriptor):
        return None
    try:
        with _mapped(libc, descriptor, source) as (address, length):
            pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
            if libc.mincore(address, length, pages):
                return None
    except OSError:
        return None
    return bytes(pages).translate(_LOWEST_BIT).count(1) / len(pages)


def populate(descriptor: int, source: ByteRange, by_reading: bool = False) -> None:
    """Brings a range into the page cache by requests as large as the system takes, without adding to the
    process's memory.

    Args:
        descriptor: The open file.
        source: The range.
        by_reading: Whether to read and throw away, as is best on a network file system; otherwise pages are
            brought in through a map, which copies nothing, and are read only where the system cannot do that.

    Raises:
        CheckpointError: The file ends before the range does, or the disk fails.
    """
    size, end = os.fstat(descriptor).st_size, source.offset + source.nbytes
    if end > size:
        raise changed(source.file, f"{end} bytes", f"{size} bytes")
    libc = None if by_reading else _libc()
    for offset in range(source.offset, end, WINDOW):
        window = ByteRange(source.file, offset, min(WINDOW, end - offset))
        if libc is None or not _fault_in(libc, descriptor, window):
            libc = None
            _read_through(descriptor, window)


def _fault_in(libc: Any, descriptor: int, window: ByteRange) -> bool:
    """Whether the window's pages could be brought in through a map; False on a system that cannot (before
    Linux 5.14).
    """
    try:
        with _mapped(libc, descriptor, window) as (address, length):
            if not libc.madvise(address, length, _MADV_POPULATE_READ):
                return True
            number = ctypes.get_errno()
    except OSError:
        return False
    if (
        number == errno.EFAULT
    ):  # where touching the page would end the process by SIGBUS: the file was cut meanwhile
        raise changed(window.file, f"{window.offset + window.nbytes} bytes", "a shorter file")
    if number in _DAMAGED:
        raise unreadable(window, OSError(number, os.strerror(number)))
    return False


def _read_through(descriptor: int, window: ByteRange) -> None:
    scratch, done = bytearray(min(_SCRATCH_NBYTES, window.nbytes)), 0
    while done < window.nbytes:
        part = memoryview(scratch)[: window.nbytes - done]
        try:
            count = os.preadv(descriptor, [part], window.offset + done)
        except OSError as error:
            raise unreadable(window, error) from error
        if count <= 0:
            raise changed(
                window.file, f"{window.offset + window.nbytes} bytes", f"{window.offset + done} bytes"
            )
        done += count


_LOWEST_BIT = bytes(value & 1 for value in range(256))


def _may_ask(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return os.geteuid() in (0, status.st_uid) or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)


@contextlib.contextmanager
def _mapped(libc: Any, descriptor: int, source: ByteRange) -> Iterator[tuple[int, int]]:
    """(address, bytes) of a passing read-only map of the pages that hold a range."""
    start = source.offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = source.offset + source.nbytes - start
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        yield address, length
    finally:
        libc.munmap(address, length)


@functools.cache
def _libc() -> Any:
    """The C library with the calls used here declared; None on another system than Linux."""
    if sys.platform != "linux":
        return None
    libc: Any = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    integer, offset = ctypes.c_int, ctypes.c_int64  # off_t is asked for in 64 bits by name
    libc.mmap = getattr(libc, "mmap64", libc.mmap)
    libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, integer, integer, integer, offset]
    libc.munmap.argtypes, libc.madvise.argtypes = [pointer, size], [pointer, size, integer]
    libc.mincore.argtypes = [pointer, size, pointer]
    return libc
