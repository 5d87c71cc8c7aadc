"""The GGUF files of one model: a single file, or the parts of a split."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path, PurePosixPath

from hfq.checkpoint.gguf.header import GgufHeader
from hfq.errors import CheckpointError

__all__ = ["check_parts", "choose_gguf", "find_gguf", "no_such_gguf", "parts_of"]

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_OTHER_FILES = ("mmproj-", "mtp-")
"""Starts of the names of files that accompany a model: image encoders and draft layers."""

_MOST_NAMED = 12
"""Most files that an error names."""


def find_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file of a folder, or the first part of the split.

    Returns None for a folder without a GGUF file.

    Raises:
        CheckpointError: The folder holds several models.
    """
    name = choose_gguf((entry.name for entry in folder.iterdir()), str(folder))
    return None if name is None else folder / name


def choose_gguf(names: Iterable[str], where: str) -> str | None:
    """Returns the GGUF file of a model among names of files, or the first part of the split.

    Returns None if there is no GGUF file.

    Args:
        names: The names.
        where: The folder or Hub id of the files.

    Raises:
        CheckpointError: The files are several models.
    """
    models = _models(names)
    if len(models) > 1:
        first = models[0]
        raise CheckpointError(
            "There are several GGUF models. Nothing was loaded.",
            file=where,
            expected="one GGUF file, or the parts of one split",
            found=", ".join(models[:_MOST_NAMED]),
            fix=f"Name one of them: pass gguf_file={first!r}, or {where}/{first} on the command line.",
        )
    return next(iter(models), None)


def _models(names: Iterable[str]) -> list[str]:
    """Returns the GGUF files of models among names of files; the first part of each split."""
    models: dict[str, str] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not PurePosixPath(name).name.startswith(_OTHER_FILES):
            part = _PART.fullmatch(name)
            models.setdefault(part["stem"] if part else name, name)
    return [*models.values()]


def no_such_gguf(file: Path) -> CheckpointError:
    """Returns the error of a GGUF file that does not exist; it names the others of the folder."""
    models = _models(path.name for path in file.parent.glob("*.gguf"))
    models.sort(key=lambda name: SequenceMatcher(None, name, file.name).ratio(), reverse=True)
    fix = "Check the path."
    if models:
        nearest = f"gguf_file={models[0]!r}, or {file.with_name(models[0])} on the command line"
        fix = f"Check the name, or pass the nearest: {nearest}."
    return CheckpointError(
        "There is no such GGUF file. Nothing was loaded.",
        file=file,
        expected=file.name,
        found=", ".join(models[:_MOST_NAMED]) or "no GGUF file in the folder",
        fix=fix,
    )


def parts_of(file: Path) -> list[Path]:
    """Returns the files of the split that a file is part of, in order; other files are alone.

    Raises:
        CheckpointError: The name counts no parts, or more than a file system holds.
    """
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    number, count = int(part["number"]), int(part["count"])
    if not 1 <= number <= count:
        raise CheckpointError(
            "The name of a part of a split GGUF file is not valid. Nothing was loaded.",
            file=file,
            expected="-00001-of-NNNNN to -NNNNN-of-NNNNN",
            found=file.name,
            fix="Restore the names that the files were published with.",
        )
    return [
        file.with_name(f"{part['stem']}-{index:05d}-of-{part['count']}.gguf") for index in range(1, count + 1)
    ]


def check_parts(headers: Sequence[GgufHeader]) -> None:
    """Checks that headers are those of a single file, or of all parts of one split in order.

    Raises:
        CheckpointError: A part is of another split, or tensors are missing.
    """
    count = len(headers)
    tensors = sum(len(header.tensors) for header in headers)
    for number, header in enumerate(headers):
        expected = {"split.count": count, "split.no": number, "split.tensors.count": tensors}
        if count == 1 and header.keys.get("split.count", 1) == 1:
            return
        for key, value in expected.items():
            if header.keys.get(key) != value:
                raise CheckpointError(
                    "The parts of a split GGUF file do not belong together. Nothing was loaded.",
                    file=header.file,
                    expected=f"{key}={value}",
                    found=f"{key}={header.keys.get(key)}",
                    fix="Download all parts again, under the names that they were published with.",
                )
