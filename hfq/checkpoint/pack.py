"""Copies a checkpoint so that each block of the model is one contiguous range of one file, which one direct read can bring.

safetensors forbids holes between tensors, so each block gets a shard of its own whose header is padded with spaces. What is
guaranteed of the copy:

1. a shard's data starts at a multiple of 4096 bytes and holds all tensors of its block, and no others
2. every tensor starts at a multiple of its element's size; at a multiple of 16 where all tensors of its unit have sizes that
   16 divides (a unit is a routed expert, or a module that belongs to none)
3. a unit's tensors lie in a row, but for those whose size its widest element does not divide
4. every tensor has the name, dtype, shape and bytes that it had
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hfq.checkpoint.header import Header, open_regular
from hfq.checkpoint.index import _DANGEROUS_SUFFIXES, Checkpoint, _check_contained
from hfq.checkpoint.reader import Reader
from hfq.errors import CheckpointError
from hfq.spec import DTYPE_BITS, SEGMENT_ALIGNMENT, ByteRange, TensorInfo

__all__ = ["PackReport", "pack_checkpoint"]

_DATA_ALIGNMENT = 4096
_CHUNK_NBYTES = 16 << 20
_OWN_SHARD_NBYTES = 1 << 20
_BLOCK = re.compile(r"((?:[^.]*\.)*?)([0-9]+)\.")
_EXPERT = re.compile(r"(?:.*\.)?experts\.[0-9]+(?=\.|$)")
_INDEX = "model.safetensors.index.json"
_ANY_INDEX = re.compile(r".*\.(safetensors|bin)\.index(\..*)?\.json")


@dataclass(frozen=True)
class PackReport:
    """What was written.

    Attributes:
        files: All files of the new folder.
        nbytes: Their bytes.
        blocks: The numbered blocks of the model, each in a shard of its own.
        left_out: What the source folder holds beside the checkpoint and was not copied: pickles, folders, other safetensors.
    """

    files: int
    nbytes: int
    blocks: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    """A file to write: its first bytes, then ranges of the source."""

    name: str
    head: bytes
    ranges: tuple[ByteRange, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(part.nbytes for part in self.ranges)


def pack_checkpoint(
    source: Checkpoint, target: str | os.PathLike, progress: Callable[[int], None] | None = None
) -> PackReport:
    """Writes a copy of a checkpoint with one shard per block; other readers of safetensors take it as any sharded checkpoint.

    Everything is written to a temporary folder beside `target`, whose whole size is taken from the disk first, then synced,
    read back by its headers, and renamed. Whatever fails or interrupts it leaves nothing behind.

    Args:
        source: The checkpoint. The other files of its folder are copied too, but for pickles, indices and folders.
        target: The folder to make: absent or empty, and outside the source.
        progress: Called with the bytes of tensors copied since its last call.

    Raises:
        CheckpointError: `target` is taken or lies in the source; the disk is short or unwritable; the source changed
            meanwhile, or a file of its folder lies outside it.
    """
    target = Path(os.path.realpath(target))
    _check_target(source, target)
    groups = _groups(source)
    side_files, left_out = _side_files(source)
    shards = _shards(groups, source)
    others = [_index(shards, groups)]
    others += [_File(Path(file).name, b"", (ByteRange(file, 0, header.nbytes),)) for file, header in side_files.items()]
    watched = replace(source, headers={**source.headers, **side_files})
    needed, free = sum(file.nbytes for file in (*shards, *others)), shutil.disk_usage(target.parent).free
    try:
        with tempfile.TemporaryDirectory(".tmp", f".{target.name}.", target.parent, True) as temporary:
            folder = Path(temporary, target.name)
            folder.mkdir()
            _reserve(folder, [*shards, *others], is_enough=free >= needed)
            reader = Reader(watched)
            _copy(folder, shards, reader, progress or (lambda nbytes: None))
            _copy(folder, others, reader, lambda nbytes: None)
            _sync_folder(folder)
            _check_copy(folder, source)
            _check_unchanged(watched)
            os.rename(folder, target)
    except OSError as error:
        raise CheckpointError(
            "The packed copy could not be written; nothing was left behind.", file=target,
            expected=f"{needed} bytes of free space in a writable folder", found=f"{error.strerror}; {free} bytes were free",
            fix="free space or choose another folder",
        ) from error  # fmt: skip
    _sync_folder(target.parent)
    return PackReport(len(shards) + len(others), needed, sum(number >= 0 for _, number in groups), tuple(left_out))


def _check_target(source: Checkpoint, target: Path) -> None:
    if target.is_relative_to(os.path.realpath(source.root)):
        raise CheckpointError(
            "A packed copy cannot be written into its source.", file=target, expected=f"a folder outside {source.root}",
            found="a folder inside it", fix="choose another folder",
        )  # fmt: skip
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir()) or os.path.ismount(target)):
        found = "a mount point" if os.path.ismount(target) else "a folder with content" if target.is_dir() else "a file"
        raise CheckpointError(
            "The folder of the packed copy is taken; nothing was written.", file=target, expected="nothing, or an empty folder",
            found=found, fix=f"choose a new folder, as {target / 'packed' if target.is_dir() else f'{target}-packed'}",
        )  # fmt: skip
    if not target.parent.is_dir():
        raise CheckpointError(
            "The packed copy has no folder to be in; nothing was written.", file=target, expected=f"the folder {target.parent}",
            found="no such folder", fix="make it, or choose another",
        )  # fmt: skip


def _groups(source: Checkpoint) -> dict[tuple[str, int], list[TensorInfo]]:
    """The tensors of each shard in its order, by the block's path and number, which is negative outside of blocks."""
    groups: dict[tuple[str, int], list[TensorInfo]] = {}
    for info in sorted(source.tensors.values(), key=lambda info: (info.range.file, info.range.offset)):
        block = _BLOCK.match(info.name)
        key = (block[1], int(block[2])) if block else (_module(info), -1)
        groups.setdefault(key, []).append(info)
    small = [key for key, infos in groups.items() if key[1] < 0 and sum(i.nbytes for i in infos) < _OWN_SHARD_NBYTES]
    rest = [info for key in small for info in groups.pop(key)]
    if rest:
        groups["", -2] = rest
    return {key: _in_order(groups[key]) for key in sorted(groups)}


def _shards(groups: dict[tuple[str, int], list[TensorInfo]], source: Checkpoint) -> list[_File]:
    metadata = source.metadata()
    if any(header.metadata.get("format") == "pt" for header in source.headers.values()):
        metadata["format"] = "pt"
    shards = []
    for number, infos in enumerate(groups.values(), 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shards.append(_File(name, _head(infos, metadata), tuple(info.range for info in infos)))
    return shards


def _in_order(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """The order of a shard's tensors in which each is aligned to its own element.

    Runs of tensors are sorted by the power of two, up to 16, that divides all sizes of a run, largest first: so it divides
    the start of every tensor of the run, whatever lies before. Within a run it is no less than the widest element.
    """
    modules: dict[str, list[TensorInfo]] = {}
    for info in infos:
        modules.setdefault(_module(info), []).append(info)
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


def _module(info: TensorInfo) -> str:
    return info.name.rpartition(".")[0]


def _head(infos: Iterable[TensorInfo], metadata: dict[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for info in infos:
        entries[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [end, end + info.nbytes]}
        end += info.nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % _DATA_ALIGNMENT)
    return struct.pack("<Q", len(raw)) + raw


def _index(shards: Sequence[_File], groups: dict[tuple[str, int], list[TensorInfo]]) -> _File:
    weight_map = {info.name: shard.name for shard, infos in zip(shards, groups.values(), strict=True) for info in infos}
    total = sum(info.nbytes for infos in groups.values() for info in infos)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return _File(_INDEX, json.dumps(index, indent=2).encode())


def _side_files(source: Checkpoint) -> tuple[dict[str, Header], list[str]]:
    """The files to copy as they are, each as a header without tensors, which gives its identity; and what is left out."""
    copied: dict[str, Header] = {}
    left_out = []
    for path in sorted(Path(source.root).iterdir()):
        if path.is_dir() or path.name.lower().endswith((".safetensors", *_DANGEROUS_SUFFIXES)):
            left_out.append(path.name)
        elif not _ANY_INDEX.fullmatch(path.name):
            _check_contained(Path(source.root), path)
            try:
                with open_regular(path) as stream:
                    status = os.fstat(stream.fileno())
            except OSError as error:
                raise CheckpointError(
                    "A file of the checkpoint's folder cannot be copied; nothing was written.", file=path,
                    expected="a readable file", found=error.strerror, fix="mend or remove this file",
                ) from error  # fmt: skip
            copied[str(path)] = Header(str(path), {}, {}, 0, (status.st_ino, status.st_size, status.st_mtime_ns))
    own = {Path(os.path.relpath(file, source.root)).parts[0] for file in source.headers}
    return copied, [name for name in left_out if name not in own]


def _reserve(folder: Path, files: Iterable[_File], is_enough: bool) -> None:
    """Takes the whole room from the disk before anything is copied; where that cannot be done, the free space must do."""
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


def _copy(folder: Path, files: Iterable[_File], reader: Reader, progress: Callable[[int], None]) -> None:
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    for file in files:
        with open(folder / file.name, "r+b") as stream:
            stream.write(file.head)
            for part in _chunks(file.ranges):
                reader.read_into(part, buffer[: part.nbytes])
                stream.write(buffer[: part.nbytes])
                progress(part.nbytes)
            stream.flush()
            os.fsync(stream.fileno())


def _chunks(ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    for whole in ranges:
        for done in range(0, whole.nbytes, _CHUNK_NBYTES):
            yield ByteRange(whole.file, whole.offset + done, min(_CHUNK_NBYTES, whole.nbytes - done))


def _check_copy(folder: Path, source: Checkpoint) -> None:
    written = Checkpoint.open(folder)
    expected, found = ({name: str(info) for name, info in each.tensors.items()} for each in (source, written))
    if expected != found:
        name = min(name for name, _ in expected.items() ^ found.items())
        raise CheckpointError(
            "The packed copy does not read back as it was written; nothing was left behind.", tensor=name,
            expected=expected.get(name), found=found.get(name), fix="check the disk, or choose another folder",
        )  # fmt: skip


def _check_unchanged(watched: Checkpoint) -> None:
    """A new reader compares each file with what was validated, even for an empty range."""
    reader = Reader(watched)
    for file in watched.headers:
        reader.read_into(ByteRange(file, 0, 0), memoryview(bytearray()))


def _sync_folder(folder: Path) -> None:
    """Makes names durable, where the system can sync a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
