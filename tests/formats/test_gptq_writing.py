"""Tests of the shapes of GPTQ tensors, and of GPTQ quantization by rounding to nearest."""

import itertools

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats.gptq import Gptq


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


@pytest.mark.parametrize(
    ("num_bits", "group_size", "shapes"),
    [
        (3, 64, {"qweight": (15, 36), "qzeros": (3, 4), "scales": (3, 36), "g_idx": (160,), "bias": (36,)}),
        (2, -1, {"qweight": (10, 36), "qzeros": (1, 3), "scales": (1, 36), "g_idx": (160,), "bias": (36,)}),
        (4, 48, {"qweight": (20, 36), "qzeros": (4, 5), "scales": (4, 36), "g_idx": (160,), "bias": (36,)}),
        (8, 256, {"qweight": (40, 36), "qzeros": (1, 9), "scales": (1, 36), "g_idx": (160,), "bias": (36,)}),
    ],
)
def test_odd_sizes_round_up_to_whole_words_and_groups(num_bits, group_size, shapes):
    specs = Gptq(num_bits=num_bits, group_size=group_size, g_idx_length=160).tensor_specs(160, 36)
    assert {spec.name: spec.shape for spec in specs} == shapes
    assert {spec.name for spec in specs if spec.optional} == {"g_idx", "bias"}
    assert next(spec.bound for spec in specs if spec.name == "g_idx") == shapes["scales"][0]


@pytest.mark.parametrize(("num_bits", "in_features"), [(4, 36), (3, 100), (2, 40), (8, 33)])
def test_an_input_that_ends_inside_a_word_is_refused(num_bits, in_features):
    with pytest.raises(FormatError, match="cannot hold a layer of this input size") as caught:
        Gptq(num_bits=num_bits, group_size=-1).tensor_specs(in_features, 32)
    assert caught.value.found.startswith(str(in_features))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 32, 64])
@pytest.mark.parametrize(
    ("num_bits", "reading"),
    [
        *itertools.product((2, 3, 4, 8), ("stored", "field_plus_one", "masked_plus_one")),
        *((bits, "word_plus_one") for bits in (2, 4, 8)),
    ],
)
def test_every_weight_is_rounded_by_half_a_step_at_most(num_bits, reading, group_size, symmetric):
    weight = random(64, 128)
    weight[:8] = weight[:8].abs() + 0.1  # zero points of 0 in the asymmetric case
    weight_format = Gptq(num_bits, group_size, symmetric, reading)
    tensors = weight_format.quantize(weight)
    groups = weight.unflatten(1, (-1, 128 if group_size == -1 else group_size))
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    span = 2 * groups.abs().amax(2, keepdim=True) if symmetric else high - low
    step = (span / (2**num_bits - 1)).expand_as(groups).flatten(1)
    # an asymmetric zero point is rounded, which adds half a step; an fp16 scale is rounded by 2**-11
    bound = step * (0.5 if symmetric else 1) + weight.abs() * 2**-10
    assert ((weight_format.dequantize(tensors) - weight).abs() <= bound).all()
    if (
        not symmetric and reading != "field_plus_one"
    ):  # a zero point of 0 is exact, but AutoGPTQ's reading cannot represent it
        positive = (weight_format.dequantize(tensors)[:8] - weight[:8]).abs()
        assert (positive <= step[:8] * 0.5 + weight[:8] * 2**-10).all()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        spec.name: spec.shape for spec in weight_format.tensor_specs(128, 64) if not spec.optional
    }


def test_a_positive_weight_survives_the_reading_of_autogptq():
    weight = random(32, 64).abs() + 0.5
    weight_format = Gptq(4, 32, False, "field_plus_one")
    assert (weight_format.dequantize(weight_format.quantize(weight)) - weight).abs().max() < 0.2


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_of_zeros_stays_zero(symmetric):
    weight_format = Gptq(4, 32, symmetric, "stored")
    assert torch.equal(
        weight_format.dequantize(weight_format.quantize(torch.zeros(32, 64))), torch.zeros(32, 64)
    )


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_beyond_the_range_of_fp16_scales_is_refused(symmetric):
    with pytest.raises(FormatError):
        Gptq(4, 32, symmetric, "stored").quantize(random(32, 64) * 1e8)


@pytest.mark.parametrize(
    ("shape", "group_size"), [((30, 64), 32), ((32, 60), -1), ((32, 64), 48), ((32, 64), 128)]
)
def test_a_weight_of_another_shape_is_refused(shape, group_size):
    with pytest.raises(FormatError, match="cannot hold a weight of this shape") as caught:
        Gptq(4 if shape[0] != 30 else 3, group_size).quantize(torch.zeros(shape))
    assert caught.value.found == str(list(shape))


def test_a_g_idx_is_written_where_the_format_has_one():
    tensors = Gptq(4, 32, g_idx_length=64).quantize(random(32, 64))
    assert torch.equal(tensors["g_idx"], torch.arange(64, dtype=torch.int32) // 32)
    assert "g_idx" not in Gptq(4, 32).quantize(random(32, 64))


@pytest.mark.parametrize(
    ("weight_format", "text"),
    [
        (Gptq(4, 128, True, "stored"), "gptq v2 int4 g128 sym"),
        (Gptq(3, -1, False, "masked_plus_one"), "gptq v1 int3 g-1 asym"),
        (Gptq(8, 32, True, "word_plus_one", act_order=True), "gptq v1 int8 g32 sym act-order"),
    ],
)
def test_a_description_names_every_parameter(weight_format, text):
    assert weight_format.describe() == text
