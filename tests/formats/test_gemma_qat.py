"""Tests of Gemma QAT against loops over bits, with rows that end within a byte."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.gemma_qat import GemmaQat
from tests.support.tiny_models import described

CONFIG = {"quant_method": "gemma", "num_bits": 4, "module_quant_configs": {"mlp": {"num_bits": 2}}}


def random_layer(size: tuple[int, int], bits: int, blocks: int = 1, prefix: str = "weight") -> dict:
    generator = torch.Generator().manual_seed(bits + size[1])
    low, high, dtype = (-128, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)
    codes = torch.randint(low, high, (size[0], -(-size[1] * bits // 8)), generator=generator).to(dtype)
    return {
        "weight" if prefix == "weight" else f"{prefix}_quantized": codes,
        f"{prefix}_scale": torch.randn(size[0], blocks, generator=generator),
    }


def by_hand(tensors, size: tuple[int, int], bits: int) -> torch.Tensor:
    codes, scale = (tensor.numpy() for tensor in tensors.values())
    weight = np.empty(size, dtype=np.float32)
    for n in range(size[0]):
        for k in range(size[1]):
            byte = int(codes[n, k * bits // 8])
            code = byte if bits == 8 else (byte >> k * bits % 8 & (1 << bits) - 1) - (1 << bits - 1)
            weight[n, k] = np.float32(code) * scale[n, k * scale.shape[1] // size[1]]
    return torch.from_numpy(weight)


def detect(tensors, size) -> GemmaQat:
    return GemmaQat.detect("m", described("m", tensors), CONFIG).sized(size[1], size[0])


def check(found, tensors, expected) -> None:
    out_features, in_features = expected.shape
    specs = {spec.name: spec.shape for spec in found.tensor_specs(in_features, out_features)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name] for name in tensors
    }
    assert torch.equal(found.resolve("m", tensors).dequantize(tensors), expected)
    for start in range(out_features):
        panel = torch.full((out_features - start, in_features), float("nan"))
        found.dequantize_into(panel, tensors, start)
        assert torch.equal(panel, expected[start:])


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [(5, 32), (3, 33), (2, 7), (1, 6)], ids=str)
def test_the_weight_is_that_of_the_loops(bits, size):
    tensors = random_layer(size, bits)
    found = detect(tensors, size)
    assert found.num_bits == bits  # whatever the config says
    check(found, tensors, by_hand(tensors, size, bits))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("blocks", [1, 3])
def test_an_embedding_has_names_and_blocks_of_its_own(bits, blocks):
    tensors = random_layer((6, 24), bits, blocks, "embedding")
    check(detect(tensors, (6, 24)), tensors, by_hand(tensors, (6, 24), bits))


def test_scales_of_activations_change_no_weight_and_are_reported():
    tensors = random_layer((4, 8), 4)
    plain = detect(tensors, (4, 8))
    scaled = detect(tensors | {"input_activation_scale": torch.tensor(0.5)}, (4, 8))
    assert plain.scheme is None
    assert scaled.scheme.dtype == "int8 of gemma"
    assert torch.equal(plain.dequantize(tensors), scaled.dequantize(tensors))


@pytest.mark.parametrize(("width", "dtype"), [(5, torch.uint8), (0, torch.uint8), (4, torch.int8)])
def test_a_row_of_another_width_is_refused(width, dtype):
    tensors = {"weight": torch.zeros(4, width, dtype=dtype), "weight_scale": torch.ones(4, 1)}
    with pytest.raises(FormatError, match="quantized codes of a layer do not fit its input"):
        detect(tensors, (4, 8))


@pytest.mark.parametrize("blocks", [0, 3])
def test_blocks_that_do_not_divide_a_row_are_refused(blocks):
    with pytest.raises(FormatError, match="scales of an embedding do not fit its rows"):
        detect(random_layer((4, 8), 4, blocks, "embedding"), (4, 8))


def test_a_scale_that_is_not_finite_is_refused_by_name():
    tensors = random_layer((4, 8), 4)
    tensors["weight_scale"][2] = float("nan")
    with pytest.raises(FormatError, match=r"(?s)not finite. Nothing was loaded.*m.weight_scale"):
        detect(tensors, (4, 8)).resolve("m", tensors)
