"""Writes a checkpoint folder completely or not at all.

The folder is written under a temporary name next to the final one. Its room is allocated first; then it is
synced, checked, and renamed. safetensors forbids holes between tensors, so headers are padded with spaces: a
shard's data starts at a multiple of 4096 bytes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hfq.checkpoint.header import Header
from hfq.checkpoint.index import _DANGEROUS_SUFFIXES, Checkpoint, _check_contained
from hfq.checkpoint.reader import Reader
from hfq.checkpoint.small_file import open_regular
from hfq.errors import CheckpointError
from hfq.tensor_spec import DTYPE_BITS, SEGMENT_ALIGNMENT, ByteRange, TensorInfo

__all__ = [
    "INDEX",
    "JOURNAL",
    "Made",
    "NewFile",
    "check_target",
    "in_order",
    "index_file",
    "module_of",
    "shard_head",
    "side_files",
    "sync_folder",
    "taken",
    "write_folder",
]

INDEX = "model.safetensors.index.json"
JOURNAL = ".hfq-journal.json"
"""Journal of an unfinished quantization, which is no part of a checkpoint."""

_DATA_ALIGNMENT = 4096
_CHUNK_NBYTES = 16 << 20
_EXPERT = re.compile(r"(?:.*\.)?experts\.[0-9]+(?=\.|$)")
_ANY_INDEX = re.compile(r".*\.(safetensors|bin)\.index(\..*)?\.json")


@dataclass(frozen=True)
class Made:
    """Bytes that are computed when they are written, so that only one of them is in memory."""

    nbytes: int
    make: Callable[[], memoryview]


@dataclass(frozen=True)
class NewFile:
    """A file to write: its first bytes, then ranges of the source and bytes computed from it."""

    name: str
    head: bytes
    parts: tuple[ByteRange | Made, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the whole file."""
        return len(self.head) + sum(part.nbytes for part in self.parts)


def write_folder(
    target: Path,
    source: Checkpoint,
    files: Sequence[NewFile],
    copied: Mapping[str, Header],
    check: Callable[[Path], None],
    progress: Callable[[int], None] | None = None,
) -> int:
    """Writes a folder of files.

    Everything is written to a temporary folder next to `target`, whose whole size is allocated first. It is
    then
    synced, checked, and renamed. A failure or an interrupt leaves nothing behind.

    Args:
        target: The folder to create, as returned by `check_target`.
        source: The checkpoint to which ranges refer.
        files: The files to write.
        copied: Files of the source's folder to copy unchanged (see `side_files`).
        check: Called with the temporary folder before it is renamed; raises an error if the folder is wrong.
        progress: Called with the bytes of `files` written since its last call.

    Returns:
        The bytes of all files.

    Raises:
        CheckpointError: The disk is full or not writable, or the source changed meanwhile.
    """
    others = [
        NewFile(Path(file).name, b"", (ByteRange(file, 0, header.nbytes),)) for file, header in copied.items()
    ]
    watched = replace(source, headers={**source.headers, **copied})
    needed, free = sum(file.nbytes for file in (*files, *others)), shutil.disk_usage(target.parent).free
    try:
        with tempfile.TemporaryDirectory(".tmp", f".{target.name}.", target.parent, True) as temporary:
            folder = Path(temporary, target.name)
            folder.mkdir()
            _reserve(folder, [*files, *others], is_enough=free >= needed)
            reader = Reader(watched)
            _copy(folder, files, reader, progress or (lambda nbytes: None))
            _copy(folder, others, reader, lambda nbytes: None)
            sync_folder(folder)
            check(folder)
            _check_unchanged(watched)
            os.rename(folder, target)
    except OSError as error:
        raise CheckpointError(
            "The new checkpoint could not be written. Nothing was left behind.",
            file=target,
            expected=f"{needed} bytes of free space in a writable folder",
            found=f"{error.strerror}; {free} bytes were free",
            fix="Free space, or choose another folder.",
        ) from error
    sync_folder(target.parent)
    return needed


def check_target(source: Checkpoint, target: str | os.PathLike, marker: str | None = None) -> Path:
    """Returns the real path of a folder to create: absent or empty, and outside the source.

    Args:
        source: The checkpoint that is read.
        target: The folder.
        marker: Name of a file that marks a folder of an interrupted run, which may have content.

    Raises:
        CheckpointError: It is not empty, is inside the source, or its parent folder does not exist.
    """
    typed, target = Path(target), Path(os.path.realpath(target))
    if target.is_relative_to(os.path.realpath(source.root)):
        raise CheckpointError(
            "A checkpoint cannot be written into its source.",
            file=typed,
            expected=f"a folder outside {source.root}",
            found="a folder inside it",
            fix="Choose another folder.",
        )
    is_marked = marker is not None and os.path.lexists(target / marker)
    is_taken = not target.is_dir() or any(target.iterdir()) or os.path.ismount(target)
    if os.path.lexists(target) and is_taken and not is_marked:
        raise taken(typed)
    if not target.parent.is_dir():
        raise CheckpointError(
            "The parent folder of the new checkpoint does not exist. Nothing was written.",
            file=typed,
            expected=f"the folder {typed.parent}",
            found="no such folder",
            fix="Create it, or choose another folder.",
        )
    return target


def taken(target: Path) -> CheckpointError:
    """Returns the error for a target that is neither absent nor empty."""
    is_mount = os.path.ismount(target)
    found = "a mount point" if is_mount else "a folder with content" if target.is_dir() else "a file"
    named = target if target.name not in ("", "..") else target.resolve()
    return CheckpointError(
        "The folder of the new checkpoint cannot be used. Nothing was written.",
        file=target,
        expected="nothing, or an empty folder",
        found=found,
        fix=f"Choose a new folder, for example {target / 'new' if is_mount else f'{named}-new'}.",
    )


def in_order(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Returns an order of a shard's tensors in which each is aligned to its element size.

    Runs of tensors are sorted by the power of two, up to 16, that divides all sizes of a run, largest first.
    So
    it divides the start of every tensor of the run, regardless of the runs before. Within a run it is at
    least
    the widest element size.
    """
    modules: dict[str, list[TensorInfo]] = {}
    for info in infos:
        modules.setdefault(module_of(info), []).append(info)
    units: dict[str, list[TensorInfo]] = {}
    for module, tensors in modules.items():
        expert = _EXPERT.match(module)
        units.setdefault(expert[0] if expert else module, []).extend(tensors)
    runs = []
    for unit in units.values():
        widest = max(DTYPE_BITS[info.dtype] // 8 for info in unit) or 1
        runs.append([info for info in unit if info.nbytes % widest == 0])
        runs += [[info] for info in unit if info.nbytes % widest]
    runs.sort(key=lambda run: math.gcd(SEGMENT_ALIGNMENT, *(info.nbytes for info in run)), reverse=True)
    return [info for run in runs for info in run]


def module_of(info: TensorInfo) -> str:
    """Returns the module of a tensor, from its name."""
    return info.name.rpartition(".")[0]


def shard_head(infos: Iterable[TensorInfo], metadata: dict[str, str]) -> bytes:
    """Returns the header of a shard that holds these tensors in this order."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for info in infos:
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": info.shape,
            "data_offsets": [end, end + info.nbytes],
        }
        end += info.nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % _DATA_ALIGNMENT)
    return struct.pack("<Q", len(raw)) + raw


def index_file(shards: Mapping[str, Iterable[TensorInfo]]) -> NewFile:
    """Returns `model.safetensors.index.json` for the tensors of each shard."""
    weight_map = {info.name: shard for shard, infos in shards.items() for info in infos}
    total = sum(info.nbytes for infos in shards.values() for info in infos)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return NewFile(INDEX, json.dumps(index, indent=2).encode())


def side_files(source: Checkpoint) -> tuple[dict[str, Header], list[str]]:
    """Returns the files to copy unchanged, and the names that are left out.

    Each file is given as a header without tensors, which holds its identity.
    """
    copied: dict[str, Header] = {}
    left_out = []
    for path in sorted(Path(source.root).iterdir()):
        if path.is_dir() or path.name.lower().endswith((".safetensors", ".gguf", *_DANGEROUS_SUFFIXES)):
            left_out.append(path.name)
        elif path.name != JOURNAL and not _ANY_INDEX.fullmatch(path.name):
            _check_contained(Path(source.root), path)
            try:
                with open_regular(path) as stream:
                    status = os.fstat(stream.fileno())
            except OSError as error:
                raise CheckpointError(
                    "A file of the checkpoint's folder cannot be copied. Nothing was written.",
                    file=path,
                    expected="a readable file",
                    found=error.strerror,
                    fix="Repair or remove this file.",
                ) from error
            copied[str(path)] = Header(
                str(path), {}, {}, 0, (status.st_ino, status.st_size, status.st_mtime_ns)
            )
    own = {Path(os.path.relpath(file, source.root)).parts[0] for file in source.headers}
    return copied, [name for name in left_out if name not in own]


def _reserve(folder: Path, files: Iterable[NewFile], is_enough: bool) -> None:
    """Allocates the whole size on the disk before anything is copied, or checks the free space."""
    for file in files:
        with open(folder / file.name, "xb") as stream:
            if file.nbytes and not _allocate(stream.fileno(), file.nbytes) and not is_enough:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _allocate(descriptor: int, nbytes: int) -> bool:
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
    return True


def _copy(folder: Path, files: Iterable[NewFile], reader: Reader, progress: Callable[[int], None]) -> None:
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    for file in files:
        with open(folder / file.name, "r+b") as stream:
            stream.write(file.head)
            for part in _chunks(file.parts):
                if isinstance(part, Made):
                    stream.write(_made(part, file.name))
                else:
                    reader.read_into(part, buffer[: part.nbytes])
                    stream.write(buffer[: part.nbytes])
                progress(part.nbytes)
            stream.flush()
            os.fsync(stream.fileno())


def _made(part: Made, name: str) -> memoryview:
    data = part.make()
    if data.nbytes != part.nbytes:
        raise CheckpointError(
            "A tensor has another size than its header says. Nothing was left behind.",
            file=name,
            expected=f"{part.nbytes} bytes",
            found=f"{data.nbytes} bytes",
            fix="This is a bug in hfq. Please report it.",
        )
    return data


def _chunks(parts: Iterable[ByteRange | Made]) -> Iterator[ByteRange | Made]:
    for whole in parts:
        if isinstance(whole, Made):
            yield whole
            continue
        for done in range(0, whole.nbytes, _CHUNK_NBYTES):
            yield ByteRange(whole.file, whole.offset + done, min(_CHUNK_NBYTES, whole.nbytes - done))


def _check_unchanged(watched: Checkpoint) -> None:
    """Compares each file with its validated header by a new reader, even for an empty range."""
    reader = Reader(watched)
    for file in watched.headers:
        reader.read_into(ByteRange(file, 0, 0), memoryview(bytearray()))


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to disk, if the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
