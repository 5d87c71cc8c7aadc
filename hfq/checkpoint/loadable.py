"""Checks of a folder before its load: valid headers, and what transformers requires."""

from __future__ import annotations

import os
from pathlib import Path

from hfq.checkpoint.index import Checkpoint
from hfq.errors import CheckpointError, nearest

__all__ = ["open_loadable"]


def open_loadable(
    folder: str | os.PathLike,
    variant: str | None = None,
    gguf_file: str | None = None,
    *,
    needs_config: bool = True,
) -> Checkpoint:
    """Opens the checkpoint in a folder, and checks its index and config.json.

    Args:
        folder: The folder.
        variant: As in `from_pretrained`.
        gguf_file: The name of a GGUF file in the folder; None to look for a checkpoint.
        needs_config: False if config.json may be missing, since the config of the model is known.

    Raises:
        CheckpointError: The checkpoint is damaged, its index has no metadata, or it has no config.json.
    """
    checkpoint = Checkpoint.open(folder, variant=variant, gguf_file=gguf_file)
    _check_index(checkpoint)
    if not checkpoint.config and needs_config and checkpoint.gguf is None:
        raise _no_config(Path(folder))
    return checkpoint


def _no_config(folder: Path) -> CheckpointError:
    found = sorted(entry.name for entry in folder.iterdir())[:12]
    if "config.json" in found:
        return CheckpointError(
            "The checkpoint's config.json is empty.",
            file=folder / "config.json",
            expected="the config of a model",
            found="{}",
            fix="Download this file again.",
        )
    return CheckpointError(
        "The checkpoint has no config.json.",
        file=folder,
        expected="config.json next to the weights",
        found=", ".join(found) + "." + nearest("config.json", found),
        fix="Download config.json of this model into the folder.",
    )


def _check_index(checkpoint: Checkpoint) -> None:
    """Checks that the index has `metadata`.

    transformers 5.17 to 5.23 read it without a check (`utils/hub.py`).
    """
    index = checkpoint.side_file("model.safetensors.index.json") if len(checkpoint.headers) > 1 else None
    if index is not None and not isinstance(index.get("metadata"), dict):
        raise CheckpointError(
            "The index of the checkpoint has no metadata, which transformers requires.",
            expected='"metadata": {}',
            file=Path(checkpoint.root) / "model.safetensors.index.json",
            found=repr(index.get("metadata"))[:80],
            fix='Add "metadata": {} to the index, next to weight_map.',
        )
