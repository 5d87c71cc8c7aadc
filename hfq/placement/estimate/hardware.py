"""Memory as people write it (`24GiB×2`), and the machine that a model is planned for. Pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfq.errors import PlacementError, nearest

__all__ = ["Hardware", "parse_gpus", "parse_size"]

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_NO_UNIT = re.compile(r"^\s*[0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?\s*$")
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*$")
_TIMES = re.compile(r"^(.*\S)\s*(?:[×*]|(?<=[\sA-Za-z])[xX])\s*([0-9]+)$")
_MOST_NBYTES = 1 << 60


@dataclass(frozen=True)
class Hardware:
    """What a model is planned for.

    Attributes:
        gpus: The memory of each accelerator, in bytes.
        cpu: The memory of the host that may be taken, in bytes.
        disk: The bytes of the checkpoint that may stay on disk; None for all of them.
    """

    gpus: tuple[int, ...] = ()
    cpu: int = 0
    disk: int | None = None

    @property
    def main(self) -> str:
        """The device that computes: the first accelerator, or the CPU."""
        return "cuda:0" if self.gpus else "cpu"

    def capacities(self) -> dict[str, int]:
        """The bytes that each home may hold, by its name in a device map; no entry means no limit."""
        devices = {f"cuda:{index}": nbytes for index, nbytes in enumerate(self.gpus)} | {"cpu": self.cpu}
        return devices if self.disk is None else devices | {"disk": self.disk}


def parse_size(text: str | int | float, what: str, least: int = 1) -> int:
    """Returns the bytes of a size with a unit: `24GiB`, `64 GB`, `1.5e9B`.

    Args:
        text: The size as it was given.
        what: The option it was given to, for messages.
        least: The smallest size that is allowed.

    Raises:
        PlacementError: The text is no size, has no unit, or is out of range.
    """
    if _NO_UNIT.match(str(text)):
        raise PlacementError(
            f"{what} {text} has no unit.",
            expected="a size with a unit: B, kB, MB, GB, TB, KiB, MiB, GiB, or TiB",
            found=repr(text),
            fix=f"Pass {what} {str(text).strip()}GiB, or {what} {str(text).strip()}B if these are bytes.",
        )
    found = _SIZE.match(str(text))
    unit = _UNITS.get(found[2].upper()) if found else None
    nbytes = float(found[1]) * unit if found and unit is not None else None
    if nbytes is None or not least <= nbytes <= _MOST_NBYTES:
        hint = nearest(found[2].upper(), _UNITS) if found and unit is None else ""
        raise PlacementError(
            f"{what} is not a size.{hint}",
            expected=f"{least} B or more, for example 24GiB or 64GB",
            found=repr(text),
            fix=f"pass {what} 24GiB, for example",
        )
    return int(nbytes)


def parse_gpus(texts: Sequence[str], known: Mapping[str, int] | None = None) -> tuple[int, ...]:
    """The memory of each accelerator of `24GiB×2`, `80GB`, or a name that the catalog knows.

    Args:
        texts: One description each; `×`, `x` or `*` and a number repeat one.
        known: The memory of named accelerators, in bytes.

    Raises:
        PlacementError: A description is no size and no known name, or its number is out of range.
    """
    known = known or {}
    gpus: list[int] = []
    for text in texts:
        times = _TIMES.match(text.strip())
        kind, count = (times[1], int(times[2])) if times else (text.strip(), 1)
        if not 1 <= count <= 1024:
            raise PlacementError(
                "--gpu repeats an accelerator too often.",
                expected="1 to 1024",
                found=count,
                fix="pass 24GiB×2",
            )
        by_name = {name.casefold(): nbytes for name, nbytes in known.items()}
        if kind.casefold() in by_name:
            gpus += [by_name[kind.casefold()]] * count
        elif _SIZE.match(kind):
            gpus += [parse_size(kind, "--gpu")] * count
        else:
            raise PlacementError(
                f"There is no accelerator {kind!r} in the catalog.{nearest(kind, known)}",
                found=repr(text),
                expected=f"memory, as 24GiB×2, or one of: {', '.join(known) or 'none'}",
                fix="pass its memory: --gpu 24GiB",
            )
    return tuple(gpus)
