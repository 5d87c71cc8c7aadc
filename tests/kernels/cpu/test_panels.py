"""Tests of panels in plain torch against the weights of the reference kernel."""

import pytest
import torch

from benchmarks.kernels.bench_kernels import FORMATS, random_layer
from hfq.formats.codecs.fp8_codes import has_nan, widen_into
from hfq.formats.codecs.thread_buffers import _buffers, release_buffers
from hfq.kernels import reference
from hfq.kernels.cpu import panels
from tests.support.kernel_layers import CASES, misplaced

RELATIVE = {
    torch.float32: 1e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}  # the reference rounds the weight, too


@pytest.fixture(params=["w4 g32", "w4 act-order", "w3 act-order, f32 scales", "fp8 blocks", "fp8 channel"])
def layer(request):
    return CASES[request.param].make()


@pytest.fixture(params=[1 << 30, 4 * 352 * 5])
def panel_nbytes(request, monkeypatch):
    """Sets the number of bytes per panel."""
    for module in (panels, reference):
        monkeypatch.setattr(module, "PANEL_NBYTES", request.param)


@pytest.mark.parametrize("batch_nbytes", [1 << 24, 4 * 352 * 2])
def test_products_and_gradients_are_close_to_the_references(layer, panel_nbytes, batch_nbytes, monkeypatch):
    monkeypatch.setattr(panels, "BATCH_NBYTES", batch_nbytes)
    weight_format, tensors = layer
    out_features, in_features = weight_format.shape(tensors)
    torch.manual_seed(0)
    biased = tensors | {"bias": torch.linspace(-1, 1, out_features).half()}
    for dtype, bound in RELATIVE.items():
        for shape in ((), (1,), (2, 3), (17,), (0,)):
            activations, grad = (
                torch.randn(*shape, in_features).to(dtype),
                torch.randn(*shape, out_features).to(dtype),
            )
            for kernel, values in ((panels.linear, activations), (panels.linear_grad, grad)):
                found = kernel(values, biased, weight_format)
                expected = getattr(reference, kernel.__name__)(values, biased, weight_format)
                assert found.dtype == expected.dtype == dtype
                assert found.shape == expected.shape
                assert (found.double() - expected.double()).norm() <= bound * expected.double().norm()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", [panels, reference], ids=["torch", "reference"])
def test_weights_lie_anywhere_in_a_file(kernel, name):
    """Files align tensors to 8 bytes; torch's own code may assume more."""
    weight_format, tensors = CASES[name].make()
    for rows in (1, 4, 17):
        for dtype in RELATIVE:
            activations = torch.randn(rows, weight_format.shape(tensors)[1]).to(dtype)
            expected = kernel.linear(activations, misplaced(tensors, 0), weight_format)
            assert torch.equal(kernel.linear(activations, misplaced(tensors, 8), weight_format), expected)


@pytest.mark.parametrize("name", ["gptq4 g128", "gptq4 g128 act-order", "awq g128", "fp8 128x128"])
def test_no_more_than_a_panel_is_kept_for_each_use(name, monkeypatch):
    monkeypatch.setattr(panels, "_has_bfloat16", lambda: True)
    monkeypatch.setattr(panels, "PANEL_NBYTES", 1 << 20)
    tensors = random_layer(FORMATS[name], 4096, 512)
    release_buffers()
    panels.linear(torch.ones(20, 512).to(torch.bfloat16), tensors, FORMATS[name])
    assert _buffers.kept
    assert all(buffer.nbytes <= 1 << 20 for buffer in _buffers.kept.values())
    release_buffers()
    assert not _buffers.kept


@pytest.mark.parametrize("multiples", [(1,), (128, 32), (128, 32, 1), (96, 3)])
@pytest.mark.parametrize("most", [1, 100, 512])
@pytest.mark.parametrize("count", [0, 1, 127, 384, 768, 1024, 4096, 11008])
def test_panels_cover_every_row_once_and_are_even(count, most, multiples):
    parts, least = panels._divide(count, most, multiples), multiples[-1]
    assert [row for part in parts for row in part] == list(range(count))
    assert all(0 < len(part) <= max(most, least) for part in parts)
    assert all(part.start % least == 0 for part in parts)
    if parts:
        assert max(map(len, parts)) - min(map(len, parts[:-1] or parts)) <= multiples[0]


@pytest.mark.parametrize(
    ("count", "expected"), [(4096, [512] * 8), (384, [384]), (640, [256, 384]), (1100, [384, 384, 332])]
)
def test_panels_are_of_whole_blocks_where_those_are_even(count, expected):
    assert [len(part) for part in panels._divide(count, 512, (128, 32, 1))] == expected


def test_activations_that_are_not_converted_are_multiplied_at_once(monkeypatch):
    """Each batch would dequantize every panel again."""
    monkeypatch.setattr(panels, "BATCH_NBYTES", 1)
    weight_format, tensors = CASES["fp8 blocks"].make()
    fill, filled = panels._filler(tensors, weight_format, torch.float32), []

    def count(*arguments):
        filled.append(arguments)
        return fill(*arguments)

    in_features = weight_format.shape(tensors)[1]
    for has_bfloat16, dtype, batches in (
        (True, torch.bfloat16, 1),
        (False, torch.bfloat16, 3),
        (False, torch.float32, 1),
    ):
        monkeypatch.setattr(panels, "_has_bfloat16", lambda has_bfloat16=has_bfloat16: has_bfloat16)
        filled.clear()
        panels.multiply(torch.randn(3, in_features).to(dtype), tensors, weight_format, count)
        assert len(filled) == batches * len(set(filled))


@pytest.mark.parametrize("name", CASES)
def test_panels_are_dequantized_as_the_format_does(name):
    weight_format, tensors = CASES[name].make()
    weight, multiple = weight_format.dequantize(tensors), weight_format.row_multiple
    for dtype in (torch.float32, torch.bfloat16):
        fill = panels._filler(tensors, weight_format, dtype)
        for start in (0, weight.shape[0] // 2 // multiple * multiple):
            assert torch.equal(fill(start, weight.shape[0] - start, dtype), weight[start:].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(256, 1), (1, 256), (3, 256), (0, 4), (4, 0)])
def test_every_code_is_widened_as_torch_casts_it(dtype, shape):
    codes = torch.arange(shape[0] * shape[1]).to(torch.uint8).view(shape).view(dtype)
    panel, expected = torch.full(shape, 7.0), codes.to(torch.float32)
    widen_into(panel, codes)
    assert torch.equal(panel.isnan(), expected.isnan())
    assert torch.equal(panel.nan_to_num(1.5), expected.nan_to_num(1.5))


def test_nan_codes_are_found_among_all_others():
    for code in range(256):
        bits = torch.tensor([0, 0x7E, 0x80, 0xFE, code], dtype=torch.uint8)
        assert has_nan(bits.view(torch.int8), bits) == bool(
            bits.view(torch.float8_e4m3fn).float().isnan().any()
        )


def test_codes_without_nan_are_widened_over_many_chunks(monkeypatch):
    monkeypatch.setattr("hfq.formats.codecs.fp8_codes._CHUNK", 100)
    codes = (torch.arange(7 * 60) % 126).to(torch.uint8).view(7, 60).view(torch.float8_e4m3fn)
    panel = torch.empty(7, 60)
    widen_into(panel, codes)
    assert torch.equal(panel, codes.to(torch.float32))


def test_double_activations_are_multiplied_in_double(layer):
    weight_format, tensors = layer
    weight = weight_format.dequantize(tensors, torch.float64)
    activations = torch.randn(3, weight.shape[1], dtype=torch.float64)
    found = panels.linear(activations, tensors, weight_format)
    assert (found - activations @ weight.t()).norm() <= 1e-14 * found.norm()


@pytest.mark.parametrize("has_bfloat16", [True, False])
@pytest.mark.parametrize("dtype", RELATIVE)
def test_no_defaults_of_torchs_are_taken(layer, dtype, has_bfloat16, monkeypatch):
    """Models may be created and run under a default dtype of bfloat16 or another default device."""
    monkeypatch.setattr(panels, "_has_bfloat16", lambda: has_bfloat16)
    weight_format, tensors = layer
    activations = torch.randn(3, weight_format.shape(tensors)[1]).to(dtype)
    expected = panels.linear(activations, tensors, weight_format)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = panels.linear(activations, tensors, weight_format)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_activations_that_need_a_gradient_are_refused_and_spoil_nothing(layer, has_bfloat16, monkeypatch):
    """Autograd uses the module; a kernel that is called directly records nothing."""
    monkeypatch.setattr(panels, "_has_bfloat16", lambda: has_bfloat16)
    weight_format, tensors = layer
    activations = torch.randn(2, weight_format.shape(tensors)[1])
    expected = panels.linear(activations, tensors, weight_format)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        panels.linear(activations.clone().requires_grad_(), tensors, weight_format)
    assert torch.equal(panels.linear(activations, tensors, weight_format), expected)
