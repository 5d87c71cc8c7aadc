"""Findings about the files, formats, kernels, and disk of a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hfq.cli.doctor.findings import Finding

__all__ = ["checkpoint_findings", "disk_findings"]


def disk_findings(folder: Path) -> Iterator[Finding]:
    """Yields findings about the file system of a folder, its free space, and the page cache."""
    from hfq.checkpoint.filesystem import filesystem_type, is_network
    from hfq.checkpoint.memory_limit import available_memory
    from hfq.machine_profile.machine_limits import cached_share

    kind = filesystem_type(folder) or "unknown"
    free = shutil.disk_usage(folder if folder.exists() else Path()).free
    if is_network(folder):
        fix = "Copy the checkpoint to a local disk. Weights in CPU memory are read, not mapped."
        yield Finding("disk", "warning", f"{kind}, a network file system; {free / 1e9:.1f} GB free", fix)
    else:
        yield Finding("disk", "ok", f"{kind}, {free / 1e9:.1f} GB free")
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return
    total = sum(file.stat().st_size for file in files)
    share = cached_share(files)
    available = available_memory()
    if share is not None:
        yield Finding(
            "disk", "ok", f"{share:.0%} of the checkpoint's {total / 1e9:.3g} GB are in the page cache"
        )
    if available is not None:
        how = "with buffered reads" if total <= available / 2 else "with direct reads"
        yield Finding("disk", "ok", f"fully offloaded, it would be read {how}")
    if not _takes_direct_reads(files[0]):
        text = "no direct reads here: offloaded weights fill the page cache"
        yield Finding(
            "disk", "note", text, "put the checkpoint on a local disk to stream past the page cache"
        )


def checkpoint_findings(path: Path | None) -> Iterator[Finding]:
    """Yields findings about the formats, oddities, and kernels of a checkpoint."""
    if path is None:
        return
    from hfq.checkpoint import Checkpoint
    from hfq.cli.inspect import inspect_checkpoint
    from hfq.errors import HfqError

    try:
        report = inspect_checkpoint(Checkpoint.open(path), kernels=True)
    except HfqError as error:
        found = f" (found: {error.found})" if error.found is not None else ""
        yield Finding("checkpoint", "error", f"{error.message}{found}", error.fix)
        return
    variants = (
        ", ".join(f"{count} × {variant}" for variant, count in report["formats"].items()) or "not packed"
    )
    yield Finding("checkpoint", "ok", f"{len(report['files'])} files, {report['nbytes']:,} bytes, {variants}")
    for note in report["odd"]:
        yield Finding("checkpoint", "note", note)
    chosen = Counter((entry["format"], tuple(entry["kernels"].items())) for entry in report["modules"])
    for (variant, reasons), count in chosen.items():
        used = next(name for name, reason in reasons if reason is None)
        others = "; ".join(f"{name}: {reason}" for name, reason in reasons if reason is not None)
        yield Finding("checkpoint", "ok", f"{count} × {variant} by {used} ({others})")


def _takes_direct_reads(file: Path) -> bool:
    try:
        os.close(os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0)))
    except OSError:
        return False
    return hasattr(os, "O_DIRECT")
