"""Memory that this process can use: of the machine, and of the cgroups that it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hfq.checkpoint.cgroups import cgroup_folders, read_lines

__all__ = ["available_memory", "cgroup_limit"]


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of the files and fields of one cgroup version."""

    limit: str
    usage: str
    reclaimable: tuple[str, str]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that can be allocated without swapping, or None if unknown.

    It is the least of MemAvailable and of the rest that each cgroup above this process leaves. The page cache
    counts as available, since the kernel reclaims it.

    Args:
        root: Folder that holds `proc` and the mount points; another one for tests.
    """
    left = [
        limit - usage + sum(fields.get(name, 0) for name in files.reclaimable)
        for limit, usage, fields, files in _limits(root)
    ]
    machine = _read_fields(root / "proc/meminfo").get("MemAvailable:")
    if machine is not None:
        left.append(machine << 10)
    return max(0, min(left)) if left else None


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Returns the least memory limit in bytes of the cgroups above this process, or None."""
    machine = _read_fields(root / "proc/meminfo").get("MemTotal:")
    limits = [limit for limit, *_ in _limits(root) if machine is None or limit < machine << 10]
    return min(limits, default=None)


def _limits(root: Path) -> Iterator[tuple[int, int, dict[str, int], _Files]]:
    """Yields (limit, usage, statistics, file names) of each cgroup with a memory limit."""
    for folder, is_v1 in cgroup_folders("memory", root):
        files = _V1 if is_v1 else _V2
        limit, usage = _read_number(folder / files.limit), _read_number(folder / files.usage)
        if limit is not None and usage is not None:
            yield limit, usage, _read_fields(folder / "memory.stat"), files


def _read_number(file: Path) -> int | None:
    """Returns the number in a file; None if it cannot be read, or says `max`."""
    text = "".join(read_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _read_fields(file: Path) -> dict[str, int]:
    """Returns the lines `name number …` of a file."""
    pairs = [line.split()[:2] for line in read_lines(file)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
