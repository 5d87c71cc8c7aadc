"""Real peers' tensors, dequantized as the peer's own code did: bit for bit in the peer's dtype."""

import json

import pytest
import tiny_models
import torch

from hfq.checkpoint import Reader, read_header
from hfq.checkpoint.index import Checkpoint
from hfq.formats import detect_formats, tensors_by_module
from hfq.modules.row import read_tensor

GOLDENS = sorted((tiny_models.DATA / "goldens").glob("*.safetensors"))


def test_there_are_goldens_of_every_family():
    assert {path.name.split("-")[0] for path in GOLDENS} == {"ct", "gptqmodel", "hf"}


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_the_weights_are_the_peers_bit_for_bit(path):
    config = json.loads(read_header(path).metadata["quantization_config"])
    checkpoint = Checkpoint.from_files([path])
    reader = Reader(checkpoint)
    expected = read_tensor(reader, checkpoint.tensors["expected"])
    modules = tensors_by_module(checkpoint.tensors)
    ((module, found),) = detect_formats(modules, config).items()
    tensors = {local: read_tensor(reader, info) for local, info in modules[module].items()}
    specs = {spec.name: spec for spec in found.tensor_specs(256, 64)}
    assert {name: info.shape for name, info in modules[module].items()} == {
        name: specs[name].shape for name in modules[module]
    }
    weight = found.resolve(module, tensors).dequantize(tensors, expected.dtype)
    assert torch.equal(weight[::8], expected)
