"""All experts in two calls of the C++ library equal a loop over experts bit for bit."""

import pytest
import torch

from hfq.formats.fp8 import Fp8
from hfq.kernels.cpp import kernel
from hfq.kernels.cpp.expert_products import ExpertProducts
from hfq.kernels.cpp.layers import describe_layer, reads_values
from tests.support.kernel_layers import CASES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXPERTS = 6


def changed(tensors: dict, seed: int) -> dict:
    """Returns the tensors of another expert: floats are multiplied by a power of two, codes are permuted."""
    return {
        name: tensor * 2.0 ** (seed % 3 - 1)
        if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) and "scale" in name
        else tensor
        for name, tensor in tensors.items()
    }


def loop(rows, index, weights, first, down, gate):
    result = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        token, place = torch.where(index == expert)
        if len(token):
            parts = [kernel.linear(rows[token], *layers[expert]) for layers in first]
            output = kernel.linear(gate(parts), *down[expert]) * weights[token, place, None]
            result.index_add_(0, token, output.to(result.dtype))
    return result


def routed(tokens: int, top_k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])


def gated(parts) -> torch.Tensor:
    gate, up = torch.cat(list(parts), -1).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def made(name: str, bias: torch.dtype | None = None) -> tuple[list, list, list]:
    """Returns gate, up, and down projections of each expert, the first two of a case."""
    weight_format, tensors = CASES[name].make()
    outputs, inputs = weight_format.shape(tensors)
    generator = torch.Generator().manual_seed(0)
    gate = [(changed(tensors, seed), weight_format) for seed in range(EXPERTS)]
    own = Fp8(strategy="channel")
    down = [(own.quantize(torch.randn(inputs, outputs, generator=generator)), own) for _ in range(EXPERTS)]
    if bias is not None:
        for layers, size in ((gate, outputs), (down, inputs)):
            for tensors, _ in layers:
                tensors["bias"] = torch.randn(size, generator=generator).to(bias)
    return gate, gate[::-1], down


def check(name: str, dtype: torch.dtype, tokens: int, is_joined: bool, bias: torch.dtype | None = None):
    *first, down = made(name, bias)
    weight_format, tensors = first[0][0][1], first[0][0][0]
    products = ExpertProducts(first, down, is_joined)
    if reads_values(weight_format):
        assert products.reason == "descriptions of the layers contain values of tensors"
        return
    if describe_layer(weight_format, tensors) is None:
        assert products.reason == "the library cannot read an expert"
        return
    assert products.reason is None
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, weight_format.shape(tensors)[1], generator=generator).to(dtype)
    index = routed(tokens, 3, tokens)
    index[-1, 0] = EXPERTS  # ignored
    if tokens > 1:
        index[1, 1] = index[1, 0]
        index[0, 2] = -1
    weights = torch.rand(tokens, 3, generator=generator).to(dtype if is_joined else torch.float32)
    found = products(rows, index, weights, gated, 0)
    if found is None:  # the library has no form for so many rows of this dtype on this processor
        assert torch.bincount(index[(index >= 0) & (index < EXPERTS)]).max() > kernel.most_fused(dtype)
        return
    assert torch.equal(found, loop(rows, index, weights, first, down, gated))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_they_equal_the_loop(native, name, dtype):
    for tokens in (1, 3, 40):
        for is_joined in (True, False):
            check(name, dtype, tokens, is_joined)


@pytest.mark.parametrize("bias", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_biases_are_added_as_in_the_loop(native, dtype, bias):
    for name in ("gpt-oss", "fp8 channel"):
        for tokens in (1, 5):
            check(name, dtype, tokens, True, bias)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_instruction_set_adds_up_the_same_way(native, level):
    native.hfq_use(level)
    for dtype in DTYPES:
        check("w4 g32", dtype, 3, True, torch.float32)


@pytest.mark.parametrize("tokens", [300, 1500])
def test_more_rows_than_are_multiplied_at_once(native, tokens):
    """One expert gets all tokens, which the library multiplies in several parts."""
    *first, down = made("w4 g32")
    rows = torch.randn(tokens, 352, generator=torch.Generator().manual_seed(0)).bfloat16()
    index, weights = torch.full((tokens, 1), 2), torch.ones(tokens, 1).bfloat16()
    index[::7] = 4
    found = ExpertProducts(first, down, True)(rows, index, weights, gated, 0)
    if found is None:
        assert not native.hfq_is_tiled(describe_layer(first[0][0][1], first[0][0][0]).here, 64, 1)
        return
    assert torch.equal(found, loop(rows, index, weights, first, down, gated))


def test_no_routed_expert_gives_zeros(native):
    products = ExpertProducts(*[made("w4 g32")[:2], made("w4 g32")[2]], True)
    found = products(torch.ones(2, 352), torch.full((2, 3), -1), torch.ones(2, 3), gated, 0)
    assert torch.equal(found, torch.zeros(2, 352))


def test_rows_that_are_not_finite_are_declined(native):
    """The loop computes them one by one, so that other rows keep their bits."""
    *first, down = made("w4 g32")
    rows = torch.ones(4, 352)
    rows[1, 3] = float("inf")
    index = torch.zeros(4, 1, dtype=torch.int64)
    if native.hfq_use(-1) > 0:
        assert ExpertProducts(first, down, True)(rows, index, torch.ones(4, 1), gated, 0) is None


def test_other_sizes_and_dtypes_are_declined(native):
    *first, down = made("w4 g32")
    products = ExpertProducts(first, down, True)
    index, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    assert products(torch.ones(1, 351), index, weights, gated, 0) is None
    assert products(torch.ones(1, 352).double(), index, weights, gated, 0) is None
    assert products(torch.ones(1, 352), index, weights.double(), gated, 0) is None
    assert products(torch.ones(1, 352), index, weights, lambda parts: parts[0][:, 1:97], 0) is not None
    assert products(torch.ones(1, 352), index, weights, lambda parts: parts[0], 0) is None


def test_experts_that_differ_have_a_reason(native):
    gate, up, down = made("w4 g32")
    other = made("w8 g32 v1, 20 outputs")[0]
    assert ExpertProducts([gate[:3] + other[3:], up], down, True).reason == "the experts have different sizes"
    assert "projections" in ExpertProducts([gate, up, up], down, True).reason
    biased = [({**tensors, "bias": torch.zeros(96)}, each) for tensors, each in gate[:1]] + gate[1:]
    assert ExpertProducts([biased, up], down, True).reason == "the experts have different biases"
    assert ExpertProducts([gate, other], down, True).reason == "the first projections have different sizes"
    assert ExpertProducts([down], down, True).reason == "the last projection has another size"
