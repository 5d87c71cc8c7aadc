"""Files that a user asks for: each is written whole, or an error leaves the old one."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from hfq.errors import SetupError

__all__ = ["check_output_file", "replace_file", "write_output_file"]


def check_output_file(file: str | os.PathLike) -> None:
    """Creates the folder of a file if it is missing, and checks that the file can be written.

    Commands call it before long work whose result the file will hold.

    Raises:
        SetupError: The folder is not writable, or the path is that of a folder.
        OSError: The folder cannot be created.
    """
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.is_dir():
            raise IsADirectoryError("Is a directory")
        if _is_replaced(path):
            temporary = _temporary(path.resolve())
            temporary.touch(exist_ok=False)
            temporary.unlink()
    except OSError as error:
        raise _unwritable(path, "a file in a writable folder", error) from error


def write_output_file(file: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file under a hidden name and renames it; text is written as UTF-8.

    A link stays, and its target is replaced. Devices and pipes are written to directly.

    Args:
        file: The file to create or replace.
        content: All of its content.

    Raises:
        SetupError: The disk is full or not writable. An old file keeps its content, and nothing is left
            behind.
    """
    path, content = Path(file), content.encode("utf-8") if isinstance(content, str) else content
    try:
        if _is_replaced(path):
            replace_file(path.resolve(), content)
        else:
            path.write_bytes(content)
    except OSError as error:
        expected = f"{len(content):,} bytes of free space in a writable folder"
        raise _unwritable(path, expected, error) from error


def _is_replaced(path: Path) -> bool:
    """Returns True unless the path is that of a device or a pipe."""
    return path.is_file() or not path.exists()


def replace_file(path: Path, content: bytes | memoryview, is_durable: bool = False) -> None:
    """Writes a file under a hidden name and renames it.

    Args:
        path: The file to create or replace, which is no link.
        content: All of its content.
        is_durable: True to wait until the disk has it before the old file is replaced.

    Raises:
        OSError: The disk is full or not writable. An old file keeps its content, and nothing is left behind.
    """
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as stream:
            stream.write(content)
            if is_durable:
                stream.flush()
                os.fsync(stream.fileno())
        if path.exists():
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    """Returns a new hidden name in the same folder, of a form that `hfq doctor` removes."""
    return path.parent / f".hfq-output.{secrets.token_hex(4)}.tmp"


def _unwritable(path: Path, expected: str, error: OSError) -> SetupError:
    return SetupError(
        "The file could not be written. Nothing was left behind, and an old file is unchanged.",
        file=path,
        expected=expected,
        found=error.strerror or error,
        fix="Free space, or pass another path.",
    )
