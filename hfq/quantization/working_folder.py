"""Folder that one process of this user writes, and in which it removes only what hfq made."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from hfq.errors import CheckpointError, SetupError

__all__ = ["WorkingFolder"]

logger = logging.getLogger(__name__)

_MOST_NAMED = 5
_MOST_NBYTES = 1 << 30


class WorkingFolder:
    """An open and locked folder. Files are listed, read, and removed through its descriptor.

    So a link, or another folder that takes its name meanwhile, is never followed.

    Args:
        path: The folder, which exists.
        purpose: Sentence part for messages: what the folder is used for.

    Raises:
        CheckpointError: It is a link, a file, or the folder of another user.
        SetupError: Another process uses it.
    """

    def __init__(self, path: Path, purpose: str) -> None:
        self.path, self.purpose = path, purpose
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            found = "a symbolic link" if path.is_symlink() else error.strerror
            raise self._unusable(found) from error
        self.close = weakref.finalize(self, os.close, self._descriptor)  # also releases the lock
        try:
            owner = os.fstat(self._descriptor).st_uid
            if owner != os.geteuid():
                raise self._unusable(f"a folder of user {owner}")
            self._lock()
        except BaseException:
            self.close()
            raise

    def check_names(self, is_made_by_hfq: Callable[[str], bool]) -> list[str]:
        """Returns the names of all files, which must be regular files that hfq makes.

        Raises:
            CheckpointError: It holds something else, which is left as it is.
        """
        with os.scandir(self._descriptor) as entries:
            kinds = {
                entry.name: entry.is_file(follow_symlinks=False) and is_made_by_hfq(entry.name)
                for entry in entries
            }
        foreign = sorted(name for name, is_own in kinds.items() if not is_own)
        if foreign:
            more = f", and {len(foreign) - _MOST_NAMED} more" if len(foreign) > _MOST_NAMED else ""
            raise self._unusable(f"{', '.join(foreign[:_MOST_NAMED])}{more}")
        return list(kinds)

    def remove(self, names: Iterable[str]) -> None:
        """Removes files by name."""
        for name in names:
            os.unlink(name, dir_fd=self._descriptor)

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of a file; None if it does not exist.

        Raises:
            OSError: It is not a regular file of this folder, is too large, or cannot be read. Pipes and
                devices are never waited for.
        """
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("not a regular file")
            if status.st_size > _MOST_NBYTES:
                raise OSError(f"{status.st_size:,} bytes")
            return stream.read()

    def _lock(self) -> None:
        """Locks the folder against other processes, until this one ends."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_renamed = not _is_same(self._descriptor, self.path)  # by the process that held the lock
        except BlockingIOError:
            is_renamed = True
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s). Do not start a second process for it.", self.path, error.strerror
            )
            return
        if is_renamed:
            raise SetupError(
                f"Another process is {self.purpose}. Nothing was changed.",
                file=self.path,
                expected="one process for each folder",
                found="a locked folder",
                fix="Wait for the other process, or choose another folder.",
            )

    def _unusable(self, found: object) -> CheckpointError:
        return CheckpointError(
            f"{self.path.name} cannot be used for {self.purpose}. Nothing was changed.",
            file=self.path,
            expected="no such folder, or a folder of this user with files of hfq alone",
            found=found,
            fix="Move this folder or its other files elsewhere, or choose another output folder.",
        )


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False
