"""The hidden folder in which a quantized checkpoint grows, shard by shard, and the journal of what is
finished.

It lies beside the folder that is asked for, and takes its name when all is done; until then nothing stands
under that name. A run that is killed leaves it, and the same run, started again, keeps every shard whose
bytes have the digest that the journal has.
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
    """The finished shards of one job.

    Args:
        target: The folder that the checkpoint gets.
        job: What determines every byte of it, as JSON types; a folder of another job is refused.

    Raises:
        SetupError: Another job was begun for this target, or another process works on it.
        CheckpointError: The folder cannot be made.
    """

    def __init__(self, target: Path, job: Mapping[str, Any]) -> None:
        self.target, self.folder = target, target.parent / f".{target.name}.quantizing"
        self.job = json.loads(json.dumps(job))
        self.shards: dict[str, dict[str, Any]] = {}
        self.guarded(lambda: self.folder.mkdir(exist_ok=True))
        self._descriptor = os.open(self.folder, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._descriptor)  # and with it, the lock
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def __contains__(self, shard: str) -> bool:
        return shard in self.shards

    def add(self, shard: str, tensors: Mapping[str, StoredTensor], notes: Mapping[str, Any]) -> None:
        """Writes a shard, reads it back for its digest, and enters it.

        Args:
            shard: The file's name.
            tensors: As for `write_safetensors`.
            notes: What is to be known of it later, as JSON types.

        Raises:
            CheckpointError: It could not be written; the shards before it are kept.
        """
        try:
            write_safetensors(self.folder / shard, tensors, {"format": "pt"})
        except CheckpointError as error:
            raise CheckpointError(
                "A shard could not be written; nothing stands under the final name, and the blocks that are "
                "finished are kept.",
                file=self.folder / shard,
                expected=error.expected,
                found=error.found,
                fix="free space, and run it again to go on",
                problems=(error.message,),
            ) from error
        self.shards[shard] = {
            "sha256": _digest(self.folder / shard),
            "tensors": sorted(tensors),
            "notes": dict(notes),
        }
        self._save()

    def write(self, name: str, text: str) -> None:
        """Writes a small file beside the shards."""
        self.guarded(lambda: (self.folder / name).write_text(text, encoding="utf-8"))

    def finish(self) -> None:
        """Gives the folder its name."""

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
        """Keeps other processes from the folder for as long as this one lives."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SetupError(
                f"Another process is quantizing into {self.target}. Nothing was changed.",
                file=self.folder,
                expected="one process for each folder",
                found="a folder that is locked",
                fix="wait for it, or choose another folder",
            ) from error
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): run no second process for it.", self.folder, error.strerror
            )

    def _resume(self) -> None:
        try:
            found = json.loads((self.folder / _NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                "The journal of a quantization that was begun cannot be read. Nothing was changed.",
                file=self.folder / _NAME,
                expected="what hfq wrote",
                found=error,
                fix="remove this folder, and begin again",
            ) from error
        if found["job"] != self.job:
            differing = sorted(
                key for key in {*found["job"], *self.job} if found["job"].get(key) != self.job.get(key)
            )
            raise SetupError(
                f"Another quantization into {self.target} was begun and not finished. Nothing was changed.",
                file=self.folder,
                expected="the same source, recipe and calibration set",
                found=f"another {', '.join(differing)}",
                fix="run it again as it was begun, or remove this folder",
            )
        for shard, entry in found["shards"].items():
            file = self.folder / shard
            if not file.is_file() or _digest(file) != entry["sha256"]:
                logger.warning("%s is not as it was written; it is made again.", file)
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
                "The quantized checkpoint could not be written; nothing stands under its name.",
                file=self.folder,
                expected="free space in a writable folder",
                found=error.strerror,
                fix="free space, and run it again to go on",
            ) from error


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return (
            hashlib.file_digest(stream, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _digest_by_chunks(stream)
        )


def _digest_by_chunks(stream: BinaryIO) -> str:
    """As `hashlib.file_digest`, which Python 3.10 has not."""
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
