"""Tests of FP8 quantization by rounding to nearest, and of descriptions of FP8 formats."""

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats.fp8 import Fp8

STRATEGIES = {
    "tensor": (Fp8(strategy="tensor"), (72, 96), (72, 96)),
    "tensor []": (Fp8(strategy="tensor", scale_shape=()), (72, 96), (72, 96)),
    "channel": (Fp8(strategy="channel"), (72, 96), (1, 96)),
    "channel reciprocal": (
        Fp8(scale_name="weight_scale_inv", scale_shape=(72,), reciprocal=True),
        (72, 96),
        (1, 96),
    ),
    "group": (Fp8(strategy="group", group_size=32), (72, 96), (1, 32)),
    "block": (Fp8(strategy="block", block_structure=(16, 40)), (72, 96), (16, 40)),
    "e5m2": (Fp8(codes_dtype="F8_E5M2", strategy="block", block_structure=(16, 40)), (72, 96), (16, 40)),
}


@pytest.mark.parametrize("case", STRATEGIES)
def test_quantizing_rounds_each_weight_to_its_nearest_code(case):
    weight_format, (rows, columns), (block_out, block_in) = STRATEGIES[case]
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -3, 0, columns
    )
    weight[0, :40] = 0
    found = weight_format.dequantize(weight_format.quantize(weight))
    is_e5m2 = case == "e5m2"
    for first in range(0, rows, block_out):
        for left in range(0, columns, block_in):
            part = (slice(first, first + block_out), slice(left, left + block_in))
            scale = weight[part].abs().max() / (57344 if is_e5m2 else 448)
            # half a step of the mantissa, or of the subnormals, plus the float32 rounding of the scale
            bound = torch.maximum(
                weight[part].abs() * (2**-3 if is_e5m2 else 2**-4), scale * (2**-17 if is_e5m2 else 2**-10)
            )
            assert ((found[part] - weight[part]).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("case", STRATEGIES)
def test_what_is_quantized_is_what_the_specs_say(case):
    weight_format, (rows, columns), block = STRATEGIES[case]
    tensors = weight_format.quantize(torch.ones(rows, columns))
    specs = {spec.name: spec.shape for spec in weight_format.tensor_specs(columns, rows) if not spec.optional}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == specs
    shared = -(-rows // block[0]) * -(-columns // block[1])
    assert tensors[weight_format.scale_name].numel() == shared


def test_a_static_activation_scale_is_written_where_the_format_has_one():
    weight_format = Fp8(strategy="tensor", input_scale_name="input_scale", input_scale_shape=(1,))
    assert torch.equal(weight_format.quantize(torch.ones(8, 8))["input_scale"], torch.ones(1))


@pytest.mark.parametrize(
    ("weight_format", "text"),
    [
        (Fp8(), "fp8 e4m3 channel"),
        (Fp8(strategy="tensor", codes_dtype="F8_E5M2"), "fp8 e5m2 tensor"),
        (Fp8(strategy="group", group_size=32), "fp8 e4m3 group g32"),
        (Fp8(strategy="block", block_structure=(128, 64)), "fp8 e4m3 block 128x64"),
        (Fp8(reciprocal=True), "fp8 e4m3 channel reciprocal"),
    ],
)
def test_a_description_names_every_parameter(weight_format, text):
    assert weight_format.describe() == text


def test_a_group_that_does_not_divide_the_input_cannot_be_quantized():
    with pytest.raises(FormatError, match="group size does not divide"):
        Fp8(strategy="group", group_size=32).quantize(torch.zeros(8, 100))
