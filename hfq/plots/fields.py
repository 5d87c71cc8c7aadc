"""JSON objects whose fields are checked as they are taken: a file that somebody hands in may hold
anything.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hfq.errors import SetupError

__all__ = ["Fields", "read_json"]

_MOST_NBYTES = 512 << 20


def read_json(file: Path) -> Any:
    """The content of a JSON file.

    Raises:
        SetupError: It cannot be read, is larger than 512 MiB, or is no JSON.
    """
    try:
        if file.stat().st_size > _MOST_NBYTES:
            raise _refusal(
                "This file is too large to be drawn.",
                file,
                f"at most {_MOST_NBYTES:,} B",
                f"{file.stat().st_size:,} B",
            )
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal("This file cannot be read.", file, "a JSON file", error.strerror or error) from error
    except (ValueError, RecursionError) as error:  # what is no JSON, and no UTF-8
        raise _refusal(
            "This file is no JSON.", file, "JSON", str(error)[:200] or type(error).__name__
        ) from error


def _refusal(what: str, file: Path, expected: str, found: object) -> SetupError:
    return SetupError(
        what,
        file=file,
        expected=expected,
        found=found,
        fix="pass what hfq.report(model).save(file), hfq plan --json or hfq evaluate --json wrote, or "
        "benchmarks of a checkout",
    )


class Fields:
    """One JSON object.

    Args:
        value: What should be an object.
        file: The file it comes from, for messages.
        where: Its place in the file, for messages.
    """

    def __init__(self, value: Any, file: Path, where: str = "") -> None:
        self.file, self.where = file, where
        if not isinstance(value, dict):
            raise self.wrong("an object", value)
        self._value: dict[str, Any] = value

    def wrong(self, expected: str, found: Any, name: str = "") -> SetupError:
        """The error of a field that is not what it should be."""
        place = ".".join(part for part in (self.where, name) if part) or "the whole file"
        shown = "nothing" if found is None else f"{type(found).__name__} {str(found)[:60]}"
        return SetupError(
            f"{place} of this file is not what it should be. Nothing was drawn.",
            file=self.file,
            expected=expected,
            found=shown,
            fix="write the file anew with this version of hfq",
        )

    def names(self) -> list[str]:
        """The names of all fields, in their order."""
        return list(self._value)

    def has(self, *names: str) -> bool:
        """Whether all of these fields are there and not null."""
        return all(self._value.get(name) is not None for name in names)

    def text(self, name: str) -> str:
        """A string."""
        return self._take(name, str, "a string")

    def number(self, name: str) -> float:
        """A finite number."""
        return self.numbers_of(name, self._value.get(name))

    def count(self, name: str) -> int:
        """A whole number of 0 or more."""
        value = self._take(name, int, "a whole number")
        if isinstance(value, bool) or value < 0:
            raise self.wrong("a whole number of 0 or more", value, name)
        return value

    def object(self, name: str) -> Fields:
        """An object."""
        return Fields(self._value.get(name), self.file, f"{self.where}.{name}".lstrip("."))

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        items = self.items(name)
        return [
            Fields(item, self.file, f"{self.where}.{name}".lstrip(".") + f"[{place}]")
            for place, item in enumerate(items)
        ]

    def items(self, name: str) -> list[Any]:
        """A list of anything."""
        return self._take(name, list, "a list")

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        return [self.text_of(name, item) for item in self.items(name)]

    def text_of(self, name: str, value: Any) -> str:
        """A value within a field, which must be a string."""
        if not isinstance(value, str):
            raise self.wrong("a string", value, name)
        return value

    def numbers_of(self, name: str, value: Any) -> float:
        """A value within a field, which must be a finite number."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or abs(value) > 1e300 or not math.isfinite(value):
            raise self.wrong("a finite number", value, name)
        return float(value)

    def pairs(self, name: str) -> dict[str, str]:
        """An object of strings."""
        value = self._take(name, dict, "an object of strings")
        return {self.text_of(name, key): self.text_of(f"{name}.{key}", text) for key, text in value.items()}

    def raw(self, name: str) -> Any:
        """Whatever is there."""
        return self._value.get(name)

    def _take(self, name: str, kind: type, expected: str) -> Any:
        value = self._value.get(name)
        if not isinstance(value, kind):
            raise self.wrong(expected, value, name)
        return value
