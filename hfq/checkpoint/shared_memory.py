"""One copy of a checkpoint's bytes for all processes of a node, in shared memory, whatever becomes of any of
them.

The file of an arena is named by its user and by what it holds. It is filled under a temporary name and
renamed when complete, so that a file under its own name can be used as it is, even after its filler was
killed. A lock (`flock`, which ends with its process) says who needs it:

- the filler holds the exclusive lock on the temporary file; the others wait for it
- every user holds the shared lock on the complete file; the last one to leave, who then gets the exclusive
  one, removes it
- a file of this user without any lock is left over, and is removed when the next arena is opened
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

from hfq.errors import PlacementError

try:
    import fcntl
except ImportError:  # not a POSIX system: there is nothing to share
    fcntl = None  # type: ignore[assignment]

__all__ = ["SharedMemory", "is_abandoned"]

logger = logging.getLogger("hfq")

_FOLDER = "/dev/shm"
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EOPNOTSUPP)


class SharedMemory:
    """A private copy-on-write map of bytes that every process of the node shares until it writes to them.

    It is given up by `close`, or when its memory is not used any more, or when the process ends; the map
    stays valid for who still holds a view of it.

    Attributes:
        memory: The map.
        was_filled: Whether this process filled it.
    """

    def __init__(self, descriptor: int, path: Path, nbytes: int, was_filled: bool) -> None:
        flags, protection = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        self.memory, self.was_filled = mmap.mmap(descriptor, nbytes, flags=flags, prot=protection), was_filled
        self.close = weakref.finalize(self.memory, _leave, descriptor, path, os.getpid())

    @classmethod
    def open(
        cls, key: str, nbytes: int, fill: Callable[[memoryview], None], folder: str | os.PathLike = _FOLDER
    ) -> SharedMemory | None:
        """The arena of this key: filled by the first process that asks, waited for by all others.

        Args:
            key: A digest of everything that the bytes depend on.
            nbytes: The size, above 0.
            fill: Writes all bytes into the memory it is given; whatever it raises is raised here, and nothing
                is left behind.
            folder: The folder of the node's shared memory.

        Returns:
            The arena; or None, with a warning, where there is no room or no shared memory.

        Raises:
            PlacementError: Another user's file is in the way.
        """
        if fcntl is None or not os.path.isdir(folder):
            logger.warning(
                "hfq: no shared memory on this system; %d bytes are kept by each process for itself", nbytes
            )
            return None
        path = Path(folder, f"hfq-{os.getuid()}-{key}")
        part = path.with_name(f"{path.name}.part")
        try:
            _clean(path, part)
            while True:
                buffer = cls._join(path, nbytes) or cls._make(path, part, nbytes, fill)
                if buffer is not None:
                    return buffer
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
    def _join(cls, path: Path, nbytes: int) -> SharedMemory | None:
        """The complete arena, if there is one and it was not removed meanwhile."""
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
                raise _foreign(path, f"{os.fstat(descriptor).st_size} bytes", f"{nbytes} bytes")
            buffer = cls(descriptor, path, nbytes, False)
            undo.pop_all()
        return buffer

    @classmethod
    def _make(
        cls, path: Path, part: Path, nbytes: int, fill: Callable[[memoryview], None]
    ) -> SharedMemory | None:
        """The arena, filled here; or None after another process that was filling it has ended."""
        descriptor = _open_own(part, os.O_RDWR | os.O_CREAT)
        with contextlib.ExitStack() as undo:
            undo.callback(_release, descriptor)
            if not _try_alone(descriptor):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                time.sleep(
                    random.uniform(0, 0.01)
                )  # several who waited for a filler that died must not get in step
                return None
            undo.callback(_remove, descriptor, part)
            if not _is_at(descriptor, part) or os.path.lexists(path):
                return None
            _fill(descriptor, nbytes, fill)
            os.rename(part, path)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            buffer = cls(descriptor, path, nbytes, True)
            undo.pop_all()
        return buffer


class _NoRoom(Exception):
    pass


def _fill(descriptor: int, nbytes: int, fill: Callable[[memoryview], None]) -> None:
    try:
        os.ftruncate(descriptor, 0)  # what a killed filler has left
        os.posix_fallocate(
            descriptor, 0, nbytes
        )  # a write beyond what there is room for would end the process
    except OSError as error:
        if error.errno in _FULL:
            raise _NoRoom(error.strerror) from error
        raise
    fill(memoryview(mmap.mmap(descriptor, nbytes)))


def _open_own(path: Path, flags: int) -> int:
    """Opens a regular file of this user that nobody else may touch.

    Raises:
        FileNotFoundError: There is none.
        PlacementError: It is another user's, or no file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise _NoRoom(error.strerror) from error
        raise _foreign(path, error.strerror) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise _foreign(path, f"mode {stat.filemode(status.st_mode)} of user {status.st_uid}")
    return descriptor


def _foreign(path: Path, found: object, expected: object = None) -> PlacementError:
    return PlacementError(
        "The shared memory of this checkpoint cannot be used. Nothing was loaded.",
        file=path,
        found=found,
        expected=expected or f"a regular file of user {os.getuid()}, mode -rw-------",
        fix='remove this file, or pass HfqConfig(cpu_memory="private")',
    )


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of this name."""
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
    """Gives up the lock; the last one out removes the file. A child of a fork, which shares its parent's
    lock, leaves nothing.
    """
    if os.getpid() != owner:
        return
    if _try_alone(descriptor):
        _remove(descriptor, path)
    _release(descriptor)


def _release(descriptor: int) -> None:
    """Gives up the lock by name, since a map that something still refers to keeps a copy of the
    descriptor.
    """
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_abandoned(path: Path) -> bool:
    """Whether a file of shared memory is this user's, and no process holds a lock on it."""
    if fcntl is None:
        return False
    try:
        descriptor = _open_own(path, os.O_RDWR)
    except (OSError, PlacementError):
        return False
    try:
        return _try_alone(descriptor)
    finally:
        os.close(descriptor)


def _clean(path: Path, part: Path) -> None:
    """Removes this user's files that no process holds a lock on, but for the two that are about to be
    used.
    """
    for stale in path.parent.glob(f"hfq-{os.getuid()}-*"):
        if stale in (path, part):
            continue
        with contextlib.suppress(OSError, PlacementError):
            descriptor = _open_own(stale, os.O_RDWR)
            try:
                if _try_alone(descriptor):
                    _remove(descriptor, stale)
            finally:
                os.close(descriptor)
