"""Control groups (cgroups) above this process, in both versions."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path, PurePosixPath

__all__ = ["cgroup_folders", "cpu_count", "cpu_quota", "read_lines"]


@functools.cache
def cgroup_folders(controller: str, root: Path = Path("/")) -> tuple[tuple[Path, bool], ...]:
    """Returns the folders of the cgroups above this process, and whether each is of version 1.

    They are looked up once: a pass over offloaded weights asks for the available memory, and a process rarely
    moves to another cgroup.

    Args:
        controller: Name of the controller that version 1 mounts on its own, such as `memory` or `cpu`.
        root: Folder that holds `proc` and the mount points; another one for tests.
    """
    paths = dict[bool, str]()
    for line in read_lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or controller in controllers.split(","):
            paths[bool(controllers)] = path
    found = list[tuple[Path, bool]]()
    for line in read_lines(root / "proc/self/mountinfo"):
        fields, _, kind = line.partition(" - ")
        columns, kinds = fields.split(), kind.split()
        if len(columns) < 5 or len(kinds) < 3:
            continue
        is_v1 = kinds[0] == "cgroup" and controller in kinds[2].split(",")
        if is_v1 in paths and (is_v1 or kinds[0] == "cgroup2"):
            mount = root / columns[4].lstrip("/")
            below = PurePosixPath(paths[is_v1])
            is_below = below.is_relative_to(columns[3])
            parts = below.relative_to(columns[3]).parts if is_below else ()
            found += [(mount.joinpath(*parts[:count]), is_v1) for count in range(len(parts) + 1)]
    return tuple(found)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the processors' time per second that cgroups allow this process, or None.

    It is the least quota of the cgroups above this process, such as 1.5 under `docker run --cpus 1.5`.

    Args:
        root: Folder that holds `proc` and the mount points; another one for tests.
    """
    quotas = list[float]()
    for folder, is_v1 in cgroup_folders("cpu", root):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
        words = " ".join(line for file in files for line in read_lines(folder / file)).split()
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # neither `max` nor -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def cpu_count(root: Path = Path("/")) -> int:
    """Returns the number of processors that this process can keep busy.

    Affinity and quotas of cgroups limit it.

    Args:
        root: Folder that holds `proc` and the mount points; another one for tests.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return count if quota is None else min(count, math.ceil(quota))


def read_lines(file: Path) -> list[str]:
    """Returns the lines of a text file; none if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
