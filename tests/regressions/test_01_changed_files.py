"""Tests that a checkpoint file which changes after the load is an error at the next forward pass."""

import os
import shutil

import pytest
import torch

from hfq.errors import CheckpointError
from tests.support.models import GPTQ, load

TOKENS = torch.arange(8)[None]


def rewritten(file):
    """Writes other bytes into the same file, of the same size."""
    data = bytearray(file.read_bytes())
    data[-1000] ^= 255
    with file.open("r+b") as target:
        target.write(data)


def touched(file):
    os.utime(file)


@pytest.mark.parametrize("change", [rewritten, touched], ids=lambda change: change.__name__)
@pytest.mark.parametrize("checksum", ["off", "first", "always"])
@pytest.mark.parametrize("disk_io", ["direct", "buffered"])
def test_a_file_that_changes_between_two_passes_is_an_error(change, checksum, disk_io, tmp_path):
    path = shutil.copytree(GPTQ, tmp_path / "model")
    model = load(path, {"": "disk"}, disk_checksum=checksum, disk_io=disk_io)
    with torch.no_grad():
        model(TOKENS)
        change(path / "model.safetensors")
        with pytest.raises(CheckpointError, match="changed while the model was using it") as caught:
            model(TOKENS)
    assert caught.value.file == str(path / "model.safetensors")
