"""QuantizedExperts computes what transformers' fused experts do with the dequantized weights, with the routed
experts alone.
"""

import dataclasses
import gc
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.kernels.cpp.kernel import FUSED_ROWS
from hfq.kernels.registry import KERNELS, choose_kernel
from hfq.modules.experts import QuantizedExperts
from hfq.modules.linear import QuantizedLinear
from tests.support import tiny_models

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, CHOSEN = 5, 64, 96, 7, 2
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "hidden_act": "silu"}
FUSED = {
    "mixtral": lambda: MixtralExperts(
        MixtralConfig(**SIZES, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS)
    ),
    "qwen3": lambda: Qwen3MoeExperts(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS)
    ),
    "gpt-oss": lambda: GptOssExperts(
        GptOssConfig(**SIZES, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS)
    ),
}
FORMATS = {"fp8": Fp8(strategy="channel"), "gptq": Gptq(4, 32, True, "stored", g_idx_length=64)}


def linear(
    weight_format, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[QuantizedLinear, torch.Tensor]:
    """(a packed layer, the weight that it stands for)."""
    tensors = {local: tensor.contiguous() for local, tensor in weight_format.quantize(weight).items()}
    found = tiny_models.settled(weight_format, tensors, {"checkpoint_format": "gptq_v2"}, tuple(weight.shape))
    tensors |= {} if bias is None else {"bias": bias}
    module = QuantizedLinear(
        "m",
        weight.shape[1],
        weight.shape[0],
        found,
        tiny_models.described("m", tensors),
        choose_kernel("reference"),
    )
    module.hold(tensors)
    return module, found.dequantize(tensors)


@pytest.fixture(
    params=[(model, name, split) for model in FUSED for name in FORMATS for split in (True, False)], ids=str
)
def pair(request):
    """(transformers' fused experts of the dequantized weights, hfq's packed ones); gate and up of one layer,
    or of two.
    """
    model, name, is_split = request.param
    torch.manual_seed(5)
    fused, is_gpt_oss = FUSED[model](), model == "gpt-oss"
    if is_gpt_oss:
        fused.config = SimpleNamespace(_experts_implementation="eager")
    for parameter in fused.parameters():
        parameter.data.normal_(std=0.3)
        parameter.requires_grad_(False)
    layers = []
    for expert in range(EXPERTS):
        weights = {"gate_up_proj": fused.gate_up_proj[expert], "down_proj": fused.down_proj[expert]}
        if is_gpt_oss:
            weights = {local: weight.t() for local, weight in weights.items()}
        own = {}
        for local, weight in weights.items():
            bias = getattr(fused, f"{local}_bias")[expert] if is_gpt_oss else None
            if local == "down_proj" or not is_split:
                own[local], real = linear(FORMATS[name], weight, bias)
            elif is_gpt_oss:
                own["gate_proj"], gate = linear(FORMATS[name], weight[::2], bias[::2].contiguous())
                own["up_proj"], up = linear(FORMATS[name], weight[1::2], bias[1::2].contiguous())
                real = torch.stack([gate, up], 1).flatten(0, 1)
            else:
                (own["gate_proj"], gate), (own["up_proj"], up) = (
                    linear(FORMATS[name], half, None) for half in weight.chunk(2)
                )
                real = torch.cat([gate, up])
            weight.copy_(real)
        layers.append(own)
    return fused, QuantizedExperts(layers, fused._apply_gate, is_interleaved=is_gpt_oss)


def eager(fused, *inputs) -> torch.Tensor:
    """transformers' own loop over experts, below its choice of implementations."""
    forward = type(fused).forward
    return getattr(forward, "__wrapped__", forward)(fused, *inputs)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    index = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    return hidden, index, torch.rand(TOKENS, CHOSEN, generator=generator)


def computed(experts) -> list[int]:
    """Notes which experts compute, in a list that fills up."""
    noted = []
    for number, layers in enumerate(experts):
        layers["down_proj"].register_forward_pre_hook(lambda *_, number=number: noted.append(number))
    return noted


def test_the_output_is_that_of_transformers_fused_experts(pair, inputs):
    fused, experts = pair
    expected, found = eager(fused, *inputs), experts(*inputs)
    assert found.shape == expected.shape
    # the products of panels may sum in another order than those of whole weights
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    assert expected.norm() > 1


def test_only_routed_experts_compute(pair, inputs):
    _, experts = pair
    noted = computed(experts)
    experts(*inputs)
    assert noted == sorted(set(inputs[1].flatten().tolist()))
    assert EXPERTS - 1 not in noted


def test_no_tokens_need_no_expert(pair):
    _, experts = pair
    noted = computed(experts)
    found = experts(torch.empty(0, HIDDEN), torch.empty(0, CHOSEN, dtype=torch.int64), torch.empty(0, CHOSEN))
    assert found.shape == (0, HIDDEN)
    assert noted == []


@pytest.mark.parametrize("index", [EXPERTS, -1, 10**6, -(10**6)])
def test_an_index_out_of_range_adds_nothing(pair, inputs, index):
    _, experts = pair
    hidden, chosen, weights = inputs
    masked = chosen.clone()
    masked[2], masked[4, 1] = index, index
    kept = weights * (masked == chosen)
    found = experts(hidden, masked, weights)
    assert torch.equal(found[2], torch.zeros(HIDDEN))
    # an expert that has fewer tokens may sum its products in another order
    expected = experts(hidden, chosen, kept)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_an_index_past_the_experts_masks_a_token(pair, inputs):
    """transformers 5.23 marks so what another rank computes; 5.17 knows no such mark, so the expected is a
    weight of zero.
    """
    fused, experts = pair
    hidden, chosen, weights = inputs
    masked, unweighted = chosen.clone(), weights.clone()
    masked[3], unweighted[3] = EXPERTS, 0
    expected = eager(fused, hidden, chosen, unweighted)
    assert (experts(hidden, masked, weights) - expected).norm() <= 1e-6 * expected.norm()


def test_a_gradient_reaches_activations_and_routing_weights(pair, inputs):
    fused, experts = pair
    hidden, chosen, weights = inputs
    grads = []
    for compute in (lambda *args: eager(fused, *args), experts):
        leaves = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        compute(leaves[0], chosen, leaves[1]).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*grads, strict=True):
        assert expected.norm() > 0
        # the backward sums products in another order, too
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert all(parameter.grad is None for parameter in experts.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_the_hidden_states(pair, inputs, dtype):
    fused, experts = pair
    hidden, chosen, weights = inputs
    found = experts(hidden.to(dtype), chosen, weights)
    assert found.dtype == dtype
    expected = eager(fused, hidden.to(dtype).float(), chosen, weights)
    # each of the three products and the sum are rounded to 8 or 11 bits
    assert (found.float() - expected).norm() <= {torch.bfloat16: 3e-2, torch.float16: 4e-3}[
        dtype
    ] * expected.norm()


def test_a_token_that_chooses_one_expert_twice_gets_it_twice(pair, inputs):
    _, experts = pair
    hidden, chosen, weights = inputs
    twice, once = chosen.clone(), chosen.clone()
    twice[:, 1] = twice[:, 0]
    once[:, 1] = -1
    summed = weights.clone()
    summed[:, 0] += weights[:, 1]
    # twice a product, against a product with twice the weight
    expected = experts(hidden, once, summed)
    assert (experts(hidden, twice, weights) - expected).norm() <= 1e-6 * expected.norm()


def test_further_arguments_of_a_model_are_left_alone(pair, inputs):
    _, experts = pair
    assert torch.equal(experts(*inputs, num_tokens=3), experts(*inputs))


def test_each_projection_of_each_expert_is_a_module_by_its_name(pair):
    _, experts = pair
    names = {name for name, module in experts.named_modules() if isinstance(module, QuantizedLinear)}
    per_expert = {name.partition(".")[2] for name in names}
    assert per_expert in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
    assert names == {f"{expert}.{local}" for expert in range(EXPERTS) for local in per_expert}


def onload_in_parts(experts, size: int, offloaded) -> list:
    """Makes layers need `onload`, which gives them their tensors in parts of some experts; returns the calls.

    Args:
        experts: The experts.
        size: Number of experts of a part.
        offloaded: The numbers of the experts that are offloaded.
    """
    calls, here = [], set()

    def fetch(layer):
        assert layer in here, "its weights are not on the execution device"
        return layer.stored_tensors()

    def onload(routed, use, guess):
        assert guess is None, "no offloader serves these experts"
        calls.append(routed)
        for first in range(0, len(routed), size):
            here.update(layer for layers in routed[first : first + size] for layer in layers)
            use(first, min(first + size, len(routed)), {})
            here.clear()

    experts.onload = onload
    for number in offloaded:
        for layer in experts[number].values():
            layer.is_offloaded, layer.fetch = True, lambda layer=layer: fetch(layer)
    return calls


@pytest.mark.parametrize("size", [1, 2, EXPERTS])
def test_offloaded_experts_compute_in_parts_and_give_the_same_bits(pair, inputs, size):
    _, experts = pair
    expected = experts(*inputs)
    calls = onload_in_parts(experts, size, [number for number in range(EXPERTS) if number != 1])
    assert torch.equal(experts(*inputs), expected)
    routed = sorted(set(inputs[1].flatten().tolist()))
    assert calls == [[[*experts[number].values()] if number != 1 else [] for number in routed]]


def test_layers_that_change_between_calls_are_onloaded_as_they_are(pair, inputs):
    _, experts = pair
    expected, routed = experts(*inputs), sorted(set(inputs[1].flatten().tolist()))
    calls = onload_in_parts(experts, EXPERTS, range(EXPERTS))
    assert torch.equal(experts(*inputs), expected)
    number, other = routed[0], routed[1]
    for layer in experts[number].values():
        layer.is_offloaded, layer.fetch = False, None
    assert torch.equal(experts(*inputs), expected)
    assert calls[-1][0] == []
    experts[number] = experts[other]
    assert not torch.equal(experts(*inputs), expected)
    assert calls[-1][0] == calls[-1][1] == [*experts[other].values()]


def test_nothing_is_onloaded_where_no_token_is_routed(pair):
    _, experts = pair
    calls = onload_in_parts(experts, 1, range(EXPERTS))
    experts(torch.empty(0, HIDDEN), torch.empty(0, CHOSEN, dtype=torch.int64), torch.empty(0, CHOSEN))
    assert calls == []


@pytest.fixture
def grouped(native, pair):
    """(packed experts of the compiled kernel, the rows of each expert that it was asked to add in one call)."""
    _, experts = pair
    asked, kernel = [], KERNELS["cpp"]

    def add(sums, hidden_states, index, *others):
        asked.append(index[index >= 0].bincount().tolist())
        return kernel.experts.add(sums, hidden_states, index, *others)

    spied = dataclasses.replace(
        kernel, experts=dataclasses.replace(kernel.experts, add=add, block_size=lambda *_: None)
    )
    for layers in experts:
        for layer in layers.values():
            layer.kernel = spied
    return experts, asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_that_are_multiplied_in_one_call_equal_the_loop_bit_for_bit(grouped, inputs, dtype):
    experts, asked = grouped
    hidden, chosen, weights = inputs
    chosen = chosen.clone()
    chosen[0, 0], chosen[1] = -1, EXPERTS  # left out
    chosen[2, 1] = chosen[2, 0]
    found = experts(hidden.to(dtype), chosen, weights.to(dtype))
    routed = chosen[(chosen >= 0) & (chosen < EXPERTS)].bincount()
    assert asked == [routed[routed > 0].tolist()]
    experts[int(routed.nonzero()[0])]["down_proj"].register_forward_hook(
        lambda *_: None
    )  # hooks are not left out
    asked.clear()
    assert torch.equal(experts(hidden.to(dtype), chosen, weights.to(dtype)), found)
    assert not asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, EXPERTS])
def test_fetched_experts_are_multiplied_together_and_give_the_same_bits(grouped, inputs, size, dtype):
    experts, asked = grouped
    hidden, chosen, weights = inputs[0].to(dtype), inputs[1], inputs[2].to(dtype)
    expected = experts(hidden, chosen, weights)
    (whole,) = {tuple(counts) for counts in asked}
    asked.clear()
    onload_in_parts(experts, size, range(EXPERTS))
    assert torch.equal(experts(hidden, chosen, weights), expected)
    assert asked == [[*whole[first : first + size]] for first in range(0, len(whole), size)]


def test_one_token_that_chooses_many_experts_is_added_up_as_in_the_loop(native):
    """As in decoding; in bfloat16, where the order of the additions shows."""
    layers = []
    for seed in range(8):
        torch.manual_seed(seed)
        own = {
            local: linear(FORMATS["fp8"], torch.randn(*shape), None)[0]
            for local, shape in {"gate_up_proj": (128, 512), "down_proj": (512, 64)}.items()
        }
        for layer in own.values():
            layer.kernel = KERNELS["cpp"]
        layers.append(own)
    experts = QuantizedExperts(layers, lambda both: torch.tanh(both[..., :64]) * both[..., 64:])
    inputs = torch.randn(1, 512).bfloat16(), torch.randperm(8)[None], torch.rand(1, 8).bfloat16()
    found = experts(*inputs)
    experts[0]["down_proj"].register_forward_hook(lambda *_: None)
    assert torch.equal(experts(*inputs), found)


def test_experts_compute_one_by_one_where_gradients_or_many_rows_ask_for_it(grouped, inputs):
    experts, asked = grouped
    hidden, chosen, weights = inputs
    expected = experts(hidden, chosen, weights)
    asked.clear()
    hidden.requires_grad_()
    found = experts(hidden, chosen, weights)
    assert torch.equal(found, expected)
    assert not asked
    found.sum().backward()
    assert hidden.grad.abs().sum() > 0
    hidden = hidden.detach()
    weights.requires_grad_()  # of a trained router, below frozen layers
    experts(hidden, chosen, weights).sum().backward()
    assert not asked
    assert weights.grad.abs().sum() > 0
    inputs = hidden, chosen, weights.detach()
    times = FUSED_ROWS[torch.float32]
    many = experts(*(part.detach().repeat(times, 1) for part in inputs))
    assert len(asked) == 1  # and declined
    assert (
        many - expected.repeat(times, 1)
    ).norm() <= 1e-5 * many.norm()  # panels are multiplied by torch, in another order


def test_an_activation_that_is_a_module_is_no_expert(native):
    """Experts without a gate, such as those of Nemotron, are given the activation itself."""
    torch.manual_seed(0)
    layers = [
        {
            local: linear(FORMATS["fp8"], torch.randn(*shape), None)[0]
            for local, shape in {"up_proj": (96, 64), "down_proj": (64, 96)}.items()
        }
        for _ in range(2)
    ]
    for layer in (layer for own in layers for layer in own.values()):
        layer.kernel = KERNELS["cpp"]
    experts = QuantizedExperts(layers, torch.nn.ReLU())
    assert len(experts) == 2
    inputs = torch.randn(3, 64), torch.tensor([[0, 1], [1, 2], [-1, 0]]), torch.rand(3, 2)
    found = experts(*inputs)
    assert torch.equal(found, one_by_one(experts, *inputs))
    assert found.abs().sum() > 0


@pytest.fixture
def fast(native, pair):
    """The packed experts, with the compiled kernel."""
    _, experts = pair
    for layers in experts:
        for layer in layers.values():
            layer.kernel = KERNELS["cpp"]
    return experts


def one_by_one(experts, *inputs) -> torch.Tensor:
    """Returns the result of the loop over experts."""
    handle = experts[0]["down_proj"].register_forward_hook(lambda *_: None)
    try:
        return experts(*inputs)
    finally:
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_the_compiled_kernel_equal_the_loop_bit_for_bit(fast, inputs, dtype):
    hidden, chosen, weights = inputs
    chosen = chosen.clone()
    chosen[0, 0], chosen[1] = -1, EXPERTS  # left out
    chosen[2, 1] = chosen[2, 0]
    inputs = hidden.to(dtype), chosen, weights.to(dtype)
    expected = one_by_one(fast, *inputs)
    assert torch.equal(fast(*inputs), expected)


def test_a_router_below_frozen_layers_gets_its_gradient_from_the_compiled_kernel(fast, inputs):
    hidden, chosen, weights = inputs
    expected = fast(*inputs)
    leaf = weights.clone().requires_grad_()
    found = fast(hidden, chosen, leaf)
    assert torch.equal(found, expected)
    found.sum().backward()
    outputs = [
        fast(hidden, chosen[:, place : place + 1], torch.ones_like(leaf[:, :1])) for place in range(CHOSEN)
    ]
    torch.testing.assert_close(leaf.grad, torch.stack([each.sum(1) for each in outputs], 1))


def test_their_description_is_made_once_and_again_when_a_layer_changes(fast, inputs, monkeypatch):
    made, kernel = [], KERNELS["cpp"]
    spied = dataclasses.replace(
        kernel,
        experts=dataclasses.replace(
            kernel.experts, products=lambda *layers: made.append(1) or kernel.experts.products(*layers)
        ),
    )
    for layers in fast:
        for layer in layers.values():
            layer.kernel = spied
    expected = fast(*inputs)
    for _ in range(3):
        assert torch.equal(fast(*inputs), expected)
    assert len(made) == 1
    number = int(inputs[1][0, 0])
    changed = fast[number]["down_proj"]
    changed.hold({local: tensor.clone() for local, tensor in changed.stored_tensors().items()})
    assert torch.equal(fast(*inputs), expected)
    assert len(made) == 2
    parameter = next(iter(changed.parameters()))
    other = next(iter(fast[(number + 1) % EXPERTS]["down_proj"].parameters()))
    parameter.data = other.data
    found = fast(*inputs)
    assert len(made) == 3
    assert torch.equal(found, one_by_one(fast, *inputs))
    fast[number]["down_proj"] = fast[(number + 1) % EXPERTS]["down_proj"]
    found = fast(*inputs)
    assert torch.equal(found, one_by_one(fast, *inputs))


def test_python_calls_do_not_depend_on_the_number_of_routed_experts(fast):
    def calls(chosen: int) -> int:
        inputs = torch.randn(1, HIDDEN), torch.arange(chosen)[None], torch.rand(1, chosen)
        fast(*inputs)
        counted = []
        gc.collect()
        gc.disable()  # callbacks of freed objects are calls, too
        sys.setprofile(lambda _, event, __: counted.append(1) if event == "call" else None)
        try:
            fast(*inputs)
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(counted)

    assert calls(1) == calls(EXPERTS)


def test_bits_do_not_depend_on_the_rows_that_threads_share(native):
    """torch computes the ends of a thread's part of a tensor by another exponential function."""
    torch.manual_seed(0)
    layers = []
    for _ in range(16):
        shapes = {"gate_up_proj": (2 * 384, HIDDEN), "down_proj": (HIDDEN, 384)}
        own = {local: linear(FORMATS["fp8"], torch.randn(*shape), None)[0] for local, shape in shapes.items()}
        for layer in own.values():
            layer.kernel = KERNELS["cpp"]
        layers.append(own)
    experts = QuantizedExperts(
        layers, lambda both: torch.nn.functional.silu(both[..., :384]) * both[..., 384:]
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        for tokens in (583, 705, 766):
            inputs = torch.randn(tokens, HIDDEN), torch.arange(tokens)[:, None] % 16, torch.rand(tokens, 1)
            assert torch.equal(experts(*inputs), one_by_one(experts, *inputs))
    finally:
        torch.set_num_threads(threads)
