"""Memory that this process can use: of the machine, and of the cgroups that it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["available_memory"]


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
    left = [*_left_in_cgroups(root)]
    machine = _read_fields(root / "proc/meminfo").get("MemAvailable:")
    if machine is not None:
        left.append(machine << 10)
    return max(0, min(left)) if left else None


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yields the bytes left in each limited cgroup, from this process up to the mount point."""
    for mount, folder, files in _memory_cgroups(root):
        while True:
            left = _left(folder, files)
            if left is not None:
                yield left
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _left(folder: Path, files: _Files) -> int | None:
    """Returns the bytes that one cgroup leaves, or None if it has no limit."""
    limit, usage = _read_number(folder / files.limit), _read_number(folder / files.usage)
    if limit is None or usage is None:
        return None
    fields = _read_fields(folder / "memory.stat")
    return limit - usage + sum(fields.get(name, 0) for name in files.reclaimable)


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, Path, _Files]]:
    """Yields (mount point, folder of this process, files) of each hierarchy that limits memory."""
    paths = dict[str, str]()
    for line in _read_lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or "memory" in controllers.split(","):
            paths["v1" if controllers else "v2"] = path
    for line in _read_lines(root / "proc/self/mountinfo"):
        fields, _, kind = line.partition(" - ")
        columns, kinds = fields.split(), kind.split()
        if len(columns) < 5 or len(kinds) < 3:
            continue
        is_v1 = kinds[0] == "cgroup" and "memory" in kinds[2].split(",")
        version = "v1" if is_v1 else "v2" if kinds[0] == "cgroup2" else ""
        if version not in paths:
            continue
        path = paths[version]
        mount = root / columns[4].lstrip("/")
        below = path.removeprefix(columns[3]) if path.startswith(columns[3]) else ""
        yield mount, mount / below.lstrip("/"), _V1 if is_v1 else _V2


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _read_number(file: Path) -> int | None:
    """Returns the number in a file; None if it cannot be read, or says `max`."""
    text = "".join(_read_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _read_fields(file: Path) -> dict[str, int]:
    """Returns the lines `name number …` of a file."""
    pairs = [line.split()[:2] for line in _read_lines(file)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
