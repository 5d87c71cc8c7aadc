"""Tests that a checkpoint file which changes after the load is an error at the next forward pass."""

import os
import shutil

import pytest
import torch

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.writer import write_safetensors
from hfq.errors import CheckpointError
from hfq.formats.unquantized import Unquantized
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.offloader import Offloader
from hfq.offload.unit import OffloadUnit, UnquantizedParameter
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


@pytest.mark.parametrize("part", ["routed experts", "an embedding table"])
def test_files_that_hold_no_whole_unit_are_checked_too(part, tmp_path):
    """Routed experts and rows of embeddings are read outside of units."""
    write_safetensors(tmp_path / "model.safetensors", {"x.weight": ("F32", (64, 64), bytes(64 * 64 * 4))})
    checkpoint = Checkpoint.open(tmp_path)
    reader, info = Reader(checkpoint), checkpoint.tensors["x.weight"]
    if part == "routed experts":
        expert = QuantizedModule("x", 64, 64, Unquantized(), {"weight": info})
        root = torch.nn.Sequential(torch.nn.Identity())
        offloader = Offloader([], reader, "cpu", on_demand=[expert], root=root)
    else:
        table = torch.nn.Embedding(64, 64, device="meta").requires_grad_(False)
        unit = OffloadUnit("x", table, (), (UnquantizedParameter(table, "weight", info),))
        root = torch.nn.Sequential(table)
        offloader = Offloader([unit], reader, "cpu", root=root)
    root(torch.tensor([3]))
    touched(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError):
        root(torch.tensor([3]))
    offloader.close()
