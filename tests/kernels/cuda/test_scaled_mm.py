"""Tests of torch's FP8 product with scales of blocks.

Without a GPU that has the product, a stand-in reads the scales from memory as the device does.
"""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from hfq.formats import ActivationScheme
from hfq.formats.fp8 import Fp8
from hfq.kernels.activations import quantize_activations
from hfq.kernels.cuda import libraries, scaled_mm, triton_linear
from tests.support.triton_device import DEVICE, random_rows

BLOCKS = Fp8(strategy="block", block_structure=(128, 128))
GROUP = ActivationScheme("group", group_size=128)
HAS_PRODUCT = DEVICE.type == "cuda" and libraries.probe("scaled_mm blockwise")[0]

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.fixture
def calls(monkeypatch):
    """Number of rows of each product; on other devices than Hopper's a stand-in computes it."""
    found = []
    own = functional.scaled_mm

    def multiply(codes, weight, scales, first, stored, second, output_dtype):
        found.append(codes.shape[0])
        if HAS_PRODUCT:
            return own(codes, weight, scales, first, stored, second, output_dtype=output_dtype)
        assert first == functional.ScalingType.BlockWise1x128
        assert second == functional.ScalingType.BlockWise128x128
        (count, in_features), out_features = codes.shape, weight.shape[1]
        groups, columns = in_features // 128, -(-(in_features // 128) // 4) * 4
        assert count % 4 == 0
        assert scales.untyped_storage().nbytes() >= 4 * count * groups
        assert stored.untyped_storage().nbytes() >= 4 * columns * (out_features // 128)
        of_rows = scales.as_strided((count, groups), (1, count)).repeat_interleave(128, 1)
        of_blocks = stored.as_strided((groups, out_features // 128), (1, columns))
        of_blocks = of_blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
        product = (codes.double() * of_rows.double()) @ (weight.double() * of_blocks.double())
        return product.to(output_dtype)

    monkeypatch.setattr(functional, "scaled_mm", multiply)
    scaled_mm._reason_against_blocks.cache_clear()
    yield found
    scaled_mm._reason_against_blocks.cache_clear()


@pytest.mark.parametrize("size", [(256, 384), (128, 512), (384, 128)], ids=str)
@pytest.mark.parametrize("shape", [(65,), (68,), (3, 25)], ids=str)
def test_rows_are_multiplied_under_their_groups_scales(size, shape, calls):
    tensors = BLOCKS.quantize(torch.randn(size, generator=torch.Generator().manual_seed(0)))
    tensors["bias"] = torch.linspace(-1, 1, size[0])
    tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    count = torch.Size(shape).numel()
    rows = random_rows(count, size[1], torch.bfloat16).view(*shape, size[1])
    found = scaled_mm.linear(rows, tensors, BLOCKS, GROUP)
    rounded = quantize_activations(rows.float(), GROUP, tensors).double()
    expected = rounded @ BLOCKS.dequantize(tensors, torch.float64).t() + tensors["bias"].double()
    assert calls == [-(-count // 4) * 4]
    assert found.dtype == torch.bfloat16
    assert found.shape == (*shape, size[0])
    assert found._base is None
    bound = 2**-7  # bfloat16: the product and the sum with the bias
    assert (found.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(("count", "dtype"), [(64, torch.bfloat16), (65, torch.float16)])
def test_few_rows_and_other_dtypes_are_those_of_triton(count, dtype, calls):
    tensors = BLOCKS.quantize(torch.randn(128, 256, generator=torch.Generator().manual_seed(0)))
    tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    rows = random_rows(count, 256, dtype)
    found = scaled_mm.linear(rows, tensors, BLOCKS, GROUP)
    assert torch.equal(found, triton_linear.quantized_linear(rows, tensors, BLOCKS, GROUP))
    assert not calls


def test_the_product_is_compared_once_before_it_is_used(calls):
    assert scaled_mm._reason_against_blocks(DEVICE.type) is None
    assert scaled_mm._reason_against_blocks(DEVICE.type) is None
    assert calls == [8]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda product: product.mul_(1.0078125), "differs from the exact one on this device"),
        (lambda product: product[7], "differs from the exact one on this device"),
    ],
    ids=["values", "shape"],
)
def test_a_device_whose_product_is_wrong_does_not_use_it(wrong, reason, calls, monkeypatch):
    right = functional.scaled_mm
    monkeypatch.setattr(functional, "scaled_mm", lambda *args, **kwargs: wrong(right(*args, **kwargs)))
    found = scaled_mm._reason_against_blocks(DEVICE.type)
    assert found == f"torch's product with scales of blocks {reason}"


def test_an_error_of_torch_is_the_reason(calls, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Invalid scaling configuration.\nDetails")

    monkeypatch.setattr(functional, "scaled_mm", fail)
    found = scaled_mm._reason_against_blocks(DEVICE.type)
    assert found == "torch cannot multiply with scales of blocks: Invalid scaling configuration."
