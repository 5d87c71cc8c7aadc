"""Hidden folder in which a quantized checkpoint is written shard by shard, with a journal.

It is next to the output folder, and is renamed to it when everything is on disk. Until then, the output
folder does not exist. The journal goes last, from the output folder. A killed run leaves a folder with a
journal behind. When the same run starts again, it keeps every shard whose digest matches the journal.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hfq.checkpoint import write_safetensors
from hfq.checkpoint.header import open_regular
from hfq.checkpoint.write_checkpoint import JOURNAL, sync_folder, taken
from hfq.checkpoint.writer import StoredTensor
from hfq.errors import CheckpointError, SetupError
from hfq.quantization.working_folder import WorkingFolder

__all__ = ["Journal", "begun_folder"]

logger = logging.getLogger(__name__)

_NEW = f"{JOURNAL}.new"
_APPEARED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors|\.model-\d{5}-of-\d{5}\.safetensors\.\w+\.tmp")


def begun_folder(target: Path) -> Path:
    """Returns the hidden folder of a target, or the target if it holds a journal."""
    hidden = target.parent / f".{target.name}.quantizing"
    return target if os.path.lexists(target / JOURNAL) else hidden


class Journal:
    """Finished shards of one run.

    Args:
        target: Final folder of the checkpoint.
        job: Everything that determines the output bytes, as JSON types. A hidden folder of another job raises
            an error.
        side_files: Names of all files that will be written next to the shards.

    Attributes:
        is_renamed: True if an earlier run wrote and renamed everything, and only had to remove its journal.

    Raises:
        SetupError: An unfinished run with another job exists for this target, or another process uses it.
        CheckpointError: The folder cannot be created, or holds anything that hfq did not make.
    """

    def __init__(self, target: Path, job: Mapping[str, Any], side_files: Collection[str]) -> None:
        self.target, self.folder = target, begun_folder(target)
        self.is_renamed = self.folder == target
        self.job = json.loads(json.dumps(job))
        self.shards: dict[str, dict[str, Any]] = {}
        self._side_files = frozenset(side_files)
        self._guarded(lambda: self.folder.mkdir(exist_ok=True))
        self._opened = WorkingFolder(self.folder, f"quantizing into {target}")
        self.close = self._opened.close
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def __contains__(self, shard: str) -> bool:
        return shard in self.shards

    def add(self, shard: str, tensors: Mapping[str, StoredTensor], notes: Mapping[str, Any]) -> None:
        """Writes a shard, reads it back for its digest, and records it.

        Args:
            shard: Name of the file.
            tensors: Same as for `write_safetensors`.
            notes: Entry to store with the shard, as JSON types.

        Raises:
            CheckpointError: The shard cannot be written. Earlier shards are kept.
        """
        try:
            write_safetensors(self.folder / shard, tensors, {"format": "pt"})
        except CheckpointError as error:
            raise CheckpointError(
                "A shard cannot be written. The output folder was not created, and finished decoder layers "
                "are kept.",
                file=self.folder / shard,
                expected=error.expected,
                found=error.found,
                fix="Free disk space, and run the same command again to continue.",
                problems=(error.message,),
            ) from error
        self.shards[shard] = {
            "sha256": _digest(self.folder / shard),
            "tensors": sorted(tensors),
            "notes": dict(notes),
        }
        self._save()

    def write(self, name: str, content: str | Path) -> None:
        """Writes a small file next to the shards: a text, or a copy of a file."""

        def create() -> None:
            source = io.BytesIO(content.encode()) if isinstance(content, str) else open_regular(content)
            with source, open(self.folder / name, "xb") as stream:
                shutil.copyfileobj(source, stream)
                stream.flush()
                os.fsync(stream.fileno())

        self._guarded(create)

    def finish(self) -> None:
        """Renames the folder to its final name, and then removes the journal."""
        if not self.is_renamed:
            sync_folder(self.folder)
            self._guarded(self._rename)
            sync_folder(self.target.parent)
        try:
            self._opened.remove([JOURNAL])
        except OSError as error:
            logger.warning("%s is not removed: %s. No load reads it.", self.target / JOURNAL, error.strerror)
        sync_folder(self.target)

    def _rename(self) -> None:
        try:
            os.rename(self.folder, self.target)
        except OSError as error:
            if error.errno not in _APPEARED:
                raise
            raise CheckpointError(
                "The output folder appeared while the model was quantized. The quantized model is kept.",
                file=self.target,
                expected="nothing, or an empty folder",
                found=error.strerror,
                fix=f"Move {self.target} elsewhere, and run the same command again to continue.",
            ) from error

    def _begin(self) -> None:
        if self.is_renamed:
            self._check_renamed()
            return
        found = self._read()
        if found is None:  # then nothing else can be known to be hfq's
            self._opened.remove(self._opened.check_names(lambda name: name == _NEW))
        else:
            self._check_job(found["job"])
            self._resume(found["shards"])
        self._save()

    def _check_renamed(self) -> None:
        """Raises an error if the target is not the finished checkpoint of this job."""
        try:
            found = self._read()
        except CheckpointError as error:
            raise taken(self.target) from error
        if found is None or found["job"] != self.job:
            raise taken(self.target)
        for shard, entry in found["shards"].items():
            file = self.folder / shard
            if not file.is_file() or _digest(file) != entry["sha256"]:
                raise taken(self.target)
        self.shards = found["shards"]

    def _read(self) -> dict[str, Any] | None:
        """Returns the journal of an earlier run, or None if there is none."""
        try:
            raw = self._opened.read(JOURNAL)
            if raw is None:
                return None
            found = json.loads(raw)
            if not isinstance(found, dict) or found.pop("sha256", None) != _checksum(found):
                raise ValueError("a journal that does not match its checksum")
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                "The journal of an unfinished quantization cannot be read. Nothing was changed.",
                file=self.folder / JOURNAL,
                expected="the journal that hfq wrote",
                found=error,
                fix="Remove this folder, and start again.",
            ) from error
        return found

    def _check_job(self, found: dict[str, Any]) -> None:
        if found != self.job:
            differing = sorted(key for key in {*found, *self.job} if found.get(key) != self.job.get(key))
            raise SetupError(
                f"An unfinished quantization into {self.target} has other options. Nothing was changed.",
                file=self.folder,
                expected="the same source, recipe, and calibration data",
                found=f"different {', '.join(differing)}",
                fix="Run it with its original options, or remove this folder.",
            )

    def _resume(self, shards: Mapping[str, dict[str, Any]]) -> None:
        """Keeps the shards that match the journal, and removes half-written files."""
        names = self._opened.check_names(self._is_made_by_hfq)
        for shard, entry in shards.items():
            if shard in names and _digest(self.folder / shard) == entry["sha256"]:
                self.shards[shard] = entry
            else:
                logger.warning(
                    "%s has changed since it was written. It is written again.", self.folder / shard
                )
        self._opened.remove(name for name in names if name not in (JOURNAL, *self.shards))

    def _is_made_by_hfq(self, name: str) -> bool:
        return name in (JOURNAL, _NEW, *self._side_files) or _SHARD.fullmatch(name) is not None

    def _save(self) -> None:
        def replace() -> None:
            document = {"job": self.job, "shards": self.shards}
            with open(self.folder / _NEW, "w", encoding="utf-8") as stream:
                json.dump({**document, "sha256": _checksum(document)}, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(self.folder / _NEW, self.folder / JOURNAL)

        self._guarded(replace)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            raise CheckpointError(
                "The quantized checkpoint cannot be written. The output folder was not created.",
                file=self.folder,
                expected="free space in a writable folder",
                found=error.strerror,
                fix="Free disk space, and run the same command again to continue.",
            ) from error


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return (
            hashlib.file_digest(stream, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _digest_by_chunks(stream)
        )


def _digest_by_chunks(stream: BinaryIO) -> str:
    """Does the same as `hashlib.file_digest`, which Python 3.10 lacks."""
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
