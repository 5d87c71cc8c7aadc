"""Tests of measured checkpoints: one format each, finite weights, requested size."""

import pytest
import torch

from benchmarks.checkpoints import FORMATS, LAYOUTS, architecture_of_size, make_checkpoint
from hfq import SetupError
from hfq.checkpoint import Checkpoint, Reader
from hfq.cli.inspect import inspect_checkpoint
from hfq.formats import detect_formats, tensors_by_module
from hfq.formats.configs.source_config import source_config
from hfq.machine_profile.probe_models import Architecture
from hfq.modules.flat_buffer import read_tensor

SMALL = Architecture(128, 2)
DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("weights", "dialect"),
    [("bf16", None), ("fp8", "fp8 e4m3 block 128x128"), ("gptq4", "gptq v1 int4 g128 sym")],
)
def test_every_linear_layer_is_packed_in_one_dialect(tmp_path, weights, dialect):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, SMALL, weights))
    assert len(checkpoint.headers) >= 3
    assert {name: (i.dtype, i.shape, i.nbytes) for name, i in checkpoint.tensors.items()} == {
        name: (t.dtype, t.shape, t.nbytes) for name, t in SMALL.tensors(LAYOUTS[weights]).items()
    }
    variants = inspect_checkpoint(checkpoint)["formats"]
    assert sum(variants.values()) == (0 if dialect is None else 14)
    assert all("block" in name if weights == "fp8" else name == dialect for name in variants)


@pytest.mark.parametrize("weights", FORMATS)
def test_weights_are_finite_and_of_a_usual_size(tmp_path, weights):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, SMALL, weights))
    reader, modules = Reader(checkpoint), tensors_by_module(checkpoint.tensors)
    tensors = {local: read_tensor(reader, info) for local, info in modules[DOWN].items()}
    if weights == "bf16":
        weight = tensors["weight"].float()
    else:
        weight = (
            detect_formats(modules, source_config(checkpoint))[DOWN]
            .resolve(DOWN, tensors)
            .dequantize(tensors)
        )
    assert weight.shape == (128, 512)
    assert torch.isfinite(weight).all()
    assert 0.015 < weight.std() < 0.025  # of 65,536 independent values
    assert abs(weight.mean()) < 0.003  # GPTQ codes lie around 7.5, their zero point is 8


def test_the_size_is_met_by_the_number_of_layers():
    for nbytes in (6e6, 60e6, 2.4e9):
        architecture = architecture_of_size(nbytes)
        found = sum(tensor.nbytes for tensor in architecture.tensors(LAYOUTS["bf16"]).values())
        assert abs(found - nbytes) < 0.1 * nbytes
        assert architecture.layers >= 8
    assert architecture_of_size(2.4e9).hidden == 2048


def test_too_small_a_size_is_refused():
    with pytest.raises(SetupError, match="size is too small"):
        architecture_of_size(1e6)
