"""One small checkpoint that many tests of this folder read."""

import pytest
import torch
from safetensors.torch import save_file

from hfq.checkpoint import Checkpoint


@pytest.fixture
def folder(tmp_path):
    """A folder with one file of three tensors, of 256 KiB, 64 and 2 bytes."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "big": torch.randint(0, 256, (512, 512), dtype=torch.uint8, generator=generator),
        "small": torch.arange(16, dtype=torch.float32),
        "tiny": torch.tensor([1.5], dtype=torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def checkpoint(folder):
    return Checkpoint.open(folder)
