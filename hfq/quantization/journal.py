"""Hidden folder in which a quantized checkpoint is written shard by shard, with a journal.

It is next to the output folder, and is renamed to it when everything is done. Until then, the output folder
does not exist. A killed run leaves the hidden folder behind. When the same run starts again, it keeps every
shard whose digest matches the journal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hfq.checkpoint import write_safetensors
from hfq.checkpoint.write_checkpoint import sync_folder
from hfq.checkpoint.writer import StoredTensor
from hfq.errors import CheckpointError, SetupError
from hfq.quantization.working_folder import WorkingFolder

__all__ = ["Journal", "begun_folder"]

logger = logging.getLogger(__name__)

_NAME = "journal.json"
_NEW = f"{_NAME}.new"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors|\.model-\d{5}-of-\d{5}\.safetensors\.\w+\.tmp")


def begun_folder(target: Path) -> Path:
    """Returns the hidden folder of a target."""
    return target.parent / f".{target.name}.quantizing"


class Journal:
    """Finished shards of one run.

    Args:
        target: Final folder of the checkpoint.
        job: Everything that determines the output bytes, as JSON types. A hidden folder of another job raises
            an error.
        side_files: Names of all files that will be written next to the shards.

    Raises:
        SetupError: An unfinished run with another job exists for this target, or another process uses it.
        CheckpointError: The folder cannot be created, or holds anything that hfq did not make.
    """

    def __init__(self, target: Path, job: Mapping[str, Any], side_files: Collection[str]) -> None:
        self.target, self.folder = target, begun_folder(target)
        self.job = json.loads(json.dumps(job))
        self.shards: dict[str, dict[str, Any]] = {}
        self._side_files = frozenset(side_files)
        self.guarded(lambda: self.folder.mkdir(exist_ok=True))
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
        found = self._read()
        if found is None:  # then nothing else can be known to be hfq's
            self._opened.remove(self._opened.check_names(lambda name: name == _NEW))
        else:
            self._check_job(found["job"])
            self._resume(found["shards"])
        self._save()

    def _read(self) -> dict[str, Any] | None:
        """Returns the journal of an earlier run, or None if there is none."""
        try:
            raw = self._opened.read(_NAME)
            if raw is None:
                return None
            found = json.loads(raw)
            if not isinstance(found, dict) or found.pop("sha256", None) != _checksum(found):
                raise ValueError("a journal that does not match its checksum")
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                "The journal of an unfinished quantization cannot be read. Nothing was changed.",
                file=self.folder / _NAME,
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
        """Keeps the shards that match the journal, and removes what an earlier run left half-written."""
        names = self._opened.check_names(self._is_made_by_hfq)
        for shard, entry in shards.items():
            if shard in names and _digest(self.folder / shard) == entry["sha256"]:
                self.shards[shard] = entry
            else:
                logger.warning(
                    "%s has changed since it was written. It is written again.", self.folder / shard
                )
        self._opened.remove(name for name in names if name not in (_NAME, *self.shards))

    def _is_made_by_hfq(self, name: str) -> bool:
        return name in (_NAME, _NEW, *self._side_files) or _SHARD.fullmatch(name) is not None

    def _save(self) -> None:
        def replace() -> None:
            document = {"job": self.job, "shards": self.shards}
            with open(self.folder / _NEW, "w", encoding="utf-8") as stream:
                json.dump({**document, "sha256": _checksum(document)}, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(self.folder / _NEW, self.folder / _NAME)

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
