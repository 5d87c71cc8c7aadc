"""Validated access to the fields of JSON objects from untrusted files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hfq.checkpoint.small_file import read_small_file
from hfq.errors import SetupError

__all__ = ["Fields", "read_json"]

_MOST_NBYTES = 512 << 20


def read_json(file: Path) -> Any:
    """Reads a JSON file.

    Raises:
        SetupError: The file cannot be read, is not a regular file, is larger than 512 MiB, or is not JSON.
    """
    try:
        return json.loads(read_small_file(file, _MOST_NBYTES).decode("utf-8"))
    except OSError as error:
        raise _refusal("This file cannot be read.", file, "a JSON file", error.strerror or error) from error
    except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8
        raise _refusal(
            "This file is not JSON.", file, "JSON", str(error)[:200] or type(error).__name__
        ) from error


def _refusal(what: str, file: Path, expected: str, found: object) -> SetupError:
    return SetupError(
        what,
        file=file,
        expected=expected,
        found=found,
        fix="Pass a file from hfq.report(model).save(file), hfq plan --json, hfq evaluate --json, "
        "or a benchmark.",
    )


class Fields:
    """One JSON object.

    Args:
        value: Value that should be an object.
        file: File that contains it, for messages.
        where: Path of the object within the file, for messages.
    """

    def __init__(self, value: Any, file: Path, where: str = "") -> None:
        self.file, self.where = file, where
        if not isinstance(value, dict):
            raise self.wrong("an object", value)
        self._value: dict[str, Any] = value

    def wrong(self, expected: str, found: Any, name: str = "") -> SetupError:
        """Returns the error for a field that is not valid."""
        place = ".".join(part for part in (self.where, name) if part) or "the whole file"
        shown = "nothing" if found is None else f"{type(found).__name__} {str(found)[:60]}"
        return SetupError(
            f"Field {place} is not valid. Nothing was drawn.",
            file=self.file,
            expected=expected,
            found=shown,
            fix="Write the file again with this version of hfq.",
        )

    def names(self) -> list[str]:
        """Returns the names of all fields in file order."""
        return list(self._value)

    def has(self, *names: str) -> bool:
        """True if all of these fields exist and none is null."""
        return all(self._value.get(name) is not None for name in names)

    def text(self, name: str) -> str:
        """Returns a string."""
        return self._take(name, str, "a string")

    def number(self, name: str) -> float:
        """Returns a finite number."""
        return self.numbers_of(name, self._value.get(name))

    def count(self, name: str) -> int:
        """Returns a whole number of at least 0."""
        value = self._take(name, int, "a whole number")
        if isinstance(value, bool) or value < 0:
            raise self.wrong("a whole number of 0 or more", value, name)
        return value

    def object(self, name: str) -> Fields:
        """Returns an object."""
        return Fields(self._value.get(name), self.file, f"{self.where}.{name}".lstrip("."))

    def objects(self, name: str) -> list[Fields]:
        """Returns a list of objects."""
        items = self.items(name)
        return [
            Fields(item, self.file, f"{self.where}.{name}".lstrip(".") + f"[{place}]")
            for place, item in enumerate(items)
        ]

    def items(self, name: str) -> list[Any]:
        """Returns a list of any values."""
        return self._take(name, list, "a list")

    def texts(self, name: str) -> list[str]:
        """Returns a list of strings."""
        return [self.text_of(name, item) for item in self.items(name)]

    def text_of(self, name: str, value: Any) -> str:
        """Returns a value within a field, which must be a string."""
        if not isinstance(value, str):
            raise self.wrong("a string", value, name)
        return value

    def numbers_of(self, name: str, value: Any) -> float:
        """Returns a value within a field, which must be a finite number."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or abs(value) > 1e300 or not math.isfinite(value):
            raise self.wrong("a finite number", value, name)
        return float(value)

    def pairs(self, name: str) -> dict[str, str]:
        """Returns an object whose values are strings."""
        value = self._take(name, dict, "an object of strings")
        return {self.text_of(name, key): self.text_of(f"{name}.{key}", text) for key, text in value.items()}

    def raw(self, name: str) -> Any:
        """Returns the value of a field without a check."""
        return self._value.get(name)

    def _take(self, name: str, kind: type, expected: str) -> Any:
        value = self._value.get(name)
        if not isinstance(value, kind):
            raise self.wrong(expected, value, name)
        return value
