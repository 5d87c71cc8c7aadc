"""Tests of e4m3 codes as bfloat16: all codes, layouts of scales, and sizes of parts."""

import pytest
import torch

from hfq.formats.codecs.thread_buffers import release_buffers, thread_buffer
from hfq.kernels import reference
from hfq.kernels.cpu import fp8_bfloat16, panels
from tests.support.kernel_layers import fp8

CASES = {
    "tensor": fp8(300, 37, strategy="tensor"),
    "channel": fp8(301, 37, strategy="channel"),
    "channel, divided": fp8(300, 37, strategy="channel", scale_name="weight_scale_inv", reciprocal=True),
    "channel, e5m2": fp8(300, 37, codes_dtype="F8_E5M2"),
    "groups": fp8(320, 37, strategy="group", group_size=32),
    "channel, many rows": fp8(300, 401, strategy="channel"),
    "blocks": fp8(301, 303, strategy="block", block_structure=(128, 128)),
    "whole blocks": fp8(256, 200, strategy="block", block_structure=(64, 128)),
    "blocks, bf16 scales": fp8(301, 303, strategy="block", block_structure=(32, 48), scale_dtype="BF16"),
    "small blocks": fp8(300, 301, strategy="block", block_structure=(16, 48)),
    "blocks, divided": fp8(
        300, 301, strategy="block", block_structure=(128, 128), scale_name="weight_scale_inv", reciprocal=True
    ),
    "a slice within blocks": fp8(
        300, 301, strategy="block", block_structure=(128, 128), block_offset=(64, 32)
    ),
    "blocks of powers of two": fp8(
        260, 37, strategy="block", block_structure=(128, 128), scale_dtype="F8_E8M0"
    ),
}
BLOCKS = ("blocks", "whole blocks", "blocks, bf16 scales", "a slice within blocks", "blocks of powers of two")


@pytest.fixture(autouse=True)
def with_bfloat16(monkeypatch):
    monkeypatch.setattr(panels, "_has_bfloat16", lambda: True)


@pytest.fixture(params=[True, False])
def shifts(request, monkeypatch):
    monkeypatch.setattr(fp8_bfloat16, "is_shifted", lambda codes: request.param)
    return request.param


@pytest.fixture(params=[1, 6000, fp8_bfloat16.PART_NUMEL])
def part_numel(request, monkeypatch):
    """Sets the number of codes per part."""
    monkeypatch.setattr(fp8_bfloat16, "PART_NUMEL", request.param)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.mark.parametrize(
    "codes", [torch.arange(256), torch.arange(256)[torch.arange(256) % 128 != 127]], ids=["all", "finite"]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_code_is_exact(codes, rows, shifts, part_numel):
    codes = codes.to(torch.uint8).repeat(rows, 1).view(torch.float8_e4m3fn)
    expected, found = codes.float() / 256, fp8_bfloat16.fill_codes(codes, shifts)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.float().nan_to_num(2), expected.nan_to_num(2))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_rounded_as_a_float32_panel_is(name, part_numel):
    weight_format, tensors = CASES[name].make()
    expected = weight_format.dequantize(tensors).to(torch.bfloat16)
    rows, factors = expected.shape[0], fp8_bfloat16.block_factors(tensors, weight_format)
    for start, count in ((0, rows), (0, 5), (rows // 3, rows - rows // 3), (rows - 1, 1)):
        found = fp8_bfloat16.fill_blocks(tensors["weight"], factors, weight_format, start, count)
        assert torch.equal(found, expected[start : start + count])


@pytest.mark.parametrize("name", CASES)
def test_products_are_exact_up_to_rounding(name, shifts, part_numel):
    weight_format, tensors = CASES[name].make()
    weight = weight_format.dequantize(tensors).double()
    tensors["bias"] = torch.linspace(-1, 1, weight.shape[0])
    for rows in (1, 2, 16, 17, 40):
        activations = random(rows, weight.shape[1])
        found = panels.linear(activations, tensors, weight_format)
        exact = activations.double() @ weight.t() + tensors["bias"].to(torch.bfloat16).double()
        assert found.dtype == torch.bfloat16
        assert float((found.double() - exact).norm() / exact.norm()) <= 2**-7, rows


@pytest.mark.parametrize("name", CASES)
def test_whether_codes_are_shifted_changes_no_bit(name, monkeypatch):
    weight_format, tensors = CASES[name].make()
    activations, results = random(20, weight_format.shape(tensors)[1]), []
    for shifts in (True, False):
        monkeypatch.setattr(fp8_bfloat16, "is_shifted", lambda codes, shifts=shifts: shifts)
        results.append(panels.linear(activations, tensors, weight_format))
    assert torch.equal(*results)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("name", CASES)
def test_a_nan_code_reaches_its_own_output_alone(name, code, shifts, part_numel):
    weight_format, tensors = CASES[name].make()
    tensors["weight"].view(torch.uint8)[-1, 5] = code
    found = panels.linear(random(20, tensors["weight"].shape[1]), tensors, weight_format)
    assert found[:, -1].isnan().all()
    assert not found[:, :-1].isnan().any()


@pytest.mark.parametrize("power", [-100, 7, 100])
@pytest.mark.parametrize("name", ["tensor", "channel", "channel, divided", "blocks"])
def test_scales_and_activations_of_any_size_are_kept(name, power):
    weight_format, tensors = CASES[name].make()
    activations = random(20, weight_format.shape(tensors)[1])
    expected = panels.linear(activations, tensors, weight_format)
    sign = -1 if weight_format.reciprocal else 1
    moved = tensors | {weight_format.scale_name: tensors[weight_format.scale_name] * 2.0 ** (sign * power)}
    assert torch.equal(panels.linear(activations, moved, weight_format), expected * 2.0**power)
    assert torch.equal(panels.linear(activations * 2.0**-power, moved, weight_format), expected)


def test_codes_are_shifted_where_few_are_subnormal():
    codes = (random(64, 640).float() * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert fp8_bfloat16.is_shifted(codes)
    assert fp8_bfloat16.is_shifted(torch.zeros(64, 640).to(torch.float8_e4m3fn))
    assert not fp8_bfloat16.is_shifted((random(64, 640).float() / 10).to(torch.float8_e4m3fn))
    assert not fp8_bfloat16.is_shifted(codes[:0])
    if torch.set_flush_denormal(True):
        try:
            assert not fp8_bfloat16.is_shifted(codes)
        finally:
            torch.set_flush_denormal(False)


def test_results_do_not_depend_on_where_the_codes_lie(part_numel):
    weight_format, tensors = CASES["channel"].make()
    bits, activations = tensors["weight"].view(torch.int8), random(20, 301)
    expected = panels.linear(activations, tensors, weight_format)
    odd = torch.cat([bits.flatten()[:1], bits.flatten()])[1:].view(bits.shape)
    strided = torch.cat([bits, bits[:, :1]], 1)[:, :-1]
    for moved in (odd, strided):
        found = panels.linear(
            activations, tensors | {"weight": moved.view(torch.float8_e4m3fn)}, weight_format
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["channel", "blocks"])
def test_gradients_are_close_to_the_references(name, shifts):
    weight_format, tensors = CASES[name].make()
    grad = random(5, weight_format.shape(tensors)[0])
    found, expected = (
        kernel.linear_grad(grad, tensors, weight_format).double() for kernel in (panels, reference)
    )
    assert float((found - expected).norm() / expected.norm()) <= 2**-7


@pytest.mark.parametrize("name", ["channel", "blocks"])
def test_no_rows_give_none(name):
    weight_format, tensors = CASES[name].make()
    out_features, in_features = weight_format.shape(tensors)
    assert panels.linear(random(0, in_features), tensors, weight_format).shape == (0, out_features)


@pytest.mark.parametrize("name", ["channel", "blocks"])
def test_nothing_of_the_weights_size_is_kept(name):
    strategy = (
        {"strategy": "channel"} if name == "channel" else {"strategy": "block", "block_structure": (128, 128)}
    )
    weight_format, tensors = fp8(512, 16384, **strategy).make()
    release_buffers()
    panels.linear(random(20, 512), tensors, weight_format)
    kept = [
        thread_buffer(use, dtype, torch.device("cpu"), 1)
        for use, dtype in (("panel", torch.bfloat16), ("wide", torch.float32))
    ]
    assert all(buffer.untyped_storage().nbytes() <= panels.PANEL_NBYTES for buffer in kept)


@pytest.mark.parametrize("name", ["channel", "blocks"])
def test_activations_that_need_a_gradient_are_refused_and_spoil_nothing(name):
    weight_format, tensors = CASES[name].make()
    activations = random(20, weight_format.shape(tensors)[1])
    expected = panels.linear(activations, tensors, weight_format)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        panels.linear(activations.clone().requires_grad_(), tensors, weight_format)
    assert torch.equal(panels.linear(activations, tensors, weight_format), expected)
