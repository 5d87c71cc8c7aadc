"""Saves that leave a whole checkpoint, or nothing new."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from hfq.errors import CheckpointError
from hfq.formats.configs.source_config import SIDE_FILES
from hfq.tensor_spec import TensorInfo

__all__ = ["least_nbytes", "staged_save", "target_of", "whole_save"]

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
_HIDDEN = re.compile(r"\.save\.[a-z0-9_]{8}\.tmp")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors")
_FLOATS = ("F64", "F32", "F16", "BF16")
_OF_A_SAVE = re.compile(
    r"(model|adapter_model)[\w.-]*\.safetensors(\.index\.json)?|(config|generation_config|adapter_config)\.json"
)


@contextlib.contextmanager
def staged_save(folder: str | os.PathLike) -> Iterator[str]:
    """A context manager that yields a hidden folder for the files of a save.

    At the end, these files replace those of `folder`. An error leaves `folder` as it was. So does a killed
    process, which leaves the hidden folder behind.

    Args:
        folder: Destination of the save, created if it is absent.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    was_there = os.path.isdir(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        hidden = tempfile.mkdtemp(prefix=".save.", suffix=".tmp", dir=folder)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise _failed(Path(folder), 0, str(error), "Nothing was written.") from error
    try:
        yield hidden
        _replace(Path(hidden), Path(folder))
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # fails if anything is in it


def _replace(source: Path, target: Path) -> None:
    """Moves the weights first, the configs last; removes files of an older save."""
    mode = _mode_of_new_files(source)
    files = sorted(source.iterdir(), key=lambda file: (file.suffix == ".json", file.name))
    for file in files:
        if file.is_dir():
            shutil.copytree(file, target / file.name, dirs_exist_ok=True)
        else:
            os.chmod(file, mode)  # safetensors writes files that only the user can read
            os.replace(file, target / file.name)
    written = {file.name for file in files}
    stems = {_stem(name) for name in written if name.endswith(".safetensors")}
    replaced = {name for stem in stems for name in (f"{stem}.safetensors", _index_name(stem))}
    for file in target.iterdir():
        is_shard = _SHARD.fullmatch(file.name) is not None and _stem(file.name) in stems
        if (is_shard or file.name in replaced) and file.name not in written:
            file.unlink()


def _mode_of_new_files(folder: Path) -> int:
    """Returns the permissions that the umask gives to a new file."""
    probe = folder / ".mode"
    with open(probe, "xb") as stream:
        mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
    probe.unlink()
    return mode


def _index_name(stem: str) -> str:
    """Returns the name of the index of shards, as transformers names it: a variant comes last."""
    base, _, variant = stem.partition(".")
    return f"{base}.safetensors.index.{variant}.json" if variant else f"{base}.safetensors.index.json"


def _stem(name: str) -> str:
    shard = _SHARD.fullmatch(name)
    return shard["stem"] if shard else name.removesuffix(".safetensors")


def least_nbytes(tensors: Iterable[TensorInfo], itemsize: int) -> int:
    """Returns a lower bound on the bytes that a save of a model writes.

    Args:
        tensors: Stored tensors of the model.
        itemsize: Bytes of an element of the model's dtype, to which floats may have been cast.
    """
    return sum(_least(info, itemsize) for info in tensors)


def _least(info: TensorInfo, itemsize: int) -> int:
    return min(info.nbytes, info.numel * itemsize) if info.dtype in _FLOATS else info.nbytes


@contextlib.contextmanager
def whole_save(folder: Path, nbytes: int) -> Iterator[None]:
    """A context manager for a save, which checks the free space before anything is written.

    If the disk fails nevertheless, files are removed that a save writes and that were not there before.

    Args:
        folder: Destination of the save, which need not exist.
        nbytes: Bytes that the save will write at least.

    Raises:
        CheckpointError: The disk has too little space, or fails.
    """
    before = set(os.listdir(folder)) if folder.is_dir() else None
    free = _free_nbytes(folder)
    if free < nbytes:
        raise _failed(folder, nbytes, f"{free:,} bytes", "Nothing was written.")
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in _DISK:
            raise
        _remove_new(folder, before)
        found = f"{error}; {free:,} bytes were free"
        raise _failed(folder, nbytes, found, "New files of this save were removed.") from error


def _free_nbytes(folder: Path) -> int:
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    usage = shutil.disk_usage(existing)
    return usage.free if usage.total else sys.maxsize  # some network file systems report no size at all


def _remove_new(folder: Path, before: set[str] | None) -> None:
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            is_of_a_save = entry.name in SIDE_FILES or _OF_A_SAVE.fullmatch(entry.name)
            if is_of_a_save and entry.name not in (before or ()) and entry.is_file(follow_symlinks=False):
                os.unlink(entry)
        if before is None:
            folder.rmdir()  # fails if anything else is in it


def target_of(folder: Path) -> Path:
    """Returns the destination of a save that writes into this folder, which may be a hidden one."""
    return folder.parent if _HIDDEN.fullmatch(folder.name) else folder


def _failed(folder: Path, nbytes: int, found: str, left: str) -> CheckpointError:
    return CheckpointError(
        f"The model cannot be saved. {left}",
        file=target_of(folder),
        expected=f"{nbytes:,} bytes of free space in a writable folder" if nbytes else "a writable folder",
        found=found,
        fix="Free disk space, or choose another folder.",
    )
