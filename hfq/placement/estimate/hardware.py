"""Memory sizes as people write them (`24GiB×2`), and the machine of a plan.

Pure data.
"""

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
_SPELLINGS = ("kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
_NO_UNIT = re.compile(r"^\s*[0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?\s*$")
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*$")
_TIMES = re.compile(r"^(.*\S)\s*(?:[×*]|(?<=[\sA-Za-z])[xX])\s*([0-9]+)$")
_MOST_NBYTES = 1 << 60


@dataclass(frozen=True)
class Hardware:
    """Machine that a model is planned for.

    Attributes:
        gpus: Memory of each accelerator, in bytes.
        cpu: Usable memory of the host, in bytes.
        disk: Bytes of the checkpoint that may stay on disk; None for no limit.
        kind: Device type of the accelerators.
    """

    gpus: tuple[int, ...] = ()
    cpu: int = 0
    disk: int | None = None
    kind: str = "cuda"

    @property
    def main(self) -> str:
        """Execution device: the first accelerator, or the CPU."""
        return f"{self.kind}:0" if self.gpus else "cpu"

    def capacities(self) -> dict[str, int]:
        """Returns the bytes that each device of a device map may hold; no entry means no limit."""
        devices = {f"{self.kind}:{index}": nbytes for index, nbytes in enumerate(self.gpus)}
        devices["cpu"] = self.cpu
        return devices if self.disk is None else devices | {"disk": self.disk}


def parse_size(text: str | int | float, what: str, least: int = 1) -> int:
    """Returns the bytes of a size with a unit: `24GiB`, `64 GB`, `1.5e9B`.

    Args:
        text: The size as given.
        what: Option it was given to, for messages.
        least: Smallest valid size.

    Raises:
        PlacementError: The text is no size, has no unit, or is out of range.
    """
    if _NO_UNIT.match(str(text)):
        raise PlacementError(
            f"{what} {text} has no unit.",
            expected=f"a size with a unit: B, {', '.join(_SPELLINGS[:-1])}, or {_SPELLINGS[-1]}",
            found=repr(text),
            fix=f"Pass {what} {str(text).strip()}GiB, or {what} {str(text).strip()}B if these are bytes.",
        )
    shown = str(text).strip() or "''"
    found = _SIZE.match(str(text))
    unit = _UNITS.get(found[2].upper()) if found else None
    nbytes = float(found[1]) * unit if found and unit is not None else None
    if nbytes is None or not least <= nbytes <= _MOST_NBYTES:
        hint = nearest(found[2], _SPELLINGS) if found and unit is None else ""
        raise PlacementError(
            f"{what} {shown} is not a size.{hint}",
            expected=f"{least} B or more, for example 24GiB or 64GB",
            found=repr(text),
            fix=f"Pass a number with a unit, for example {what} 24GiB.",
        )
    return int(nbytes)


def parse_gpus(texts: Sequence[str], known: Mapping[str, int] | None = None) -> tuple[int, ...]:
    """Returns the memory of each accelerator of `24GiB×2`, `80GB`, or a name from the catalog.

    Args:
        texts: Descriptions; `×`, `x`, or `*` and a number repeat one.
        known: Memory of named accelerators, in bytes.

    Raises:
        PlacementError: A description is no size and no known name, or its number is out of range.
    """
    by_name = {name.casefold(): nbytes for name, nbytes in (known or {}).items()}
    gpus: list[int] = []
    for text in texts:
        times = _TIMES.match(text.strip())
        # the x of a name such as rtx4090 is no multiplier
        is_repeated = times and (times[1].casefold() in by_name or _SIZE.match(times[1]))
        kind, count = (times[1], int(times[2])) if times and is_repeated else (text.strip(), 1)
        if not 1 <= count <= 1024:
            raise PlacementError(
                f"--gpu {text} has an invalid number of accelerators.",
                expected="1 to 1024",
                found=count,
                fix=f"Pass {kind}×2, for example.",
            )
        if kind.casefold() in by_name:
            gpus += [by_name[kind.casefold()]] * count
        elif _SIZE.match(kind):
            gpus += [parse_size(kind, "--gpu")] * count
        else:
            raise PlacementError(
                f"--gpu {text} is not a size.{nearest(kind, known or ())}",
                expected=f"a size such as 24GiB or 24GiB×2, or a name: {', '.join(known or ()) or 'none'}",
                fix="Pass its memory, for example --gpu 24GiB.",
            )
    return tuple(gpus)
