"""One copy of a checkpoint's bytes in shared memory, for all processes of a node.

The file is named after its user and its contents. It is filled under a temporary name and renamed when it is
complete. So a file under its final name is complete, even if the process that filled it was killed. If
another user has taken the name, which is predictable, the next of some names is used. A lock (`flock`, which
ends with its process) tells which processes use it:

- the process that fills it holds the exclusive lock on the temporary file; the others wait for it
- every user holds the shared lock on the complete file; the last one to leave gets the exclusive lock, and
  removes the file
- a file of this user without a lock is a leftover, and is removed when the next one is opened
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import random
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX system, hence no shared memory
    fcntl = None  # type: ignore[assignment]

__all__ = ["SharedMemory", "is_abandoned"]

logger = logging.getLogger("hfq")

_FOLDER = "/dev/shm"
_MOST_NAMES = 8
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EOPNOTSUPP)


class SharedMemory:
    """A map of bytes that the processes of a node share.

    It is released by `close`, when its memory is no longer used, or when the process ends. The map stays
    valid
    while a view of it exists.

    Attributes:
        memory: The map.
        was_filled: True if this process filled it.
    """

    def __init__(self, descriptor: int, path: Path, nbytes: int, was_filled: bool, is_private: bool) -> None:
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if is_private else mmap.MAP_SHARED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self.memory, self.was_filled = mmap.mmap(descriptor, nbytes, flags=flags, prot=protection), was_filled
        self.close = weakref.finalize(self.memory, _leave, descriptor, path, os.getpid())

    @classmethod
    def open(
        cls,
        key: str,
        nbytes: int,
        fill: Callable[[memoryview], None],
        folder: str | os.PathLike = _FOLDER,
        is_private: bool = True,
    ) -> SharedMemory | None:
        """Opens the shared memory of a key: the first process fills it, and all others wait.

        Args:
            key: A digest of everything that the bytes depend on.
            nbytes: The size, above 0.
            fill: Writes all bytes into the memory it receives. Its error is raised here, and nothing is left
                behind.
            folder: The folder of the node's shared memory.
            is_private: True for a copy-on-write map. Pinning such a map would copy its pages.

        Returns:
            The shared memory; None, with a warning, if there is no room, no shared memory, or no free name.
        """
        if fcntl is None or not os.path.isdir(folder):
            logger.warning(
                "hfq: this system has no shared memory; each process keeps its own %d bytes", nbytes
            )
            return None
        try:
            for number in range(_MOST_NAMES):
                path = Path(folder, f"hfq-{os.getuid()}-{key}{f'-{number}' if number else ''}")
                try:
                    return cls._open_at(path, nbytes, fill, is_private)
                except _Taken as error:
                    logger.warning("hfq: shared memory cannot use the name %s: %s", path, error)
        except _NoRoom as error:
            status = os.statvfs(folder)
            logger.warning(
                "hfq: shared memory has no room (%s): %d bytes needed, %d free in %s; each process keeps its "
                "own copy",
                error,
                nbytes,
                status.f_bavail * status.f_frsize,
                folder,
            )
        return None

    @classmethod
    def _open_at(
        cls, path: Path, nbytes: int, fill: Callable[[memoryview], None], is_private: bool
    ) -> SharedMemory:
        part = path.with_name(f"{path.name}.part")
        _clean(path, part)
        while True:
            buffer = cls._join(path, nbytes, is_private) or cls._make(path, part, nbytes, fill, is_private)
            if buffer is not None:
                return buffer

    @classmethod
    def _join(cls, path: Path, nbytes: int, is_private: bool) -> SharedMemory | None:
        """Returns the complete shared memory, or None if there is none or it was removed meanwhile."""
        try:
            descriptor = _open_own(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        with contextlib.ExitStack() as undo:
            undo.callback(_release, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not _is_at(descriptor, path):
                return None
            if os.fstat(descriptor).st_size != nbytes:
                raise _Taken(f"it has {os.fstat(descriptor).st_size} bytes instead of {nbytes}")
            buffer = cls(descriptor, path, nbytes, False, is_private)
            undo.pop_all()
        return buffer

    @classmethod
    def _make(
        cls, path: Path, part: Path, nbytes: int, fill: Callable[[memoryview], None], is_private: bool
    ) -> SharedMemory | None:
        """Returns the shared memory, filled here.

        None after another process that filled it has ended.
        """
        descriptor = _open_own(part, os.O_RDWR | os.O_CREAT)
        with contextlib.ExitStack() as undo:
            undo.callback(_release, descriptor)
            if not _try_alone(descriptor):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                time.sleep(
                    random.uniform(0, 0.01)
                )  # random, so that processes that waited for a killed one do not retry in step
                return None
            undo.callback(_remove, descriptor, part)
            if not _is_at(descriptor, part) or os.path.lexists(path):
                return None
            _fill(descriptor, nbytes, fill)
            os.rename(part, path)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            buffer = cls(descriptor, path, nbytes, True, is_private)
            undo.pop_all()
        return buffer


class _NoRoom(Exception):
    pass


class _Taken(Exception):
    """Error for a file that is not a regular file of this user alone, or of another size."""


def _fill(descriptor: int, nbytes: int, fill: Callable[[memoryview], None]) -> None:
    try:
        os.ftruncate(descriptor, 0)  # the rest of a killed process
        os.posix_fallocate(
            descriptor, 0, nbytes
        )  # a write beyond the available room would end the process by SIGBUS
    except OSError as error:
        if error.errno in _FULL:
            raise _NoRoom(error.strerror) from error
        raise
    fill(memoryview(mmap.mmap(descriptor, nbytes)))


def _open_own(path: Path, flags: int) -> int:
    """Opens a regular file of this user that no other user can access.

    Raises:
        FileNotFoundError: There is none.
        _Taken: It belongs to another user, or is not a regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise _NoRoom(error.strerror) from error
        raise _Taken(error.strerror) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise _Taken(f"it has mode {stat.filemode(status.st_mode)} and belongs to user {status.st_uid}")
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns True if the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _try_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(descriptor: int, path: Path) -> None:
    if _is_at(descriptor, path):
        os.unlink(path)


def _leave(descriptor: int, path: Path, owner: int) -> None:
    """Releases the lock; the last process removes the file.

    The child of a fork shares its parent's lock, and removes nothing.
    """
    if os.getpid() != owner:
        return
    if _try_alone(descriptor):
        _remove(descriptor, path)
    _release(descriptor)


def _release(descriptor: int) -> None:
    """Unlocks explicitly, since a map that is still referenced keeps a copy of the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_abandoned(path: Path) -> bool:
    """Returns True if a file of shared memory belongs to this user, and no process locks it."""
    if fcntl is None:
        return False
    try:
        descriptor = _open_own(path, os.O_RDWR)
    except (OSError, _Taken):
        return False
    try:
        return _try_alone(descriptor)
    finally:
        os.close(descriptor)


def _clean(path: Path, part: Path) -> None:
    """Removes this user's unlocked files, except for the two that are about to be used."""
    for stale in path.parent.glob(f"hfq-{os.getuid()}-*"):
        if stale in (path, part):
            continue
        with contextlib.suppress(OSError, _Taken):
            descriptor = _open_own(stale, os.O_RDWR)
            try:
                if _try_alone(descriptor):
                    _remove(descriptor, stale)
            finally:
                os.close(descriptor)
