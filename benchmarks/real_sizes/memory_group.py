"""Memory cgroups that limit a measuring process, page cache included."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hfq.errors import SetupError

__all__ = ["join_group", "memory_group"]

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_group(limit: int | None) -> Iterator[str | None]:
    """Makes a cgroup with a memory limit for processes of this benchmark, and removes it afterwards.

    Args:
        limit: Limit in bytes. None makes no group.

    Yields:
        The folder of the group, for `join_group`; None without a limit.

    Raises:
        SetupError: Groups cannot be made here.
    """
    if limit is None:
        yield None
        return
    root, file = (_V1, "memory.limit_in_bytes") if _V1.is_dir() else (_V2, "memory.max")
    group = root / f"hfq-benchmark-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(str(limit), encoding="ascii")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise SetupError(
            "No memory cgroup can be made here.",
            expected=f"a folder that this user can write, with {file}",
            found=str(error),
            fix="Run as root on a machine with memory cgroups, or pass --quick, which sets no limits.",
        ) from error
    try:
        yield str(group)
    finally:
        group.rmdir()


def join_group(folder: str | None) -> None:
    """Moves this process into a group of `memory_group`."""
    if folder is not None:
        Path(folder, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
