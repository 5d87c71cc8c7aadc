"""A few rows times e4m3 codes in plain torch: every way that scales lie, parts of every size, and what is left to panels."""

import pytest
import torch
from kernels.layers import fp8, shared_by

from hfq.formats.codecs.fp8_codes import has_nan
from hfq.formats.codecs.thread_buffers import release_buffers, thread_buffer
from hfq.kernels import reference
from hfq.kernels.cpu import fp8_panels, panels

CASES = {
    "tensor": fp8(300, 37, strategy="tensor"),
    "channel": fp8(300, 37, strategy="channel"),
    "channel, odd rows": fp8(301, 37, strategy="channel"),
    "channel, divided": fp8(300, 37, strategy="channel", scale_name="weight_scale_inv", reciprocal=True),
    "channel, many rows": fp8(300, 401, strategy="channel"),
    "blocks": fp8(300, 301, strategy="block", block_structure=(128, 128)),
    "blocks, bf16 scales": fp8(300, 301, strategy="block", block_structure=(16, 48), scale_dtype="BF16"),
    "a slice within blocks": fp8(300, 301, strategy="block", block_structure=(128, 128), block_offset=(64, 32)),
    "odd blocks": fp8(301, 301, strategy="block", block_structure=(33, 47), block_offset=(5, 3)),
    "blocks of powers of two": fp8(260, 37, strategy="block", block_structure=(128, 128), scale_dtype="F8_E8M0"),
}


@pytest.fixture(params=[(1, 1), (2000, 3), (fp8_panels.PART_NUMEL, 1), (fp8_panels.PART_NUMEL, 3)])
def part_numel(request, monkeypatch):
    """Parts of so many codes, on so many threads."""
    numel, threads = request.param
    monkeypatch.setattr(fp8_panels, "PART_NUMEL", numel)
    with shared_by(threads):
        yield


@pytest.fixture(autouse=True)
def without_bfloat16(monkeypatch):
    """As on a processor that has no instructions for bfloat16; test_fp8_bfloat16.py is about the others."""
    monkeypatch.setattr(panels, "_has_bfloat16", lambda: False)


@pytest.fixture
def only_few(monkeypatch):
    monkeypatch.setattr(panels, "multiply", None)


def random(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", CASES)
def test_products_are_exact_up_to_rounding(name, part_numel, only_few):
    weight_format, tensors = CASES[name].make()
    weight = weight_format.dequantize(tensors).double()
    tensors["bias"] = random(weight.shape[0])
    for rows in (1, 2, fp8_panels.MOST_ROWS):
        # float32 sums in another order; then one rounding of the sum and one of what the bias makes of it
        for dtype, relative in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
            activations = random(rows, weight.shape[1], dtype=dtype)
            found = panels.linear(activations, tensors, weight_format)
            exact = activations.double() @ weight.t() + tensors["bias"].to(dtype).double()
            assert found.dtype == dtype
            assert float((found.double() - exact).norm() / exact.norm()) <= relative, (rows, dtype)


def test_the_smallest_codes_and_activations_of_any_size_are_kept(only_few):
    codes = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 < 9].repeat(16)[:256]  # nearly all subnormal
    weight_format, tensors = fp8(256, 1, strategy="block", block_structure=(128, 128)).make()
    tensors = tensors | {"weight": codes.view(1, 256).view(torch.float8_e4m3fn)}
    weight = weight_format.dequantize(tensors).double()
    for power in (-60, 0, 60, 120):
        activations = random(3, 256) * 2.0**power
        exact = activations.double() @ weight.t()
        found = panels.linear(activations, tensors, weight_format).double()
        assert float((found - exact).norm() / exact.norm()) <= 1e-6, power


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("name", CASES)
def test_a_nan_code_reaches_its_own_output_alone(name, code, part_numel):
    weight_format, tensors = CASES[name].make()
    tensors["weight"].view(torch.uint8)[-1, 5] = code
    activations = random(2, tensors["weight"].shape[1])
    found = panels.linear(activations, tensors, weight_format)
    assert torch.equal(found.isnan(), reference.linear(activations, tensors, weight_format).isnan())
    assert found[:, -1].isnan().all()
    assert not found[:, :-1].isnan().any()


def test_nan_codes_are_found_among_all_others():
    for code in range(256):
        bits = torch.tensor([0, 0x7E, 0x80, 0xFE, code], dtype=torch.uint8)
        assert has_nan(bits.view(torch.int8), bits) == bool(bits.view(torch.float8_e4m3fn).float().isnan().any())


def at_an_odd_place(weight: torch.Tensor) -> torch.Tensor:
    """As in a region that a block is streamed to, behind an odd number of scales of a byte."""
    codes = weight.view(torch.int8).flatten()
    return torch.cat([codes[:1], codes])[1:].view(weight.dtype).view(weight.shape)


def at_an_odd_address(weight: torch.Tensor) -> torch.Tensor:
    """As in a mapped file."""
    memory = bytearray(b" " + weight.view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=1).view(weight.shape)


def strided(weight: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([weight.view(torch.int8), weight.view(torch.int8)[:, :1]], 1)
    return wide.view(weight.dtype)[:, : weight.shape[1]]


@pytest.mark.parametrize("out_features", [1, 37])
@pytest.mark.parametrize("moved", [at_an_odd_place, at_an_odd_address, strided])
def test_results_do_not_depend_on_where_the_codes_lie(moved, out_features, part_numel):
    weight_format, tensors = fp8(300, out_features, strategy="channel").make()
    for rows in (1, 3):
        activations = random(rows, 300)
        expected = panels.linear(activations, tensors, weight_format)
        found = panels.linear(activations, tensors | {"weight": moved(tensors["weight"])}, weight_format)
        assert torch.equal(found, expected)


def test_no_rows_are_left_to_panels():
    weight_format, tensors = CASES["channel"].make()
    activations = random(0, 300)
    assert not fp8_panels.is_for_few(weight_format, tensors["weight"], activations)
    assert panels.linear(activations, tensors, weight_format).shape == (0, 37)


@pytest.mark.parametrize("block", [(128, 128), (8, 32), (4096, 128)])
def test_nothing_of_the_weights_size_is_kept(block):
    """Besides parts of a stated size there are the sums and the activations alone."""
    weight_format, tensors = fp8(512, 8192, strategy="block", block_structure=block).make()
    release_buffers()
    panels.linear(random(fp8_panels.MOST_ROWS, 512), tensors, weight_format)
    uses = (("fp8", torch.int16), ("panel", torch.float32), ("scaled", torch.float32))
    kept = [thread_buffer(use, dtype, torch.device("cpu"), 1) for use, dtype in uses]
    most = panels.PANEL_NBYTES if block[0] < fp8_panels.MOST_ROWS else 4 * fp8_panels.PART_NUMEL
    assert all(buffer.untyped_storage().nbytes() <= most for buffer in kept)


def test_no_defaults_of_torchs_are_taken(only_few):
    """Models are made, and run, under a default dtype of bfloat16 or another default device."""
    weight_format, tensors = CASES["blocks"].make()
    activations = random(3, 300)
    expected = panels.linear(activations, tensors, weight_format)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = panels.linear(activations, tensors, weight_format)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_activations_that_need_a_gradient_are_refused_and_spoil_nothing():
    """Autograd goes through the module: a kernel that is called by itself keeps none of it."""
    weight_format, tensors = CASES["channel"].make()
    activations = random(2, 300)
    expected = panels.linear(activations, tensors, weight_format)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        panels.linear(activations.clone().requires_grad_(), tensors, weight_format)
    assert torch.equal(panels.linear(activations, tensors, weight_format), expected)
