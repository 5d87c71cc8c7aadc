"""A weight on disk takes part in nothing but its own module's computation: what torch would make up values
for raises.
"""

import re

import pytest
import torch
import torch.nn.functional as F

from hfq.errors import PlacementError
from hfq.modules.offloaded_parameter import OffloadedParameter

NAME = "model.layers.0.mlp.up_proj.weight"
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def away(*shape):
    parameter = OffloadedParameter(torch.empty(*shape, device="meta"), requires_grad=False)
    parameter.name, parameter.onload_device = NAME, torch.device("cpu")
    return parameter


def attention():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    layer.out_proj.weight = away(8, 8)
    return layer(X, X, X)


COMPUTATIONS = {
    "attention": attention,
    "linear": lambda: F.linear(X, away(8, 8)),
    "convolution": lambda: F.conv_transpose1d(X, away(3, 3, 2)),
    "norm": lambda: F.group_norm(X, 1, away(3)),
    "bilinear": lambda: F.bilinear(X, X, away(4, 8, 8)),
    "bags": lambda: F.embedding_bag(torch.tensor([[1]]), away(8, 8)),
    "mv": lambda: torch.mv(away(8, 8), torch.ones(8)),
    "cat": lambda: torch.cat([away(2, 3, 8), X]),
    "where": lambda: torch.where(X > 0, X, away(1)),
    "in place": lambda: X.clone().add_(away(8)),
    "division": lambda: X / away(8),
    "a number less it": lambda: 1 - away(8),
    "rows of it": lambda: torch.index_select(away(8, 8), 0, torch.tensor([1])),
    "a function of it": lambda: X * away(8).exp(),
    "a view of it": lambda: X + away(8).view(1, 1, 8),
    "a part of it": lambda: F.linear(X, away(16, 8).chunk(2)[0]),
    "its transpose, made by reshaping": lambda: X @ away(8, 8).reshape(8, 8),
    "it, normalized": lambda: F.linear(X, F.normalize(away(8, 8))),
    "it, in another dtype and flat": lambda: X.flatten()[:64] * away(8, 8).flatten().double(),
    "its adjoint": lambda: X @ away(8, 8).H,
    "its data": lambda: F.linear(X, away(8, 8).data),
    "it, detached": lambda: F.linear(X, away(8, 8).detach()),
    "its sum": lambda: away(8).sum(),
    "its norm": lambda: torch.linalg.norm(away(8)),
    "its mean, of a function of it": lambda: torch.mean(away(8).abs()),
    "equality": lambda: torch.equal(away(8), away(8)),
    "a truth value": lambda: bool(away(1)),
    "a number": lambda: float(away(1)),
    "a view, moved": lambda: away(8, 8).view(64).to("cpu"),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computing_with_it_or_with_what_was_made_of_it_is_refused(name):
    with pytest.raises(
        PlacementError, match=r"(?s)is offloaded.*\{\"model\.layers\.0\.mlp\.up_proj\": \"cpu\"\}"
    ) as caught:
        COMPUTATIONS[name]()
    assert caught.value.tensor == NAME


@pytest.mark.parametrize(
    ("read", "name"),
    [(lambda weight: weight.T, ".T"), (lambda weight: weight.t(), "t"), (lambda w: w[0], "__getitem__")],
)
def test_the_function_or_attribute_that_reads_it_is_named(read, name):
    words = f"{NAME} is offloaded and cannot be read directly by {name}."
    with pytest.raises(PlacementError, match=re.escape(words)):
        read(away(8, 8))


CHANGES = {
    "fill_": lambda: away(8).fill_(1),
    "copy_": lambda: away(8).copy_(torch.ones(8)),
    "zero_": lambda: away(8).data.zero_(),
    "mul_": lambda: away(8).mul_(2),
    "__setitem__": lambda: away(8).__setitem__(0, 1),
    "normal_": lambda: torch.nn.init.normal_(away(8)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_refused_after_the_load(name):
    words = rf"is offloaded and cannot be changed by {name}\.(?s:.)*Fix: Add {{\"model.layers.0.mlp.up_proj\": \"cpu\"}}"
    with pytest.raises(PlacementError, match=words), torch.no_grad():
        CHANGES[name]()


def test_initialization_before_the_end_of_the_load_is_answered():
    weight = away(8)
    weight.onload_device = None
    assert torch.nn.init.ones_(weight) is weight
    assert weight.requires_grad_(False) is weight


def test_what_asks_for_no_values_is_answered():
    weight = away(4, 8)
    assert (weight.shape, weight.dtype, weight.dim(), weight.numel()) == ((4, 8), torch.float32, 2, 32)
    assert weight.is_meta
    assert weight.device == torch.device("cpu")
    assert weight.detach().is_meta
    assert torch.zeros_like(weight, device="cpu").shape == (4, 8)
    assert weight.new_zeros(2, device="cpu").tolist() == [0, 0]
    assert weight.to("cpu") is weight
    assert weight.view(32).shape == (32,)
