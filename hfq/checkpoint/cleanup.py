"""Leftovers of killed runs: temporary files and folders, and unused shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hfq.checkpoint.shared_memory import is_abandoned

__all__ = ["Leftover", "find_leftovers"]

_TEMPORARY = re.compile(r"^\..+\.[a-z0-9_]{8}\.tmp$")
_CALIBRATION = re.compile(r"^\.hfq-calibrate-[a-z0-9_]{8}$")
_DESCRIBED = re.compile(r"^hfq-[a-z0-9_]{8}$")
_HOUR = 3600.0
_LOAD = 'a load with reader_ranks="rank0", or hfq plan'


@dataclass(frozen=True)
class Leftover:
    """A file or folder that can be removed.

    Attributes:
        path: Path of the file or folder.
        nbytes: Size in bytes.
        what: The command or action that made it.
    """

    path: Path
    nbytes: int
    what: str

    def remove(self) -> None:
        """Removes the file or folder; does nothing if it is already gone."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.is_dir() and not self.path.is_symlink():
                shutil.rmtree(self.path)
            else:
                self.path.unlink()


def find_leftovers(
    folders: Iterable[Path], shared: Path = Path("/dev/shm"), least_age: float = _HOUR
) -> list[Leftover]:
    """Returns this user's unused leftovers in folders, the temporary folder, and shared memory.

    A file is in use if a process has it open. Files written within the last `least_age` seconds are skipped,
    too.

    Args:
        folders: Checkpoint folders and their parents. Their subfolders are not searched.
        shared: Folder of the node's shared memory.
        least_age: Least time since the last write, in seconds.
    """
    in_use, now = set(_open_files()), time.time()
    found = []
    for path, what in _candidates(folders):
        folders_of_it, files = _parts(path, what)
        status = [each.lstat() for each in (*folders_of_it, *files)]
        is_plain = all(each.is_file() and not each.is_symlink() for each in files)
        is_own = all(each.st_uid == os.getuid() for each in status)
        is_old = now - max(each.st_mtime for each in status) >= least_age
        if is_plain and is_own and is_old and not any(str(each.resolve()) in in_use for each in files):
            found.append(Leftover(path, sum(each.st_size for each in status[len(folders_of_it) :]), what))
    for path in sorted(shared.glob(f"hfq-{os.getuid()}-*")) if shared.is_dir() else []:
        if is_abandoned(path):
            found.append(Leftover(path, path.stat().st_size, "shared memory of a load"))
    return found


def _parts(path: Path, what: str) -> tuple[list[Path], list[Path]]:
    """Returns the folders of a leftover, and the entries of the innermost one.

    A load nests a folder with the checkpoint's name in its temporary folder.
    """
    if not path.is_dir():
        return [], [path]
    entries = list(path.iterdir())
    if what == _LOAD and len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink():
        return [path, entries[0]], list(entries[0].iterdir())
    return [path], entries


def _candidates(folders: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            if entry.is_symlink():
                continue
            if _TEMPORARY.match(entry.name):
                if entry.is_dir():
                    yield entry, "a save" if entry.name.startswith(".save.") else "hfq reshard"
                elif ".headers.zip." in entry.name:
                    yield entry, "hfq plan"
                elif ".safetensors." in entry.name or ".json." in entry.name:
                    yield entry, "a save"
            elif _CALIBRATION.match(entry.name) and entry.is_file():
                yield entry, "hfq profile-machine"
    for entry in sorted(Path(tempfile.gettempdir()).iterdir()):
        if _DESCRIBED.match(entry.name) and entry.is_dir() and not entry.is_symlink():
            yield entry, _LOAD


def _open_files() -> Iterator[str]:
    """Yields the files that processes have open, as far as this user may read /proc."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for descriptor in folder.iterdir():
                with contextlib.suppress(OSError):
                    yield os.readlink(descriptor)
