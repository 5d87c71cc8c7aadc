"""Checkpoints for measurements: one Llama-like architecture in three formats."""

from __future__ import annotations

from pathlib import Path

from hfq.machine_profile import probe_models
from hfq.machine_profile.probe_models import (
    FP8,
    GPTQ4,
    Architecture,
    Planned,
    WeightLayout,
    draw_bf16,
)

__all__ = ["FORMATS", "LAYOUTS", "architecture_of_size", "checkpoint_files", "make_checkpoint"]


def architecture_of_size(nbytes: float) -> Architecture:
    """Returns the widest architecture with at least 8 layers in `nbytes` of bfloat16.

    Raises:
        SetupError: `nbytes` is too small for such a model.
    """
    return probe_models.architecture_of_size(nbytes, _BF16)


def make_checkpoint(folder: Path, architecture: Architecture, weights: str) -> Path:
    """Writes a checkpoint into its own folder within `folder`, unless a complete one exists.

    Args:
        folder: Folder of all checkpoints. It is created if missing.
        architecture: The model.
        weights: Format of the linear layers, one of `FORMATS`.

    Returns:
        Folder of the checkpoint.

    Raises:
        SetupError: The disk has too little free space. Nothing was written.
        CheckpointError: A file cannot be written.
    """
    return probe_models.make_checkpoint(folder, architecture, LAYOUTS[weights])


def checkpoint_files(path: Path) -> list[Path]:
    """Returns the shards of a checkpoint, or its GGUF files, in order."""
    return sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])


def _plain(rows: int, columns: int) -> dict[str, Planned]:
    return {"weight": Planned("BF16", (rows, columns), draw_bf16)}


_BF16 = WeightLayout("bf16", None, _plain)
LAYOUTS = {layout.name: layout for layout in (_BF16, FP8, GPTQ4)}
FORMATS = tuple(LAYOUTS)
"""The formats of linear layers; `bf16` is unquantized."""
