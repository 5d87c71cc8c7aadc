"""Hidden folder in which a quantized checkpoint is written shard by shard, with a journal.

It is next to the output folder, and is renamed to it when everything is done. Until then, the output folder
does not exist. A killed run leaves the hidden folder behind. When the same run starts again, it keeps every
shard whose digest matches the journal.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hfq.checkpoint import write_safetensors
from hfq.checkpoint.write_checkpoint import sync_folder
from hfq.checkpoint.writer import StoredTensor
from hfq.errors import CheckpointError, SetupError

__all__ = ["Journal"]

logger = logging.getLogger(__name__)

_NAME = "journal.json"


class Journal:
    """Finished shards of one run.

    Args:
        target: Final folder of the checkpoint.
        job: Everything that determines the output bytes, as JSON types. A hidden folder of another job raises
            an error.

    Raises:
        SetupError: An unfinished run with another job exists for this target, or another process uses it.
        CheckpointError: The folder cannot be created.
    """

    def __init__(self, target: Path, job: Mapping[str, Any]) -> None:
        self.target, self.folder = target, target.parent / f".{target.name}.quantizing"
        self.job = json.loads(json.dumps(job))
        self.shards: dict[str, dict[str, Any]] = {}
        self.guarded(lambda: self.folder.mkdir(exist_ok=True))
        self._descriptor = os.open(self.folder, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._descriptor)  # also releases the lock
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

    def write(self, name: str, text: str) -> None:
        """Writes a small file next to the shards."""
        self.guarded(lambda: (self.folder / name).write_text(text, encoding="utf-8"))

    def finish(self) -> None:
        """Renames the folder to its final name."""

        def rename() -> None:
            (self.folder / _NAME).unlink()
            for file in self.folder.iterdir():
                sync_folder(file)
            sync_folder(self.folder)
            os.rename(self.folder, self.target)

        self.guarded(rename)
        sync_folder(self.target.parent)

    def _begin(self) -> None:
        self._lock()
        if (self.folder / _NAME).exists():
            self._resume()
            return
        for file in self.folder.iterdir():
            file.unlink()
        self._save()

    def _lock(self) -> None:
        """Locks the folder against other processes, until this one ends."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SetupError(
                f"Another process is quantizing into {self.target}. Nothing was changed.",
                file=self.folder,
                expected="one process for each folder",
                found="a locked folder",
                fix="Wait for the other process, or choose another folder.",
            ) from error
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s). Do not start a second process for it.", self.folder, error.strerror
            )

    def _resume(self) -> None:
        try:
            found = json.loads((self.folder / _NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                "The journal of an unfinished quantization cannot be read. Nothing was changed.",
                file=self.folder / _NAME,
                expected="the journal that hfq wrote",
                found=error,
                fix="Remove this folder, and start again.",
            ) from error
        if found["job"] != self.job:
            differing = sorted(
                key for key in {*found["job"], *self.job} if found["job"].get(key) != self.job.get(key)
            )
            raise SetupError(
                f"An unfinished quantization into {self.target} has other options. Nothing was changed.",
                file=self.folder,
                expected="the same source, recipe, and calibration data",
                found=f"different {', '.join(differing)}",
                fix="Run it with its original options, or remove this folder.",
            )
        for shard, entry in found["shards"].items():
            file = self.folder / shard
            if not file.is_file() or _digest(file) != entry["sha256"]:
                logger.warning("%s has changed since it was written. It is written again.", file)
                continue
            self.shards[shard] = entry
        for file in self.folder.iterdir():
            if file.name not in (_NAME, *self.shards):
                file.unlink()
        self._save()

    def _save(self) -> None:
        def replace() -> None:
            temporary = self.folder / f"{_NAME}.new"
            with open(temporary, "w", encoding="utf-8") as stream:
                json.dump({"job": self.job, "shards": self.shards}, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, self.folder / _NAME)

        self.guarded(replace)

    def guarded(self, action: Callable[[], object]) -> None:
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
