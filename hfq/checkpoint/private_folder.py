"""Folders into which only this user and root can write.

A folder is as private as each folder on its way: who can write to a parent can replace the folder. Each
folder is opened by name within its parent's descriptor, so that none is exchanged between its check and its
use.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from hfq.errors import SetupError

__all__ = ["NotPrivateError", "check_own", "private_folder", "user_cache"]

_MOST_LINKS = 40
_AS_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)


class NotPrivateError(OSError):
    """Error for a file or a folder that another user owns or can write to."""


def user_cache() -> Path:
    """Returns the folder `hfq` in the user's cache folder, which may not exist.

    Raises:
        SetupError: The user has no home directory.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfq"
    except RuntimeError as error:  # no $HOME, and no entry in passwd
        raise SetupError(
            "hfq has no folder for its cache.",
            expected="XDG_CACHE_HOME, or a home directory",
            found=error,
            fix="Set XDG_CACHE_HOME to a folder that only you can write to.",
        ) from error


def private_folder(folder: str | os.PathLike) -> Path:
    """Creates a folder where it is missing, checks it, and returns its path without links.

    Each folder on the way must belong to this user or root, and nobody else may write to it. In a folder with
    the sticky bit, such as /tmp, others may create files, but not replace those of this user. A link is
    followed if it belongs to this user or root.

    Raises:
        NotPrivateError: Another user can write to the folder, or can replace it.
        OSError: The folder cannot be created.
    """
    if not hasattr(os, "geteuid"):  # this system has no owners and modes of files
        Path(folder).mkdir(parents=True, exist_ok=True)
        return Path(folder)
    resolved, links = Path("/"), 0
    pending = _parts(Path(os.path.abspath(folder)))
    descriptor = os.open("/", _AS_FOLDER)
    try:
        while pending:
            check_own(os.fstat(descriptor), resolved, allows_sticky=True)
            name = pending.pop()
            status = _status(name, descriptor)
            if stat.S_ISLNK(status.st_mode):
                check_own(status, resolved / name)
                links += 1
                if links > _MOST_LINKS:
                    raise NotPrivateError(f"{folder} has too many links")
                target = Path(os.readlink(name, dir_fd=descriptor))
                pending += _parts(target)
                if not target.is_absolute():
                    continue
                name, resolved = "/", Path("/")
            inner = os.open(name, _AS_FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
            resolved = resolved.parent if name == ".." else resolved / name
        check_own(os.fstat(descriptor), resolved)
    finally:
        os.close(descriptor)
    return resolved


def check_own(status: os.stat_result, path: Path, allows_sticky: bool = False) -> None:
    """Raises an error unless only this user and root can change a file or a folder.

    Args:
        status: The status of the file, of an open descriptor or of a link.
        path: Its path, for messages.
        allows_sticky: True if others may write to a folder with the sticky bit.

    Raises:
        NotPrivateError: Another user owns the file or can write to it.
    """
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (0, os.geteuid()):
        raise NotPrivateError(f"user {status.st_uid} owns {path}")
    is_sticky = allows_sticky and bool(status.st_mode & stat.S_ISVTX)
    if status.st_mode & 0o022 and not is_sticky and not stat.S_ISLNK(status.st_mode):
        raise NotPrivateError(f"other users can write to {path}")


def _parts(path: Path) -> list[str]:
    """Returns the names of a path after its root, the last one first."""
    return [part for part in reversed(path.parts) if part != path.anchor]


def _status(name: str, parent: int) -> os.stat_result:
    """Returns the status of a name in a folder, which is created if there is none."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(name, 0o700, dir_fd=parent)
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
