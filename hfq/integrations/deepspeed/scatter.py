"""Headers-only checkpoints for ranks without the files, for `reader_ranks="rank0"`.

Rank 0 alone reads the weights and scatters them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hfq.checkpoint import Checkpoint
from hfq.integrations.deepspeed.start_ranks import start_distributed
from hfq.loading.ranks import attempt, exchange, raise_together

__all__ = ["described_folder"]

_LARGEST_TEXT = 64 << 20


@contextlib.contextmanager
def described_folder(path: Any, variant: str | None = None, gguf_file: str | None = None) -> Iterator[Any]:
    """A context manager that yields the folder to load from.

    This is `path`, or a headers-only checkpoint on a rank where `path` is missing or empty. Its config and
    code are copies. Its weight files have the headers and sizes of the real files, but no values. They
    occupy almost no disk space, and their values are never read. All ranks must call it.

    Args:
        path: The checkpoint passed to `from_pretrained`.
        variant: The `variant` passed to `from_pretrained`.
        gguf_file: The name of a GGUF file of the checkpoint; None without one.

    Yields:
        The folder to load from.

    Raises:
        HfqError: Rank 0 could not read the checkpoint.
    """
    rank, _ = start_distributed()
    is_here = isinstance(path, (str, os.PathLike)) and os.path.isdir(path) and bool(os.listdir(path))
    has = exchange(is_here)
    if all(has) or not has[0]:
        yield path
        return
    described, error = attempt(_describe, Path(path), variant, gguf_file) if rank == 0 else (None, None)
    raise_together(error)
    box: list[Any] = [described]
    dist.broadcast_object_list(box, src=0)
    if is_here:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hfq-") as root:
        folder = os.path.join(
            root, os.path.basename(os.path.normpath(path))
        )  # transformers names the model's own code after the folder
        os.mkdir(folder)
        for name, text in box[0]["texts"].items():
            Path(folder, name).write_bytes(text)
        for name, (header, size) in box[0]["files"].items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            with open(Path(folder, name), "wb") as stream:
                stream.write(header)
                stream.truncate(size)
        yield folder


def _describe(folder: Path, variant: str | None, gguf_file: str | None) -> dict[str, Any]:
    """Returns the JSON and Python files, and the header and size of each weight file."""
    files = {}
    for file, header in Checkpoint.open(folder, variant=variant, gguf_file=gguf_file).headers.items():
        with open(file, "rb") as stream:
            files[os.path.relpath(file, folder)] = stream.read(header.data_start), header.nbytes
    entries = sorted((*folder.glob("*.json"), *folder.glob("*.py")))
    texts = {entry.name: entry.read_bytes() for entry in entries if entry.stat().st_size <= _LARGEST_TEXT}
    return {"texts": texts, "files": files}
