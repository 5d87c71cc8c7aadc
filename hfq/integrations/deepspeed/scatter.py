"""`reader_ranks="rank0"`: ranks on nodes without the files get a folder that describes them, while rank 0
reads and deals out.
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
def described_folder(path: Any, variant: str | None = None) -> Iterator[Any]:
    """The folder to load from: `path`, or on a rank that does not have it a folder with the same config, code
    and headers.

    Its safetensors files have the headers and the sizes of the real ones, and no values: they take no room on
    disk and are never read. All ranks must call it.

    Args:
        path: The folder as this rank was given it.
        variant: As given to `from_pretrained`.
    """
    rank, _ = start_distributed()
    is_here = os.path.isdir(path) if isinstance(path, (str, os.PathLike)) else False
    has = exchange(is_here)
    if all(has) or not has[0]:
        yield path
        return
    described, error = attempt(_describe, Path(path), variant) if rank == 0 else (None, None)
    raise_together(error)
    box: list[Any] = [described]
    dist.broadcast_object_list(box, src=0)
    if is_here:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hfq-") as root:
        folder = os.path.join(
            root, os.path.basename(os.path.normpath(path))
        )  # the name of code that comes with the model
        os.mkdir(folder)
        for name, text in box[0]["texts"].items():
            Path(folder, name).write_bytes(text)
        for name, (header, size) in box[0]["files"].items():
            with open(Path(folder, name), "wb") as stream:
                stream.write(header)
                stream.truncate(size)
        yield folder


def _describe(folder: Path, variant: str | None) -> dict[str, Any]:
    """The texts beside the weights, and the header and size of each file of weights."""
    files = {}
    for file, header in Checkpoint.open(folder, variant=variant).headers.items():
        with open(file, "rb") as stream:
            files[os.path.basename(file)] = stream.read(header.data_start), header.nbytes
    entries = sorted((*folder.glob("*.json"), *folder.glob("*.py")))
    texts = {entry.name: entry.read_bytes() for entry in entries if entry.stat().st_size <= _LARGEST_TEXT}
    return {"texts": texts, "files": files}
