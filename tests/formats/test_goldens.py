"""Tests of tensors that other tools wrote.

hfq dequantizes them bit-identically to the tool's own code, in the dtype of the golden file.
"""

import json

import pytest
import torch

from hfq.checkpoint import Reader, read_header
from hfq.checkpoint.index import Checkpoint
from hfq.formats import FORMATS, detect_formats, tensors_by_module
from hfq.formats.configs.source_config import detection_hints
from hfq.modules.flat_buffer import read_tensor
from tests.support import tiny_models

GOLDENS = sorted((tiny_models.DATA / "goldens").glob("*.safetensors"))
STEPS = {"every eighth": 8, "every fourth": 4}


def test_every_golden_that_a_dialect_names_is_there():
    named = {name for cls in FORMATS.values() for dialect in cls.variants for name in dialect.goldens}
    assert named == {path.stem for path in GOLDENS}


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_the_weights_are_the_peers_bit_for_bit(path):
    metadata = read_header(path).metadata
    checkpoint = Checkpoint.from_files([path])
    reader = Reader(checkpoint)
    hints = detection_hints(checkpoint, json.loads(metadata["quantization_config"]))
    hints |= {"quanto_qmap": json.loads(metadata["quanto_qmap"])} if "quanto_qmap" in metadata else {}
    modules = tensors_by_module(checkpoint.tensors)
    size = int(metadata.get("in_features", 256)), int(metadata.get("out_features", 64))
    weights = []
    for module, found in detect_formats(modules, hints).items():
        infos = modules[module]
        tensors = {local: read_tensor(reader, info) for local, info in infos.items()}
        sized = found.sized(*size)
        specs = {spec.name: spec for spec in sized.tensor_specs(*size)}
        assert {name: info.shape for name, info in infos.items()} == {
            name: specs[name].shape for name in infos
        }
        weights.append(sized.resolve(module, tensors).dequantize(tensors))
    expected = read_tensor(reader, checkpoint.tensors["expected"])
    rows = (torch.stack(weights) if expected.dim() == 3 else weights[0])[..., :: STEPS[metadata["rows"]], :]
    assert torch.equal(rows.to(expected.dtype), expected)
