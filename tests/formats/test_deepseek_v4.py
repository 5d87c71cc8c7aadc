"""Tests of DeepSeek-V4's layers: FP4 codes stored as I8, and FP8 with a scale named `scale`."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats import FORMATS
from hfq.formats.deepseek_v4 import DeepseekMxfp4
from hfq.formats.fp8 import Fp8
from tests.support.tiny_models import described

CONFIG = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def powers(*shape: int) -> torch.Tensor:
    exponents = torch.randint(0, 250, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return exponents.view(torch.float8_e8m0fnu)


def claims(tensors, config) -> list:
    found = [format_class.detect("m", described("m", tensors), config) for format_class in FORMATS.values()]
    return [claim for claim in found if claim is not None]


def test_signed_bytes_are_two_codes_each():
    codes = torch.arange(-128, 128).to(torch.int8).view(4, 64)
    scale = powers(4, 4)
    tensors = {"weight": codes, "scale": scale}
    (found,) = claims(tensors, CONFIG)
    assert type(found) is DeepseekMxfp4
    expected = np.empty((4, 128), dtype=np.float32)
    for n, row in enumerate(codes.tolist()):
        for k in range(128):
            nibble = row[k // 2] >> 4 * (k % 2) & 15
            value = -E2M1[nibble & 7] if nibble & 8 else E2M1[nibble]
            expected[n, k] = np.float32(value) * np.float32(
                2.0 ** (int(scale.view(torch.uint8)[n, k // 32]) - 127)
            )
    assert {spec.name: spec.shape for spec in found.tensor_specs(128, 4)}["scale"] == scale.shape
    assert torch.equal(found.resolve("m", tensors).dequantize(tensors), torch.from_numpy(expected))
    panel = torch.full((2, 128), float("nan"))
    found.dequantize_into(panel, tensors, 1)
    assert torch.equal(panel, torch.from_numpy(expected[1:3]))


def test_a_grid_of_powers_named_scale_is_fp8():
    tensors = {"weight": torch.randn(40, 64).to(torch.float8_e4m3fn), "scale": powers(2, 2)}
    (found,) = claims(tensors, CONFIG)
    assert (type(found), found.scale_name, found.block_structure) == (Fp8, "scale", (32, 32))
    blocks = torch.exp2(tensors["scale"].view(torch.uint8).double() - 127)
    expected = tensors["weight"].double() * blocks.repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)
    assert torch.equal(found.resolve("m", tensors).dequantize(tensors), expected.float())


@pytest.mark.parametrize("scale", [None, "weight_scale_inv"])
def test_an_expert_without_its_scale_is_told_by_the_config(scale):
    tensors = {"weight": torch.zeros(4, 64, dtype=torch.int8)} | (
        {} if scale is None else {scale: torch.ones(1, 1)}
    )
    (found,) = claims(tensors, CONFIG | {"expert_dtype": "fp4"})
    assert type(found) is DeepseekMxfp4  # the check of its specs reports the scale
    with pytest.raises(FormatError, match="quantization_config contradicts the tensors of m"):
        claims(tensors, CONFIG)


def test_a_scale_of_255_is_refused():
    tensors = DeepseekMxfp4().quantize(torch.randn(4, 64))
    tensors["scale"].view(torch.uint8)[1, 1] = 255
    with pytest.raises(FormatError, match=r"(?s)not finite. Nothing was loaded.*m.scale"):
        DeepseekMxfp4().resolve("m", tensors)
