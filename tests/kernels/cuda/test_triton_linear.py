"""Tests of the Triton kernels in Triton's interpreter on a CPU, against exact products."""

import pytest
import torch

from tests.support import programs
from tests.support.kernel_layers import CASES

pytest.importorskip("triton")

from hfq.formats import ActivationScheme
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import Mxfp4
from hfq.kernels import reference
from hfq.kernels.activations import quantize_activations
from hfq.kernels.cuda import triton_linear

READ = [name for name, case in CASES.items() if triton_linear.reason_against(case.format, 0, 0) is None]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative tolerances: float32 sums of some hundred terms, and rounding of the result."""


def random_rows(count: int, in_features: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, in_features, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: torch.Tensor, activations: torch.Tensor, tensors, weight_format) -> None:
    """Compares with the double product of the weight, rounded once to the activations' dtype."""
    dtype = activations.dtype
    expected = activations.double() @ weight_format.dequantize(tensors, dtype).double().t()
    if "bias" in tensors:
        expected = expected.to(dtype).double() + tensors["bias"].double()
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= ROUNDING[dtype] * (1 + ("bias" in tensors)) * expected.norm()


def test_the_cases_are_all_of_gptq_and_fp8():
    assert len(READ) == sum(name.startswith(("w", "fp8")) for name in CASES)
    assert triton_linear.reason_against(Mxfp4(), 64, 64) == "it does not read mxfp4"
    assert (
        triton_linear.reason_against(Gptq(5, is_planar=True), 64, 64) == "it does not read gptq's bit planes"
    )


@pytest.mark.parametrize("name", READ)
def test_every_layout_is_multiplied(name):
    weight_format, tensors = CASES[name].make()
    in_features = weight_format.shape(tensors)[1]
    for dtype, count in ((torch.float32, 3), (torch.bfloat16, 1), (torch.float16, 17)):
        activations = random_rows(count, in_features, dtype)
        check(triton_linear.linear(activations, tensors, weight_format), activations, tensors, weight_format)


@pytest.mark.parametrize("name", ["w4 act-order", "fp8 blocks of 48x80"])
def test_many_rows_strides_dimensions_and_a_bias(name, monkeypatch):
    weight_format, tensors = CASES[name].make()
    out_features, in_features = weight_format.shape(tensors)
    biased = tensors | {"bias": torch.linspace(-1, 1, out_features).half()}
    strided = random_rows(in_features, 8, torch.float32).t()
    rows_apart = random_rows(4, 2 * in_features, torch.bfloat16)[:, :in_features]
    for activations in (strided, rows_apart, random_rows(6, in_features, torch.float32).view(2, 3, -1)):
        found = triton_linear.linear(activations, biased, weight_format)
        check(found, activations, biased, weight_format)
        assert found._base is None
    monkeypatch.setattr(triton_linear, "_MOST_SPLITS", 1)
    check(triton_linear.linear(strided, tensors, weight_format), strided, tensors, weight_format)
    many = random_rows(triton_linear.FUSED_ROWS + 1, in_features, torch.float32)
    assert torch.equal(
        triton_linear.linear(many, tensors, weight_format), reference.linear(many, tensors, weight_format)
    )
    assert triton_linear.linear(many[:0], tensors, weight_format).shape == (0, out_features)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy warns about NaN
def test_every_code_of_fp8_is_decoded_with_its_nan():
    for dtype, name in ((torch.float8_e4m3fn, "fp8 channel"), (torch.float8_e5m2, "fp8 e5m2")):
        weight_format = CASES[name].format
        codes = torch.arange(256, dtype=torch.uint8).view(256, 1).view(dtype)
        tensors = {"weight": codes, "weight_scale": torch.ones(256, 1)}
        found = triton_linear.linear(torch.ones(1, 1), tensors, weight_format)[0]
        expected = codes[:, 0].float()
        assert torch.equal(found.isnan() | found.isinf(), expected.isnan() | expected.isinf())
        finite = expected.isfinite()
        assert torch.equal(found[finite], expected[finite])


def test_activations_are_encoded_as_torch_casts_them():
    every = (
        torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
    )  # every sign, exponent and upper mantissa
    fine = torch.cat(
        [every[every.abs() < 448], torch.linspace(-448, 448, 4001), torch.linspace(-0.02, 0.02, 4001)]
    )
    rows = torch.cat([fine, torch.full((-fine.numel() % 2048,), 448.0)]).view(-1, 2048).clone()
    rows[:, 0] = 448.0  # so that every scale is 1
    codes, scales = triton_linear.quantize_rows(rows, ActivationScheme("token"))
    assert scales.eq(1).all()
    assert torch.equal(codes.view(torch.uint8), rows.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    "scheme",
    [
        ActivationScheme("token"),
        ActivationScheme("group", group_size=128),
        ActivationScheme("token", upper_bound=1.5),
    ],
    ids=["token", "group", "bound"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_in_plain_torch(scheme, dtype):
    rows = random_rows(5, 300, torch.float32).mul(torch.logspace(-3, 2, 300)).to(dtype)
    rows[2] = 0
    codes, scales = triton_linear.quantize_rows(rows, scheme)
    spread = scales.repeat_interleave(scheme.group_size or 300, 1)[:, :300]
    assert torch.equal((codes.float() * spread).to(dtype), quantize_activations(rows, scheme, {}))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("fp8 blocks", ActivationScheme("group", group_size=128)),
        ("fp8 channel", ActivationScheme("token")),
        ("fp8 channel", ActivationScheme("tensor")),
        ("fp8 e5m2 blocks", ActivationScheme("group", group_size=50)),
    ],
)
def test_rounded_activations_are_multiplied(name, scheme):
    weight_format, tensors = CASES[name].make()
    in_features = weight_format.shape(tensors)[1]
    for dtype in (torch.float32, torch.bfloat16):
        activations = random_rows(3, in_features, dtype)
        found = triton_linear.quantized_linear(activations, tensors, weight_format, scheme)
        check(found, quantize_activations(activations, scheme, tensors), tensors, weight_format)


def test_equal_calls_give_equal_bits():
    weight_format, tensors = CASES["w4 g32"].make()
    activations = random_rows(2, 352, torch.float32)
    first = triton_linear.linear(activations, tensors, weight_format)
    assert torch.equal(first, triton_linear.linear(activations, tensors, weight_format))
    assert triton_linear._Product(activations, 96).splits > 1


def test_they_compile_for_gpus_that_are_not_there(tmp_path):
    """Checks types, shapes, and constants, which the interpreter does not verify."""
    done = programs.run("compile_triton", timeout=300, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout.splitlines() == [
        "gptq_linear 75 True",
        "gptq_linear 90 True",
        "fp8_linear 90 True",
        "fp8_linear 80 True",
        "quantize_e4m3 75 True",
    ], done.stderr[-2000:]
