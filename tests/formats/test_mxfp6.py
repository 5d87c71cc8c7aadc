"""Tests of MXFP6 against codes decoded by sign, exponent, and mantissa, one weight at a time."""

import pytest
import torch

from hfq import FormatError
from hfq.formats.mxfp6 import Mxfp6
from tests.support.tiny_models import described


def config(kind: str, scale: str = "e8m0") -> dict:
    weight = {"dtype": kind, "qscheme": "per_group", "group_size": 32, "scale_format": scale}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


def value(code: int, mantissa_bits: int) -> float:
    """Decodes a sign bit, an exponent, and a mantissa; an exponent of 0 is subnormal."""
    bias = 3 if mantissa_bits == 2 else 1
    exponent, mantissa = (code & 31) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    magnitude = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
    return -magnitude if code & 32 else magnitude


def by_hand(tensors, mantissa_bits: int) -> torch.Tensor:
    """Reads codes from one little-endian number for each row."""
    rows = []
    for packed, scale in zip(tensors["weight"].tolist(), tensors["weight_scale"].tolist(), strict=True):
        bits = int.from_bytes(bytes(packed), "little")
        codes = [bits >> 6 * k & 63 for k in range(len(packed) // 3 * 4)]
        rows.append(
            [value(code, mantissa_bits) * 2.0 ** (scale[k // 32] - 127) for k, code in enumerate(codes)]
        )
    return torch.tensor(rows, dtype=torch.float64).float()


@pytest.mark.parametrize(("kind", "mantissa_bits"), [("fp6_e3m2", 2), ("fp6_e2m3", 3)])
@pytest.mark.parametrize("size", [(5, 32), (1, 64), (3, 96)], ids=str)
def test_the_weight_is_that_of_the_bits(kind, mantissa_bits, size):
    generator = torch.Generator().manual_seed(size[1])
    draw = lambda top, *shape: torch.randint(0, top, shape, dtype=torch.uint8, generator=generator)  # noqa: E731
    tensors = {
        "weight": draw(256, size[0], size[1] * 3 // 4),
        "weight_scale": draw(250, size[0], size[1] // 32),
    }
    found = Mxfp6.detect("m", described("m", tensors), config(kind))
    specs = {spec.name: spec.shape for spec in found.tensor_specs(size[1], size[0])}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name] for name in tensors
    }
    expected = by_hand(tensors, mantissa_bits)
    assert torch.equal(found.resolve("m", tensors).dequantize(tensors), expected)
    for start in range(size[0]):
        panel = torch.full((size[0] - start, size[1]), float("nan"))
        found.dequantize_into(panel, tensors, start)
        assert torch.equal(panel, expected[start:])


@pytest.mark.parametrize("mantissa_bits", [2, 3])
def test_every_code_is_kept_by_quantizing_again(mantissa_bits):
    codes = [value(code, mantissa_bits) for code in range(64)]
    weight = torch.tensor([codes[32 * half : 32 * half + 32] for half in range(2)])
    found = Mxfp6(mantissa_bits=mantissa_bits)
    assert torch.equal(found.dequantize(found.quantize(weight)), weight)


def test_a_scale_of_255_is_refused():
    tensors = Mxfp6().quantize(torch.randn(4, 64))
    tensors["weight_scale"][1, 1] = 255
    with pytest.raises(FormatError, match=r"(?s)not finite. Nothing was loaded.*m.weight_scale"):
        Mxfp6().resolve("m", tensors)


def test_an_input_that_groups_do_not_divide_is_refused():
    with pytest.raises(FormatError, match="cannot hold a layer of this input size"):
        Mxfp6().tensor_specs(48, 4)


@pytest.mark.parametrize(
    "other", [config("fp6_e3m2", "float32"), config("fp4"), {"quant_method": "modelopt"}]
)
def test_bytes_of_another_kind_are_no_fp6(other):
    tensors = Mxfp6().quantize(torch.randn(4, 64))
    assert Mxfp6.detect("m", described("m", tensors), other) is None
