"""Checkpoints for measurements: one Llama-like architecture in three formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hfq.errors import SetupError
from hfq.machine_profile import probe_models
from hfq.machine_profile.probe_models import (
    GPTQ4,
    GROUP,
    Architecture,
    Planned,
    WeightLayout,
    draw_bf16,
    draw_scales,
)

__all__ = ["FORMATS", "LAYOUTS", "architecture_of_size", "checkpoint_files", "make_checkpoint"]


def architecture_of_size(nbytes: float) -> Architecture:
    """Returns the widest architecture with at least 8 layers in `nbytes` of bfloat16.

    The hidden size is at most 2048.

    Raises:
        SetupError: `nbytes` is too small for such a model.
    """
    for hidden in (2048, 1024, 512, 256, 128):
        empty, one = (
            sum(t.nbytes for t in Architecture(hidden, layers).tensors(_BF16).values()) for layers in (0, 1)
        )
        layers = round((nbytes - empty) / (one - empty))
        if layers >= 8:
            return Architecture(hidden, layers)
    raise SetupError(
        "The size is too small for a model to measure with.",
        expected=f"at least {empty + 8 * (one - empty):,} bytes",
        found=f"{nbytes:,.0f} bytes",
        fix="Pass a larger --size.",
    )


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


def _e4m3(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draws codes whose values are below 2, so that none is NaN."""
    return generator.integers(0, 256, shape, np.uint8) & 0xBF


def _plain(rows: int, columns: int) -> dict[str, Planned]:
    return {"weight": Planned("BF16", (rows, columns), draw_bf16)}


def _fp8(rows: int, columns: int) -> dict[str, Planned]:
    grid = -(-rows // GROUP), -(-columns // GROUP)
    return {
        "weight": Planned("F8_E4M3", (rows, columns), _e4m3),
        "weight_scale_inv": Planned("F32", grid, draw_scales(0.034, np.float32)),
    }


_BF16 = WeightLayout("bf16", None, _plain)
_FP8 = WeightLayout(
    "fp8",
    {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [GROUP, GROUP],
        "activation_scheme": "dynamic",
    },
    _fp8,
)
LAYOUTS = {layout.name: layout for layout in (_BF16, _FP8, GPTQ4)}
FORMATS = tuple(LAYOUTS)
"""The formats of linear layers; `bf16` is unquantized."""
