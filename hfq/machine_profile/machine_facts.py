"""Facts about this machine: processor, memory, file system, versions, and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

from hfq.checkpoint.cgroups import cpu_count

__all__ = ["machine_facts"]

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


def machine_facts(folder: Path) -> dict[str, str]:
    """Returns the facts as {name: text}.

    Args:
        folder: Folder of the checkpoints. The facts include the type of its file system.
    """
    from hfq.version import __version__

    versions = [f"hfq {__version__}", f"Python {platform.python_version()}", *map(_version, _PACKAGES)]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{_processor()}, {cpu_count()} cores for this process",
        "memory": f"{_total_memory() / 1e9:.1f} GB",
        "system": f"{platform.system()} {platform.release()}, {_file_system(folder)} file system",
        "versions": ", ".join(versions),
    }


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def _processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _file_system(folder: Path) -> str:
    """Returns the file system type of the longest mount point that contains a folder."""
    path, found = f"{folder.resolve()}/", ("", "unknown")
    for line in _lines("/proc/mounts"):
        _, mount, kind, *_ = line.split()
        if path.startswith(f"{mount.rstrip('/')}/") and len(mount) >= len(found[0]):
            found = mount, kind
    return found[1]


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
