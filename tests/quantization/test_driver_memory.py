"""Tests of memory: no whole layer in floats, and a bounded peak.

The bound is one decoder layer, the activations, and 400 MiB.
"""

import json

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from benchmarks.checkpoints import architecture_of_size, make_checkpoint
from benchmarks.quantize.bench_quantize import bound_nbytes, measure_memory
from hfq.formats import FORMATS
from hfq.formats.layouts.rounding import round_weight
from hfq.quantization import decoder_layer as block
from hfq.quantization.calibration_data import Calibration
from hfq.quantization.float_checkpoint import Source
from hfq.quantization.temporary_forward import hold, let_go, tensors_of
from hfq.recipes.recipe import METHODS, Recipe
from tests.quantization.conftest import SOURCE


@pytest.mark.parametrize("bias", [True, False])
def test_a_held_layer_computes_what_its_tensors_mean(bias):
    layer = nn.Linear(96, 64, bias=bias)
    inputs = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0))
    expected, weight = layer(inputs).detach(), layer.weight.detach()
    own = vars(layer).get("forward")
    layer.weight = nn.Parameter(torch.empty(64, 96, device="meta"))
    hold(layer, {"weight": weight}, FORMATS["dense"]())
    with torch.no_grad():
        torch.testing.assert_close(
            layer(inputs), expected
        )  # a bias is added after the sum, and not within it
        weight_format = Recipe(group_size=32).weight_format([(64, 96)])
        hold(layer, weight_format.quantize(weight), weight_format)
        floats = weight_format.dequantize(tensors_of(layer))
        torch.testing.assert_close(layer(inputs), nn.functional.linear(inputs, floats, layer.bias))
    let_go(layer)
    assert vars(layer).get("forward") is own
    assert tensors_of(layer) is None


def test_a_held_conv1d_computes_as_before():
    layer, inputs = Conv1D(64, 96), torch.ones(3, 96)
    with torch.no_grad():
        expected = layer(inputs)
        hold(layer, {"weight": layer.weight.detach().t()}, FORMATS["dense"]())
        torch.testing.assert_close(layer(inputs), expected)


def test_the_source_brings_weights_as_they_are_stored_and_no_ring_takes_memory(monkeypatch):
    touched = []
    monkeypatch.setattr("hfq.offload.offload_buffers.huge_buffer", _noted(touched))
    source = Source(SOURCE, Recipe("gptq"))
    assert touched == [False]
    name = "model.layers.0"
    with source.in_memory(name, [f"{name}.mlp.up_proj"]) as block:
        assert tensors_of(block.mlp.up_proj)["weight"].dtype == torch.bfloat16
        assert block.mlp.up_proj.weight.is_meta
        assert block.mlp.down_proj.weight.dtype == torch.float32
    assert tensors_of(block.mlp.up_proj) is None
    assert block.mlp.down_proj.weight.is_meta


def _noted(touched):
    from hfq.offload.host_memory import huge_buffer

    def make(nbytes, is_touched=False):
        touched.append(is_touched)
        return huge_buffer(nbytes, is_touched)

    return make


@pytest.mark.parametrize("out_features", [320, 384])
@pytest.mark.parametrize("method", [method for method in METHODS if "qmoe" not in method])
def test_parts_of_a_weight_are_rounded_to_what_the_whole_is(method, out_features, monkeypatch):
    monkeypatch.setattr(block, "_ROUNDED_NBYTES", 1)
    layer, recipe = nn.Linear(256, out_features, bias=False), Recipe(method=method)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    weight, weight_format = layer.weight.detach(), recipe.weight_format([(out_features, 256)])
    quantizer = block.DecoderLayerQuantizer(nn.Module(), {"layer": layer}, weight_format, recipe, None, None)
    quantized, error = quantizer._rounded("layer", weight)
    expected = round_weight("layer", weight, weight_format)
    assert quantized.keys() == expected.keys()
    for local, tensor in expected.items():
        assert quantized[local].dtype == tensor.dtype
        assert torch.equal(quantized[local].view(torch.uint8), tensor.view(torch.uint8)), local
    wrong = block.as_weight(weight_format, recipe, expected) - weight
    assert error == pytest.approx(
        float(wrong.double().square().mean()), rel=1e-6
    )  # floats are subtracted, then squared in double


def test_batches_of_wide_models_are_small():
    tokens = torch.zeros(16, 256, dtype=torch.int64)
    assert [len(batch) for batch in Calibration(tokens, "x").batches(128)] == [8, 8]
    assert [len(batch) for batch in Calibration(tokens, "x").batches(1024)] == [2] * 8
    assert len(Calibration(tokens, "x").batches(1 << 20)) == 16


def test_the_bound_is_one_block_in_float32_activations_and_a_constant():
    config = json.loads((SOURCE / "config.json").read_text())
    assert (config["hidden_size"], config["intermediate_size"]) == (128, 384)
    found = bound_nbytes(SOURCE, torch.zeros(3, 10))
    assert found["block"] == 4 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128)
    assert found["activations"] == 4 * 30 * 128
    assert found["bound"] == found["block"] + found["activations"] + (400 << 20)


@pytest.mark.slow
def test_the_peak_is_one_block_activations_and_400_mib(tmp_path):
    """Quantizes a model of 300 MB, whose float32 weights alone would need 600 MB."""
    path = make_checkpoint(tmp_path, architecture_of_size(3e8), "bf16")
    for recipe in ({"method": "fp8"}, {"method": "gptq", "bits": 4, "group_size": 128}):
        found = measure_memory(path, tmp_path, recipe, threads=1)
        assert "error" not in found, found
        assert found["imports"] < found["peak_rss"] <= found["bound"], found
