"""Tests of FP8 layers against loops that decode every byte by sign, exponent, and mantissa."""

import math

import numpy as np
import pytest
import torch

from hfq.errors import FormatError
from hfq.formats.fp8 import Fp8

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def decode(byte: int, exponent_bits: int) -> float:
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    if exponent_bits == 4 and byte & 0x7F == 0x7F:
        return math.nan
    if exponent_bits == 5 and exponent == top:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def multiplier(scale: torch.Tensor) -> np.ndarray:
    """Returns the scales as float32, with F8_E8M0 and U8 as powers of two."""
    if scale.dtype in (E8M0, torch.uint8):
        numbers = [2.0 ** (byte - 127) for byte in scale.reshape(-1).view(torch.uint8).tolist()]
    else:
        numbers = scale.reshape(-1).double().tolist()
    return np.array(numbers, dtype=np.float32)


def dequantize_by_hand(
    codes: torch.Tensor, scale: torch.Tensor, position, reciprocal: bool = False
) -> np.ndarray:
    """Computes float32 code × (or ÷) float32 scale, element by element.

    `position(n, k)` is the index of the scale in its flat tensor.
    """
    raw, exponent_bits = codes.view(torch.uint8).numpy(), 4 if codes.dtype == E4M3 else 5
    scales = multiplier(scale)
    values = [np.float32(decode(byte, exponent_bits)) for byte in range(256)]
    weight = np.empty(raw.shape, dtype=np.float32)
    for n in range(raw.shape[0]):
        for k in range(raw.shape[1]):
            value, factor = values[raw[n, k]], scales[position(n, k)]
            weight[n, k] = value / factor if reciprocal else value * factor
    return weight


def assert_same_bits(found: torch.Tensor, expected: np.ndarray):
    """Checks bit-identical values, including the sign of zero; all NaNs are equal."""
    found = found.numpy()
    assert found.dtype == np.float32
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found.view(np.int32)[~nan], expected.view(np.int32)[~nan])


def random_codes(out_features: int, in_features: int, dtype=E4M3, seed: int = 0) -> torch.Tensor:
    """Returns random bytes without NaN and infinity."""
    finite = [byte for byte in range(256) if math.isfinite(decode(byte, 4 if dtype == E4M3 else 5))]
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(finite), (out_features, in_features), generator=generator)
    return torch.tensor(finite, dtype=torch.uint8)[picked].view(dtype)


def random_scale(shape, dtype=torch.float32, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in (E8M0, torch.uint8):
        return torch.randint(100, 140, shape, dtype=torch.uint8, generator=generator).view(dtype)
    return (torch.rand(shape, generator=generator) * 0.01 + 1e-4).to(dtype)


def detect(describe_tensors, tensors, config=None) -> Fp8:
    return Fp8.detect("m", describe_tensors("m", tensors), config or {}).resolve("m", tensors)


GROUPS = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 16},
}
GROUPS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUPS}}
SHAPES = {
    "tensor []": ((40, 64), (), {}, lambda n, k: 0),
    "tensor [1]": ((40, 64), (1,), {}, lambda n, k: 0),
    "tensor [1, 1]": ((40, 64), (1, 1), {}, lambda n, k: 0),
    "channel [N]": ((40, 64), (40,), {}, lambda n, k: n),
    "channel [N, 1]": ((40, 64), (40, 1), {}, lambda n, k: n),
    "group [N, K/16]": ((40, 64), (40, 4), GROUPS, lambda n, k: n * 4 + k // 16),
    "block [2, 4] of 128": (
        (256, 416),
        (2, 4),
        {"weight_block_size": [128, 128]},
        lambda n, k: n // 128 * 4 + k // 128,
    ),
    "block [5, 2] of 128": (
        (576, 200),
        (5, 2),
        {"weight_block_size": [128, 128]},
        lambda n, k: n // 128 * 2 + k // 128,
    ),
    "block [3, 3] of 16x24": (
        (40, 64),
        (3, 3),
        {"weight_block_size": [16, 24]},
        lambda n, k: n // 16 * 3 + k // 24,
    ),
    "block [1, 1]": ((40, 64), (1, 1), {"weight_block_size": [128, 128]}, lambda n, k: 0),
    "block [n, 1, k, 1]": (
        (200, 300),
        (2, 1, 3, 1),
        {"weight_block_size": [128, 128]},
        lambda n, k: n // 128 * 3 + k // 128,
    ),
    "block [1, 1, k, 1]": (
        (100, 300),
        (1, 1, 3, 1),
        {"weight_block_size": [128, 128]},
        lambda n, k: k // 128,
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_the_shape_of_a_scale_says_what_it_covers(case, describe_tensors):
    shape, scale_shape, config, position = SHAPES[case]
    tensors = {"weight": random_codes(*shape), "weight_scale": random_scale(scale_shape)}
    detected = detect(describe_tensors, tensors, config)
    assert detected.strategy == case.split()[0]
    assert {spec.name: spec.shape for spec in detected.tensor_specs(shape[1], shape[0])}[
        "weight_scale"
    ] == scale_shape
    assert_same_bits(
        detected.dequantize(tensors), dequantize_by_hand(tensors["weight"], tensors["weight_scale"], position)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E8M0, torch.uint8], ids=str)
@pytest.mark.parametrize("case", ["tensor []", "channel [N, 1]", "group [N, K/16]", "block [3, 3] of 16x24"])
@pytest.mark.parametrize("codes", [E4M3, E5M2], ids=str)
def test_scales_of_every_dtype_are_read_exactly(case, dtype, codes, describe_tensors):
    shape, scale_shape, config, position = SHAPES[case]
    tensors = {"weight": random_codes(*shape, codes), "weight_scale": random_scale(scale_shape, dtype)}
    detected = detect(describe_tensors, tensors, config)
    assert_same_bits(
        detected.dequantize(tensors), dequantize_by_hand(tensors["weight"], tensors["weight_scale"], position)
    )


@pytest.mark.parametrize("dtype", [E8M0, torch.uint8], ids=str)
def test_groups_under_powers_of_two_need_no_word_of_the_config(dtype, describe_tensors):
    tensors = {"weight": random_codes(40, 64), "weight_scale": random_scale((40, 2), dtype)}
    detected = detect(describe_tensors, tensors)
    assert (detected.strategy, detected.group_size) == ("group", 32)
    expected = dequantize_by_hand(tensors["weight"], tensors["weight_scale"], lambda n, k: n * 2 + k // 32)
    assert_same_bits(detected.dequantize(tensors), expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_all_256_codes_are_decoded(dtype, describe_tensors):
    tensors = {
        "weight": torch.arange(256, dtype=torch.uint8).reshape(4, 64).view(dtype),
        "weight_scale": torch.tensor(0.75),
    }
    expected = dequantize_by_hand(tensors["weight"], tensors["weight_scale"], lambda n, k: 0)
    assert np.isnan(expected).sum() == (2 if dtype == E4M3 else 6)
    assert_same_bits(detect(describe_tensors, tensors).dequantize(tensors), expected)


def test_the_code_0x80_is_minus_zero_and_not_nan(describe_tensors):
    tensors = {
        "weight": torch.full((4, 4), 0x80, dtype=torch.uint8).view(E4M3),
        "weight_scale": torch.ones(4, 1),
    }
    weight = detect(describe_tensors, tensors).dequantize(tensors)
    assert torch.equal(weight, torch.zeros(4, 4))
    assert torch.signbit(weight).all()


def test_the_extreme_powers_of_two_are_neither_zero_nor_nan(describe_tensors):
    tensors = {
        "weight": torch.full((2, 4), 8.0).to(E4M3),
        "weight_scale": torch.tensor([[0], [254]], dtype=torch.uint8),
    }
    weight = detect(describe_tensors, tensors).dequantize(tensors)
    assert weight[:, 0].tolist() == [2.0**-124, math.inf]  # 2**130 exceeds the range of float32


@pytest.mark.parametrize("case", ["tensor [1]", "channel [N]", "block [3, 3] of 16x24"])
def test_inverse_semantics_divide(case, describe_tensors):
    shape, scale_shape, config, position = SHAPES[case]
    tensors = {"weight": random_codes(*shape), "weight_scale_inv": 1000 + 4000 * random_scale(scale_shape)}
    detected = detect(
        describe_tensors, tensors, config | {"quant_method": "fp8", "weight_scale_semantics": "inverse"}
    )
    expected = dequantize_by_hand(tensors["weight"], tensors["weight_scale_inv"], position, reciprocal=True)
    assert detected.reciprocal
    assert "reciprocal" in detected.describe()
    assert_same_bits(detected.dequantize(tensors), expected)


def test_undeclared_reciprocals_of_rows_are_recognised_with_a_warning(caplog, describe_tensors):
    tensors = {"weight": random_codes(40, 64), "weight_scale_inv": 2000 + 10 * random_scale((40,))}
    detected = detect(describe_tensors, tensors, {"quant_method": "fp8"})
    expected = dequantize_by_hand(
        tensors["weight"], tensors["weight_scale_inv"], lambda n, k: n, reciprocal=True
    )
    assert_same_bits(detected.dequantize(tensors), expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "like reciprocal scales of gptqmodel" in caplog.text


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("weight_scale_inv", torch.full((40,), 1.0)),
        ("weight_scale", torch.full((40,), 2000.0)),
        ("weight_scale_inv", torch.full((3, 3), 0.5)),
        ("weight_scale_inv", torch.full((40, 1), 120, dtype=torch.uint8)),
    ],
    ids=["rows up to 1", "weight_scale", "blocks", "U8 rows of 2**-7"],
)
def test_other_scales_multiply_without_a_warning(name, scale, caplog, describe_tensors):
    tensors = {"weight": random_codes(40, 64), name: scale}
    detected = detect(
        describe_tensors, tensors, {"weight_block_size": [16, 24]} if scale.shape == (3, 3) else {}
    )
    assert not detected.reciprocal
    assert not caplog.records
    assert_same_bits(
        detected.dequantize(tensors), dequantize_by_hand(tensors["weight"], scale, lambda n, k: 0)
    )


@pytest.mark.parametrize("shape", [(), (3, 3)], ids=["tensor", "blocks"])
def test_scales_that_may_multiply_or_divide_are_refused(shape, describe_tensors):
    tensors = {"weight": random_codes(40, 64), "weight_scale_inv": torch.full(shape, 2000.0)}
    with pytest.raises(
        FormatError,
        match=r"(?s)scales of a layer are ambiguous: they can multiply or divide. Nothing was loaded.*weight_scale_semantics",
    ):
        detect(describe_tensors, tensors, {"weight_block_size": [16, 24]} if shape else {})


def test_floats_where_the_config_promises_powers_of_two_must_be_such(describe_tensors):
    config = {"quant_method": "fp8", "weight_block_size": [16, 24], "scale_fmt": "ue8m0"}
    tensors = {"weight": random_codes(40, 64), "weight_scale_inv": torch.full((3, 3), 2.0**-7)}
    assert detect(describe_tensors, tensors, config).dequantize(tensors).isfinite().all()
    tensors["weight_scale_inv"] = torch.full((3, 3), 119.0)  # exponents that a tool cast to another dtype
    with pytest.raises(FormatError, match="not a power of two"):
        detect(describe_tensors, tensors, config)


@pytest.mark.parametrize("case", SHAPES)
def test_panels_may_start_and_stop_anywhere(case, describe_tensors):
    shape, scale_shape, config, _ = SHAPES[case]
    tensors = {"weight": random_codes(*shape), "weight_scale": random_scale(scale_shape)}
    detected = detect(describe_tensors, tensors, config)
    whole = detected.dequantize(tensors)
    for start, stop in ((0, 1), (7, 33), (15, 17), (shape[0] - 5, shape[0]), (0, shape[0])):
        panel = torch.full((stop - start, shape[1]), torch.nan)
        detected.dequantize_into(panel, tensors, start)
        assert torch.equal(panel, whole[start:stop])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_is_rounded_once_to_the_dtype_asked_for(dtype, describe_tensors):
    tensors = {"weight": random_codes(40, 64), "weight_scale": random_scale((40, 1))}
    detected = detect(describe_tensors, tensors)
    assert torch.equal(detected.dequantize(tensors, dtype), detected.dequantize(tensors).to(dtype))
