"""Checkpoints without weights: texts and headers, of which a folder can be made that says all of a checkpoint
but its values.

Such a folder has safetensors files of the true size with nothing behind their headers (they take no room on
disk), and a marker, by which every reader and every load refuses it: zeros are never taken for weights.
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
"""The file that says that a folder has headers and no weights."""

_SIZES = "sizes.json"


@dataclass(frozen=True)
class HeadersOnlyCheckpoint:
    """What is known of a checkpoint without its weights.

    Attributes:
        texts: The bytes of each JSON file, by name.
        heads: The first bytes of each safetensors file (length and header) and the size of the whole file, by
            name.
    """

    texts: Mapping[str, bytes]
    heads: Mapping[str, tuple[bytes, int]]

    @property
    def nbytes(self) -> int:
        """The bytes of all safetensors files, weights included."""
        return sum(size for _, size in self.heads.values())

    def write(self, folder: str | os.PathLike) -> None:
        """Writes the files into a folder, which is marked first.

        Raises:
            CheckpointError: The folder cannot be written, or its file system takes no file of such a size.
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
                "A folder for the headers of a checkpoint could not be written. Nothing was planned.",
                file=folder,
                expected="a writable folder on a file system with sparse files",
                found=error.strerror,
                fix="set TMPDIR to a folder on a local disk",
            ) from error

    def pack(self) -> bytes:
        """All of it as one archive, for `unpack`."""
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
        """What `pack` made.

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
    """Refuses a folder of headers.

    Raises:
        CheckpointError: The folder has the marker.
    """
    if os.path.lexists(os.path.join(root, MARKER)):
        raise CheckpointError(
            "This folder has the headers of a checkpoint and no weights. Nothing was loaded.",
            file=root,
            expected="weights",
            found=MARKER,
            fix="load the model itself: by its name on the hub, or from the folder that `hf download` made",
        )
