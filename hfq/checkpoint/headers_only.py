"""Headers-only checkpoints: JSON files and safetensors headers, without tensor data.

A folder of such a checkpoint holds sparse safetensors files of the true size, and a marker. Every reader
raises an error for the marker, so that zeros are never used as weights.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hfq.errors import CheckpointError

__all__ = ["MARKER", "HeadersOnlyCheckpoint", "check_has_weights"]

MARKER = "hfq-headers-only"
"""Name of the file that marks a folder without weights."""

_SIZES = "sizes.json"


@dataclass(frozen=True)
class HeadersOnlyCheckpoint:
    """The JSON files and headers of a checkpoint.

    Attributes:
        texts: The bytes of each JSON file, by name.
        heads: (the first bytes of the file: length and header, the size of the whole file), by name of each
            safetensors file.
    """

    texts: Mapping[str, bytes]
    heads: Mapping[str, tuple[bytes, int]]

    @property
    def nbytes(self) -> int:
        """The bytes of all safetensors files, including weights."""
        return sum(size for _, size in self.heads.values())

    def write(self, folder: str | os.PathLike) -> None:
        """Writes the marker and then the files into a folder.

        Raises:
            CheckpointError: The folder cannot be written, or its file system does not support such large
                files.
        """
        try:
            Path(folder, MARKER).write_text(
                "The safetensors files here have headers and no weights: hfq plans with them.\n"
            )
            for name, text in self.texts.items():
                Path(folder, name).write_bytes(text)
            for name, (head, size) in self.heads.items():
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                with open(file, "wb") as stream:
                    stream.write(head)
                    stream.truncate(size)
        except OSError as error:
            raise CheckpointError(
                "The folder for the headers of a checkpoint could not be written. Nothing was planned.",
                file=folder,
                expected="a writable folder on a file system with sparse files",
                found=error.strerror,
                fix="Set TMPDIR to a folder on a local disk.",
            ) from error

    def pack(self) -> bytes:
        """Returns one archive of everything, for `unpack`."""
        memory = io.BytesIO()
        with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr(_SIZES, json.dumps({name: size for name, (_, size) in self.heads.items()}))
            for name, text in self.texts.items():
                archive.writestr(f"texts/{name}", text)
            for name, (head, _) in self.heads.items():
                archive.writestr(f"heads/{name}", head)
        return memory.getvalue()

    @classmethod
    def unpack(cls, packed: bytes) -> HeadersOnlyCheckpoint:
        """Returns the checkpoint of an archive.

        Raises:
            ValueError: It is damaged.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(packed)) as archive:
                names = [name for name in archive.namelist() if name.startswith("texts/")]
                texts = {name.removeprefix("texts/"): archive.read(name) for name in names}
                sizes = json.loads(archive.read(_SIZES))
                return cls(
                    texts, {name: (archive.read(f"heads/{name}"), int(size)) for name, size in sizes.items()}
                )
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise ValueError(f"no archive of headers: {error}") from error


def check_has_weights(root: str | os.PathLike) -> None:
    """Raises an error for a folder without weights.

    Raises:
        CheckpointError: The folder has the marker.
    """
    if os.path.lexists(os.path.join(root, MARKER)):
        raise CheckpointError(
            "This folder holds headers without weights. Nothing was loaded.",
            file=root,
            expected="weights",
            found=MARKER,
            fix="Load the model by its Hub id, or from the folder that `hf download` created.",
        )
