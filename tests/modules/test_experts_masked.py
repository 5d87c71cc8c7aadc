"""Tests of the experts of Switch Transformers against transformers' own module."""

import copy

import pytest
import torch
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts

from hfq.formats.unquantized import Unquantized
from hfq.kernels.registry import KERNELS
from hfq.modules.experts import DroppedActivation, MaskedExperts
from hfq.modules.linear import QuantizedLinear
from tests.support.tiny_models import described

HIDDEN, INTERMEDIATE, EXPERTS = 16, 24, 4


@pytest.fixture
def stock():
    torch.manual_seed(0)
    sizes = {"d_model": HIDDEN, "d_ff": INTERMEDIATE, "num_experts": EXPERTS, "dropout_rate": 0.5}
    return SwitchTransformersExperts(SwitchTransformersConfig(**sizes)).eval()


@pytest.fixture
def experts(stock):
    layers = []
    for expert in range(EXPERTS):
        own = stock[f"expert_{expert}"]
        layers.append({"up_proj": _layer(own.wi), "down_proj": _layer(own.wo)})
    return MaskedExperts(layers, DroppedActivation(torch.nn.ReLU(), 0.5)).eval()


def _layer(linear):
    tensors = {"weight": linear.weight.detach()}
    layer = QuantizedLinear(
        "m",
        linear.in_features,
        linear.out_features,
        Unquantized(),
        described("m", tensors),
        KERNELS["reference"],
    )
    layer.hold(tensors)
    return layer


def inputs():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, HIDDEN, generator=generator)
    mask = torch.nn.functional.one_hot(torch.tensor([0, 3, 3, 0, 1, 0, 3, 1, 0]), EXPERTS)[:, None]
    mask[5] = 0  # beyond the capacity of its expert
    return hidden, mask, torch.rand(9, 1, generator=generator)


def test_outputs_are_those_of_transformers_and_zeros_beyond_the_capacity(stock, experts):
    hidden, mask, weights = inputs()
    with torch.no_grad():
        found, expected = experts(hidden, mask, weights), stock(hidden, mask, weights)
    assert torch.equal(found, expected)
    assert not found[5].any()


def test_training_drops_values_also_of_a_copy_alone(experts):
    trained, arguments = copy.deepcopy(experts).train(), inputs()
    with torch.no_grad():
        expected = experts(*arguments)
        assert torch.equal(experts(*arguments), expected)
        assert not torch.equal(trained(*arguments), expected)
        assert torch.equal(trained.eval()(*arguments), expected)


def test_many_rows_draw_the_numbers_of_one_dropout(experts):
    values = torch.randn(700, 96, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(values.relu(), 0.5)
    torch.manual_seed(3)
    assert torch.equal(experts.train()._gate([values]), expected)


@pytest.mark.parametrize("is_hidden", [False, True], ids=["shown", "hidden"])
def test_initializing_by_the_models_names_changes_nothing(experts, is_hidden):
    arguments = inputs()
    with torch.no_grad():
        expected = experts(*arguments)
        if is_hidden:
            experts.hide_layers()
        weight = experts["expert_3"].wi.weight
        assert weight._is_hf_initialized
        weight.normal_()
        experts.show_layers()
        assert torch.equal(experts(*arguments), expected)
    assert experts["expert_3"].wo.weight.numel() == 0
