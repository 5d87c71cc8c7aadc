"""Tests of schemes: the numbers of their sources, in tensors of the detected format."""

import pytest
import torch

from hfq.formats import FORMATS, detect_formats
from hfq.formats.layouts.rounding import round_weight, rounded_tensors
from hfq.quantization.textbook.linear import absmax
from hfq.recipes.recipe import METHODS, Recipe
from hfq.recipes.schemes import SCHEMES
from hfq.tensor_spec import ByteRange, TensorInfo

WEIGHT = torch.randn(256, 512, generator=torch.Generator().manual_seed(3)) * 0.02
RECIPES = [
    *(Recipe(method=method) for method in METHODS if "qmoe" not in method),  # its sizes depend on the weight
    Recipe(method="rtn", bits=3, group_size=-1, sym=False),
]


def named(recipe):
    return f"{recipe.method}-{recipe.bits}-{recipe.group_size}"


def infos_of(recipe, size=(256, 512)):
    weight_format = recipe.weight_format([size])
    tensors = rounded_tensors(weight_format, *size)
    return weight_format, {
        local: TensorInfo(f"m.{local}", dtype, shape, ByteRange("f", 0, nbytes))
        for local, (dtype, shape, nbytes) in tensors.items()
    }


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_the_tensors_are_those_that_were_announced_and_are_detected_as_their_dialect(recipe):
    weight_format, infos = infos_of(recipe)
    made = round_weight("m", WEIGHT, weight_format)
    assert made.keys() == infos.keys()
    assert [tuple(made[local].shape) for local in infos] == [info.shape for info in infos.values()]
    assert [made[local].nbytes for local in infos] == [info.nbytes for info in infos.values()]
    config = recipe.quantization_config(weight_format, ["lm_head"], "0")
    detected = detect_formats({"m": infos}, config)["m"].sized(512, 256)
    specs = {spec.name: spec for spec in detected.tensor_specs(512, 256)}
    assert all(
        info.dtype in specs[local].dtypes and info.shape == specs[local].shape
        for local, info in infos.items()
    )
    assert type(weight_format).__mro__[0 if type(detected) is type(weight_format) else 1] is type(detected)
    assert torch.equal(detected.resolve("m", made).dequantize(made), weight_format.dequantize(made))


@pytest.mark.parametrize(("method", "bits"), [("w4a16", 4), ("w8a8", 8), ("w8a16", 8)])
def test_rows_are_rounded_by_their_largest_magnitude(method, bits):
    recipe = Recipe(method)
    weight_format = recipe.weight_format([(256, 512)])
    made = round_weight("m", WEIGHT, weight_format)
    exact = absmax(WEIGHT, bits, "channel")
    assert torch.equal(made["weight_scale"], exact.scale.to(torch.bfloat16))
    codes = (weight_format.dequantize(made) / made["weight_scale"].float()).round()
    assert codes.abs().max() <= 2 ** (bits - 1) - 1
    assert torch.equal(
        codes,
        (WEIGHT / made["weight_scale"].float()).round().clamp(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1),
    )
    assert (codes != exact.codes).float().mean() < {4: 0.03, 8: 0.3}[
        bits
    ]  # a scale of 8 significant bits moves some


def test_mxfp4_scales_are_powers_of_two_of_the_largest_exponent():
    weight_format = Recipe(method="mxfp4").weight_format([(256, 512)])
    made = round_weight("m", WEIGHT, weight_format)
    amax = WEIGHT.unflatten(1, (-1, 32)).abs().amax(2)
    assert torch.equal(made["weight_scale"].int() - 127, torch.frexp(amax)[1] - 1 - 2)
    error = (weight_format.dequantize(made) - WEIGHT).unflatten(1, (-1, 32)).abs().amax(2)
    assert (error <= amax / 4 + 1e-9).all()  # 8 of 4 * 2^e rounds down to 6


@pytest.mark.parametrize("method", ["w4a16", "w8a8", "w8a16", "mxfp4", "fp8", "rtn"])
def test_a_row_of_zeros_stays_zeros(method):
    weight = WEIGHT.clone()
    weight[7] = 0
    weight_format = Recipe(method=method).weight_format([(256, 512)])
    assert not weight_format.dequantize(round_weight("m", weight, weight_format))[7].any()


def test_outputs_are_methods_and_no_dialects_of_their_own():
    assert SCHEMES.keys() <= METHODS.keys()
    assert not {name for name in FORMATS if "Rows" in FORMATS[name].__name__}
