"""Tests of FP4 against codes decoded by sign, exponent, and mantissa, one weight at a time."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats import FORMATS
from hfq.formats.gpt_oss import GptOssMxfp4
from hfq.formats.mxfp4 import Mxfp4
from hfq.formats.nvfp4 import Nvfp4
from hfq.formats.nvfp4_e5m3 import Nvfp4E5m3
from tests.support.tiny_models import described

SIZES = [(5, 32), (1, 64), (3, 96)]
MX = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
NV = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def e2m1(code: int) -> np.float32:
    """Decodes OCP MX 1.0 E2M1: one sign bit, two exponent bits (bias 1), and one mantissa bit.

    An exponent of 0 is subnormal.
    """
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return np.float32(-magnitude if code & 8 else magnitude)


def quarters(code: int) -> np.float32:
    """Decodes auto-round's mx_int: sign and magnitude, in quarters."""
    return np.float32((-1 if code & 8 else 1) * (code & 7) / 4)


def e8m0(byte: int) -> np.float32:
    return np.float32(2.0 ** (byte - 127))


def e4m3(byte: int) -> np.float32:
    """Decodes OCP FP8 e4m3fn, with a bias of 7."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.float32(-magnitude if byte & 128 else magnitude)


def by_hand(packed: torch.Tensor, multiplier, group_size: int, value=e2m1) -> torch.Tensor:
    """Computes W[n, k] = value * multiplier(n, group); the even channel is in the low nibble."""
    rows = []
    for n, row in enumerate(packed.flatten(1).tolist()):
        codes = [nibble for byte in row for nibble in (byte & 15, byte >> 4)]
        rows.append([value(code) * multiplier(n, k // group_size) for k, code in enumerate(codes)])
    return torch.from_numpy(np.array(rows, dtype=np.float32))


def any_bytes(*shape: int, top: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, top, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def check(weight_format, tensors, expected) -> None:
    out_features, in_features = expected.shape
    specs = {spec.name: spec for spec in weight_format.tensor_specs(in_features, out_features)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name].shape for name in tensors
    }
    found = weight_format.resolve("m", tensors)
    assert torch.equal(found.dequantize(tensors), expected)
    for start in range(out_features):
        panel = torch.full((out_features - start, in_features), float("nan"))
        found.dequantize_into(panel, tensors, start)
        assert torch.equal(panel, expected[start:])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_mxfp4_is_that_of_the_bits(size, dtype):
    # 0 is 2**-127, which float32 stores as a subnormal; 6 * 2**125 is the largest power for which
    # no code exceeds the range
    scale = any_bytes(size[0], size[1] // 32, top=250)
    scale.view(-1)[0] = 0
    tensors = {"weight_packed": any_bytes(size[0], size[1] // 2), "weight_scale": scale.view(dtype)}
    found = Mxfp4.detect("m", described("m", tensors), MX)
    assert found.scale_dtype == ("U8" if dtype == torch.uint8 else "F8_E8M0")
    check(found, tensors, by_hand(tensors["weight_packed"], lambda n, g: e8m0(int(scale[n, g])), 32))


def test_every_code_has_its_value():
    packed = torch.tensor([[low | high << 4 for low in range(16) for high in (15 - low,)]], dtype=torch.uint8)
    tensors = {"weight_packed": packed, "weight_scale": torch.tensor([[127]], dtype=torch.uint8)}
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    expected = torch.tensor([[value for low in range(16) for value in (values[low], values[15 - low])]])
    found = Mxfp4().dequantize(tensors)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_mxint4_is_sign_and_magnitude_in_quarters(size):
    tensors = {
        "weight_packed": any_bytes(size[0], size[1] // 2),
        "weight_scale": any_bytes(size[0], size[1] // 32, top=250),
    }
    config = {"quant_method": "auto-round", "data_type": "mx_int", "bits": 4, "group_size": 32}
    scale = tensors["weight_scale"]
    expected = by_hand(tensors["weight_packed"], lambda n, g: e8m0(int(scale[n, g])), 32, quarters)
    check(Mxfp4.detect("m", described("m", tensors), config), tensors, expected)
    as_floats = Mxfp4.detect("m", described("m", tensors), config | {"data_type": "mx_fp"})
    assert not torch.equal(as_floats.dequantize(tensors), expected)


def nvfp4(size: tuple[int, int], codes_name: str = "weight_packed", group_size: int = 16):
    scale = any_bytes(size[0], size[1] // group_size, top=127, seed=1)
    return {codes_name: any_bytes(size[0], size[1] // 2), "weight_scale": scale.view(torch.float8_e4m3fn)}


def nvfp4_by_hand(tensors, codes_name: str, group_size: int, shared) -> torch.Tensor:
    scale = tensors["weight_scale"].view(torch.uint8)
    return by_hand(tensors[codes_name], lambda n, g: shared(e4m3(int(scale[n, g]))), group_size)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_global_scale_of_compressed_tensors_divides(size):
    tensors = nvfp4(size) | {
        "weight_global_scale": torch.tensor([37.5]),
        "input_global_scale": torch.tensor([2.0]),
    }
    expected = nvfp4_by_hand(tensors, "weight_packed", 16, lambda scale: scale / np.float32(37.5))
    check(Nvfp4.detect("m", described("m", tensors), NV), tensors, expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_second_scale_of_modelopt_multiplies(size):
    tensors = nvfp4(size, "weight") | {
        "weight_scale_2": torch.tensor(0.013),
        "input_scale": torch.tensor(2.0),
    }
    expected = nvfp4_by_hand(tensors, "weight", 16, lambda scale: scale * np.float32(0.013))
    check(Nvfp4.detect("m", described("m", tensors), MODELOPT), tensors, expected)


def test_groups_of_32_are_read_by_the_shape_of_the_scales():
    tensors = nvfp4((4, 64), "weight", 32) | {"weight_scale_2": torch.tensor(0.5)}
    expected = nvfp4_by_hand(tensors, "weight", 32, lambda scale: scale * np.float32(0.5))
    check(Nvfp4.detect("m", described("m", tensors), MODELOPT), tensors, expected)


def ue5m3(byte: int) -> np.float32:
    """Decodes UE5M3: no sign, five exponent bits with a bias of 15, and three mantissa bits."""
    exponent, mantissa = byte >> 3, byte & 7
    return np.float32(
        mantissa / 8 * 2.0**-14 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 15)
    )


def test_scales_without_a_sign_have_their_own_values():
    scale = torch.arange(255, dtype=torch.uint8).view(51, 5)
    tensors = {"weight_packed": any_bytes(51, 40), "weight_scale": scale}
    found = Nvfp4E5m3.detect("m", described("m", tensors), {})
    check(found, tensors, by_hand(tensors["weight_packed"], lambda n, g: ue5m3(int(scale[n, g])), 16))
    with pytest.raises(FormatError, match=r"(?s)not finite. Nothing was loaded.*m.weight_scale"):
        found.resolve("m", tensors | {"weight_scale": torch.full_like(scale, 255)})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_global_scale_that_nothing_can_be_divided_by_is_refused(value):
    tensors = nvfp4((4, 64)) | {"weight_global_scale": torch.tensor([value])}
    with pytest.raises(FormatError, match=r"(?s)Nothing was loaded.*m.weight_global_scale"):
        Nvfp4.detect("m", described("m", tensors), NV).resolve("m", tensors)


def quark(*specs: dict) -> dict:
    return {"quant_method": "quark", "global_quant_config": {"weight": list(specs)}}


@pytest.mark.parametrize("group_size", [16, 32])
def test_amdfp4_is_that_of_the_bits(group_size):
    scale = any_bytes(3, 96 // group_size, top=255, seed=2)
    tensors = {"weight": any_bytes(3, 48), "weight_scale": scale}
    config = quark({"dtype": "fp4", "group_size": group_size, "scale_format": "e5m3"})
    found = Nvfp4E5m3.detect("m", described("m", tensors), config)
    expected = by_hand(tensors["weight"], lambda n, g: ue5m3(int(scale[n, g])), group_size)
    check(found, tensors, expected)


FOUR_BITS = {"weight": any_bytes(3, 48), "weight_scale": any_bytes(3, 3)}
SCALED = FOUR_BITS | {
    "weight_scale": torch.ones(3, 6).to(torch.float8_e4m3fn),
    "weight_scale_2": torch.tensor(1.0),
    "input_scale_2": torch.tensor(1.0),
}


@pytest.mark.parametrize(
    ("config", "tensors", "kind"),
    [
        (quark({"dtype": "fp4", "scale_format": "e8m0"}), FOUR_BITS, Mxfp4),
        (quark({"dtype": "fp4", "scale_format": "e5m3"}), FOUR_BITS, Nvfp4E5m3),
        (quark({"dtype": "fp4", "scale_format": "float32"}, {"dtype": "fp8_e4m3"}), SCALED, Nvfp4),
        (quark({"dtype": "fp4", "scale_format": "float32"}), FOUR_BITS, None),
        (quark(), FOUR_BITS, None),
    ],
    ids=str,
)
def test_quarks_config_tells_what_the_same_tensors_are(config, tensors, kind):
    claims = [format_class.detect("m", described("m", tensors), config) for format_class in FORMATS.values()]
    assert [type(found) for found in claims if found is not None] == [kind] * (kind is not None)


@pytest.mark.parametrize("cls", [Mxfp4, GptOssMxfp4])
def test_the_power_255_is_no_scale(cls):
    tensors = cls().quantize(torch.randn(4, 64))
    name = "scales" if cls is GptOssMxfp4 else "weight_scale"
    tensors[name][3, 1] = 255
    with pytest.raises(FormatError, match=rf"(?s)not finite. Nothing was loaded.*m.{name}"):
        cls().resolve("m", tensors)


def test_a_nan_among_e4m3_scales_is_refused():
    tensors = nvfp4((4, 64)) | {"weight_global_scale": torch.ones(1)}
    tensors["weight_scale"].view(torch.uint8)[2, 3] = 0xFF
    with pytest.raises(FormatError, match=r"(?s)not finite. Nothing was loaded.*m.weight_scale.*\[2, 3\]"):
        Nvfp4.detect("m", described("m", tensors), NV).resolve("m", tensors)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_expert_of_gpt_oss_is_that_of_the_bits(size):
    tensors = {
        "blocks": any_bytes(size[0], size[1] // 32, 16),
        "scales": any_bytes(size[0], size[1] // 32, top=250),
    }
    expected = by_hand(tensors["blocks"], lambda n, g: e8m0(int(tensors["scales"][n, g])), 32)
    check(GptOssMxfp4.detect("m", described("m", tensors), {}), tensors, expected)


@pytest.mark.parametrize("codes_name", ["weight_packed", "weight"])
def test_six_bits_are_refused_by_their_name(codes_name):
    tensors = {codes_name: any_bytes(4, 48), "weight_scale": any_bytes(4, 2)}
    config = {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}
    with pytest.raises(FormatError, match="mxfp6"):
        Mxfp4.detect("m", described("m", tensors), config)


@pytest.mark.parametrize("cls", [Mxfp4, GptOssMxfp4])
@pytest.mark.parametrize("in_features", [16, 33, 48])
def test_an_input_that_is_not_made_of_whole_groups_is_refused(cls, in_features):
    with pytest.raises(FormatError, match="MXFP4 cannot hold a layer of this input size"):
        cls().tensor_specs(in_features, 4)
