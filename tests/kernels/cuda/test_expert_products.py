"""Products by all experts of a layer equal those by each expert, bit for bit."""

import pytest
import torch

pytest.importorskip("triton")

from hfq.kernels.cuda import launch
from hfq.kernels.cuda.expert_products import ExpertStack, Routing, block_size, multiply_rows
from tests.support.triton_device import DEVICE, made, random_rows

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
EXPERTS, CHOSEN = 5, 2
LAYERS = [
    "w4 act-order",
    "awq g32",
    "mxfp4",
    "nvfp4",
    "nf4 double-quantized",
    "w3 g32",
    "fp8 blocks of 48x80",
    "int8 groups asym",
    pytest.param("ggml Q4_K", marks=pytest.mark.every_dialect),
]


def stack_of(name: str, has_bias: bool = False) -> list:
    """Returns the tensors and formats of experts, each with other codes and scales."""
    layers = []
    for expert in range(EXPERTS):
        weight_format, tensors = made(name)
        moved = {
            local: tensor.roll(expert, 0) if tensor.dim() and local != "g_idx" else tensor
            for local, tensor in tensors.items()
        }
        if has_bias:
            moved["bias"] = random_rows(1, weight_format.shape(tensors)[0], torch.float16, expert)[0]
        layers.append((moved, weight_format))
    return layers


def routed(tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns experts, of which 5 and -1 do not exist, and their weights."""
    chosen = torch.stack(
        [torch.randperm(EXPERTS + 2, generator=generator)[:CHOSEN] - 1 for _ in range(tokens)]
    )
    return chosen.to(DEVICE), torch.rand(tokens, CHOSEN, generator=generator).to(DEVICE)


def looped(rows, layers, chosen, weights, size) -> torch.Tensor:
    """Returns the sum of the loop over experts."""
    weight_format = layers[0][1]
    result = torch.zeros(len(rows), weight_format.shape(layers[0][0])[0], dtype=rows.dtype, device=DEVICE)
    for expert, (tensors, _) in enumerate(layers):
        token, place = torch.where(chosen == expert)
        if len(token):
            product = multiply_rows(rows[token], tensors, weight_format, size) * weights[token, place, None]
            result.index_add_(0, token, product.to(result.dtype))
    return result


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_a_stack_equals_the_loop_over_experts(name, tokens):
    layers = stack_of(name, has_bias=tokens == 3)
    chosen, weights = routed(tokens, torch.Generator().manual_seed(tokens))
    rows = random_rows(tokens, layers[0][1].shape(layers[0][0])[1], torch.bfloat16)
    size = block_size(tokens, CHOSEN, EXPERTS, rows.dtype)
    assert size == (1 if tokens <= launch.FEW_ROWS else 16)
    stack, routing = ExpertStack(layers), Routing.of(chosen, weights, EXPERTS, size)
    assert stack.reason is None
    found = routing.combine(stack(rows, routing, are_tokens=True))
    assert torch.equal(found, looped(rows, layers, chosen, weights, size))


@pytest.mark.parametrize("tokens", [2, 40])
def test_the_rows_of_a_product_are_the_inputs_of_the_next(tokens):
    """Rows stay in the order of the routing between the two products of an expert."""
    first, second = stack_of("w4 g32"), stack_of("pack-quantized groups of 26")
    chosen, weights = routed(tokens, torch.Generator().manual_seed(1))
    rows = random_rows(tokens, 352, torch.bfloat16)
    size = block_size(tokens, CHOSEN, EXPERTS, rows.dtype)
    routing = Routing.of(chosen, weights, EXPERTS, size)
    both = ExpertStack(first)(rows, routing, are_tokens=True)[:, :78].contiguous()
    found = routing.combine(ExpertStack(second)(both, routing, are_tokens=False))
    expected = torch.zeros_like(found)
    for expert in range(EXPERTS):
        token, place = torch.where(chosen == expert)
        if len(token):
            part = multiply_rows(rows[token], *first[expert], size)[:, :78]
            part = multiply_rows(part, *second[expert], size) * weights[token, place, None]
            expected.index_add_(0, token, part.to(expected.dtype))
    assert torch.equal(found, expected)


def test_blocks_hold_the_rows_of_each_expert_in_order():
    chosen = torch.tensor([[3], [0], [3], [7], [3], [-1]], device=DEVICE)
    routing = Routing.of(chosen, torch.ones(6, 1, device=DEVICE), 4, 2)
    assert routing.order.tolist() == [1, 0, 2, 4, 3, 5]
    used = routing.blocks[routing.blocks[:, 2] > 0]
    assert used.tolist() == [[0, 0, 1], [3, 1, 2], [3, 3, 1]]
    assert len(routing.blocks) <= 6


def test_experts_with_many_rows_compute_one_by_one():
    assert block_size(4, 8, 128, torch.bfloat16) == 1
    assert [block_size(tokens, 8, 128, torch.bfloat16) for tokens in (5, 256, 257, 1024)] == [16, 16, 32, 64]
    assert block_size(1025, 8, 128, torch.bfloat16) is None


def test_experts_of_different_layouts_are_not_stacked():
    layers = stack_of("w4 g32")
    other = stack_of("w4 g32 v1")
    assert "layouts" in ExpertStack([layers[0], other[0]]).reason
    columns = stack_of("w4 g32", has_bias=True)
    assert "biases" in ExpertStack([layers[0], columns[0]]).reason
