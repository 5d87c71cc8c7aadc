"""File system types, page cache residency of files, and reads into the page cache.

Functions return None or False if the system cannot tell. Calls go through ctypes, which lets other threads
run meanwhile (`mmap.madvise` does not).
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

__all__ = ["WINDOW", "filesystem_type", "is_network", "populate", "resident_fraction", "resident_pages"]

WINDOW = 16 << 20
"""Bytes that are read into the page cache per step.

It is large enough for a disk's full speed, and small compared with a process's memory.
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
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_MADV_POPULATE_READ = 22  # Linux 5.14; Python does not name it
_DAMAGED = (errno.EIO, getattr(errno, "EHWPOISON", 133))
_OCTAL = re.compile(r"\\([0-7]{3})")


def is_network(path: str | os.PathLike) -> bool:
    """Returns True if a file is on a network file system.

    There, single page faults are slow, and many parallel reads are fast. FUSE counts as network, except for
    types that are known to be local. False if the system does not tell.
    """
    kind = filesystem_type(path) or ""
    return kind in _NETWORK or ((kind == "fuse" or kind.startswith("fuse.")) and kind not in _LOCAL_FUSE)


def filesystem_type(path: str | os.PathLike, mountinfo: str | None = None) -> str | None:
    """Returns the type of a file's file system (`ext4`, `nfs4`, …), or None if unknown.

    Args:
        path: The file, which need not exist.
        mountinfo: The text of /proc/self/mountinfo; None reads it.
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
    """Returns the share of a range's pages in the page cache, 0 to 1, or None if unknown."""
    pages = resident_pages(descriptor, source)
    return None if pages is None else pages.count(1) / len(pages)


def resident_pages(descriptor: int, source: ByteRange) -> bytes | None:
    """Returns a byte for each page of a range, 1 if it is in the page cache; None if unknown.

    Linux answers only the owner of a file and those who may write to it. For others every page is reported as
    resident.
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
    return bytes(pages).translate(_LOWEST_BIT)


def populate(descriptor: int, source: ByteRange, by_reading: bool = False) -> None:
    """Reads a range into the page cache without adding to the process's memory.

    Args:
        descriptor: The open file.
        source: The range.
        by_reading: True to read and discard, which suits network file systems. False to fault pages in
            through
            a map, which copies nothing; pages are read if the system cannot do that.

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
    """Returns True if the window's pages were faulted in through a map; needs Linux 5.14.

    Asks for huge pages, so that file systems which keep them for files (xfs, and ext4 since Linux 6.16) read
    2 MiB at a time, independent of the read-ahead of the disk.
    """
    try:
        with _mapped(libc, descriptor, window) as (address, length):
            libc.madvise(address, length, _MADV_HUGEPAGE)
            if not libc.madvise(address, length, _MADV_POPULATE_READ):
                return True
            number = ctypes.get_errno()
    except OSError:
        return False
    # the file was truncated meanwhile, and touching the page would end the process by SIGBUS
    if number == errno.EFAULT:
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
    """Yields (address, bytes) of a temporary read-only map of the pages that hold a range."""
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
    """Returns the C library with the calls used here declared, or None on other systems."""
    if sys.platform != "linux":
        return None
    libc: Any = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    integer, offset = ctypes.c_int, ctypes.c_int64  # off_t has 64 bits in these functions
    libc.mmap = getattr(libc, "mmap64", libc.mmap)
    libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, integer, integer, integer, offset]
    libc.munmap.argtypes, libc.madvise.argtypes = [pointer, size], [pointer, size, integer]
    libc.mincore.argtypes = [pointer, size, pointer]
    return libc
