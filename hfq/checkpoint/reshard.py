"""Copy of a checkpoint with each decoder layer in one range of one file, for direct reads.

safetensors forbids holes between tensors. So each decoder layer gets its own shard, whose header is padded
with spaces. The copy has these properties:

1. a decoder layer's shard starts its data at a multiple of 4096 bytes and holds that layer's tensors only
2. every tensor starts at a multiple of its element's size; at a multiple of 16 where all tensors of its unit
   have sizes that 16 divides (a unit is a routed expert, or a module that belongs to none)
3. a unit's tensors lie in a row, but for those whose size its widest element does not divide
4. every tensor has the name, dtype, shape and bytes that it had
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hfq.checkpoint.index import Checkpoint
from hfq.checkpoint.write_checkpoint import (
    NewFile,
    check_target,
    in_order,
    index_file,
    module_of,
    shard_head,
    side_files,
    write_folder,
)
from hfq.errors import CheckpointError
from hfq.tensor_spec import TensorInfo

__all__ = ["ReshardReport", "reshard_checkpoint"]

_OWN_SHARD_NBYTES = 1 << 20
_BLOCK = re.compile(r"((?:[^.]*\.)*?)([0-9]+)\.")


@dataclass(frozen=True)
class ReshardReport:
    """Result of `reshard_checkpoint`.

    Attributes:
        files: Number of files in the new folder.
        nbytes: Their bytes.
        decoder_layers: Number of decoder layers, each in its own shard.
        left_out: Files of the source folder that were not copied: pickles, folders, and other safetensors
            files.
    """

    files: int
    nbytes: int
    decoder_layers: int
    left_out: tuple[str, ...] = ()


def reshard_checkpoint(
    source: Checkpoint, target: str | os.PathLike, progress: Callable[[int], None] | None = None
) -> ReshardReport:
    """Writes a copy of a checkpoint with one shard per decoder layer.

    Everything or nothing is written: see `write_checkpoint.write_folder`.

    Args:
        source: The checkpoint. The other files of its folder are copied, too, except pickles, indices, and
            folders.
        target: The folder to create: absent or empty, and outside the source.
        progress: Called with the bytes of tensors copied since its last call.

    Raises:
        CheckpointError: `target` is not empty or is inside the source; the disk is full or not writable; the
            source changed meanwhile, or a file of its folder is outside it.
    """
    source.check_safetensors("Nothing was written")
    target = check_target(source, target)
    groups = _groups(source)
    copied, left_out = side_files(source)
    shards = _shards(groups, source)
    index = index_file({shard.name: infos for shard, infos in zip(shards, groups.values(), strict=True)})
    written = write_folder(
        target, source, [*shards, index], copied, lambda folder: _check_copy(folder, source), progress
    )
    files = len(shards) + 1 + len(copied)
    return ReshardReport(files, written, sum(number >= 0 for _, number in groups), tuple(left_out))


def _groups(source: Checkpoint) -> dict[tuple[str, int], list[TensorInfo]]:
    """Returns the tensors of each shard, by the path and number of its decoder layer.

    The number is negative for tensors outside of decoder layers.
    """
    groups: dict[tuple[str, int], list[TensorInfo]] = {}
    for info in sorted(source.tensors.values(), key=lambda info: (info.range.file, info.range.offset)):
        block = _BLOCK.match(info.name)
        key = (block[1], int(block[2])) if block else (module_of(info), -1)
        groups.setdefault(key, []).append(info)
    small = [
        key
        for key, infos in groups.items()
        if key[1] < 0 and sum(i.nbytes for i in infos) < _OWN_SHARD_NBYTES
    ]
    rest = [info for key in small for info in groups.pop(key)]
    if rest:
        groups["", -2] = rest
    return {key: in_order(groups[key]) for key in sorted(groups)}


def _shards(groups: dict[tuple[str, int], list[TensorInfo]], source: Checkpoint) -> list[NewFile]:
    metadata = source.metadata()
    if any(header.metadata.get("format") == "pt" for header in source.headers.values()):
        metadata["format"] = "pt"
    shards = []
    for number, infos in enumerate(groups.values(), 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shards.append(NewFile(name, shard_head(infos, metadata), tuple(info.range for info in infos)))
    return shards


def _check_copy(folder: Path, source: Checkpoint) -> None:
    written = Checkpoint.open(folder)
    expected, found = ({name: str(info) for name, info in each.tensors.items()} for each in (source, written))
    if expected != found:
        name = min(name for name, _ in expected.items() ^ found.items())
        raise CheckpointError(
            "The copy does not read back as it was written. Nothing was left behind.",
            tensor=name,
            expected=expected.get(name),
            found=found.get(name),
            fix="Check the disk, or choose another folder.",
        )
