"""Tests of GPTQ against a plain implementation of the paper and exact OBQ."""

import dataclasses

import pytest
import torch

from hfq import FormatError, SetupError
from hfq.quantization.gptq import Factor, factorize, solve
from hfq.quantization.textbook.obq import obq
from hfq.recipes.recipe import Recipe

ROWS, COLUMNS = 64, 96


@pytest.fixture(scope="module")
def layer():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(COLUMNS, COLUMNS, generator=generator) * torch.rand(COLUMNS, generator=generator) * 2
    inputs = torch.randn(1000, COLUMNS, generator=generator) @ mixed
    return torch.randn(ROWS, COLUMNS, generator=generator), inputs.t() @ inputs / len(inputs)


def solved(layer, **options):
    recipe = Recipe(**{"group_size": 32, **options})
    weight_format = recipe.weight_format([(ROWS, COLUMNS)])
    factor = factorize(layer[1].clone(), recipe, "layer")
    found = solve(layer[0], factor, weight_format, recipe)
    reader = dataclasses.replace(weight_format, act_order=recipe.desc_act and not recipe.static_groups)
    return found, factor, reader.dequantize(reader.pack(found.codes, found.scales, found.zeros, found.g_idx))


def cost(layer, quantized, damping=0.0):
    error, hessian = (layer[0] - quantized).double(), layer[1].double()
    hessian = hessian + torch.eye(COLUMNS) * damping * hessian.diagonal().mean()
    return float((error @ hessian * error).sum() / ROWS)


def plain(layer, weight_format, order, damping, span):
    """Algorithm 1 of the paper in float64, column by column."""
    weight, hessian = layer[0].double()[:, order], layer[1].double()
    hessian = hessian + torch.eye(COLUMNS) * damping * hessian.diagonal().mean()
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian[order][:, order]), upper=True)
    quantized = torch.empty_like(weight)
    for column in range(COLUMNS):
        if column % span == 0:
            group = weight[:, column : column + span].float()
            scales, zeros = weight_format.scales_and_zeros(group.amin(1), group.amax(1))
        codes = (weight[:, column] / scales + zeros).round().clamp(0, (1 << weight_format.num_bits) - 1)
        quantized[:, column] = (codes - zeros) * scales
        error = (weight[:, column] - quantized[:, column]) / upper[column, column]
        weight[:, column:] -= error[:, None] * upper[column, column:]
    return quantized[:, order.argsort()]


VARIANTS = [
    {},
    {"act_group_aware": False},
    {"desc_act": True},
    {"sym": False},
    {"group_size": -1},
    {"bits": 2},
    {"bits": 3},
    {"bits": 8},
    {"damp_percent": 0.3},
    {"group_size": 8},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_it_is_the_paper_s_algorithm(layer, options):
    options = {"clip_search": False, **options}
    found, factor, quantized = solved(layer, **options)
    recipe = Recipe(**{"group_size": 32, **options})
    span = COLUMNS if recipe.group_size == -1 else recipe.group_size
    expected = plain(
        layer, recipe.weight_format([(ROWS, COLUMNS)]), factor.order.flip(0), recipe.damp_percent, span
    )
    # the plain one computes in float64, so that a tie may fall the other way and move a few later codes
    assert (quantized - expected).abs().lt(1e-5).float().mean() > 0.98
    assert cost(layer, quantized) == pytest.approx(cost(layer, expected), rel=2e-3)
    assert found.loss == pytest.approx(cost(layer, quantized, factor.damping), rel=1e-3)


def test_it_is_obq_in_obq_s_order(layer):
    """With the order of exact OBQ, GPTQ chooses OBQ's codes row by row."""
    recipe = Recipe(group_size=-1, clip_search=False)
    weight_format = recipe.weight_format([(1, COLUMNS)])
    hessian = layer[1].double() + torch.eye(COLUMNS) * layer[1].diagonal().mean() * 0.05
    rows = layer[0][:6]
    scales, zeros = weight_format.scales_and_zeros(rows.amin(1), rows.amax(1))
    expected, orders = obq(rows, hessian, scales, zeros, 15)
    same = 0
    for row, codes, order in zip(rows, expected, orders, strict=True):
        reverse = order.flip(0)
        lower = torch.linalg.cholesky(hessian[reverse][:, reverse])
        factor = Factor((lower / lower.diagonal()).float(), lower.diagonal().square().float(), reverse, 0.05)
        found = solve(row.expand(32, -1), factor, weight_format, recipe)
        same += int((found.codes[:, 0].long() == codes).sum())
    assert same / expected.numel() > 0.99  # float32 against float64


def test_obq_costs_less_than_rounding(layer):
    weight_format = Recipe(group_size=-1).weight_format([(1, COLUMNS)])
    rows = layer[0][:4]
    scales, zeros = weight_format.scales_and_zeros(rows.amin(1), rows.amax(1))
    codes, _ = obq(rows, layer[1], scales, zeros, 15)
    rounded = (rows / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
    errors = [(rows - (each - zeros[:, None]) * scales[:, None]).double() for each in (codes, rounded)]
    exact, nearest = [(error @ layer[1].double() * error).sum() for error in errors]
    assert exact < 0.6 * nearest


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_it_costs_less_than_rounding_and_a_clip_search_less_still(layer, num_bits, symmetric):
    nearest = Recipe(bits=num_bits, group_size=32, sym=symmetric).weight_format([(ROWS, COLUMNS)])
    rounded = cost(layer, nearest.dequantize(nearest.quantize(layer[0])))
    options = {"bits": num_bits, "sym": symmetric, "damp_percent": 0.01}
    searched = cost(layer, solved(layer, **options, clip_search=True)[2])
    assert searched < 0.8 * rounded
    if num_bits < 8:
        assert searched < cost(layer, solved(layer, **options, clip_search=False)[2])


@pytest.mark.parametrize(
    "options", [{}, {"desc_act": True, "static_groups": True}, {"act_group_aware": False}], ids=str
)
def test_groups_stay_those_of_neighbours(layer, options):
    found, _, quantized = solved(layer, **options)
    assert torch.equal(found.g_idx, torch.arange(COLUMNS) // 32)
    assert cost(layer, quantized) < cost(layer, torch.zeros_like(quantized))


def test_act_order_scatters_groups_by_activation(layer):
    found, _, _ = solved(layer, desc_act=True)
    by_activation = layer[1].diagonal().argsort(descending=True, stable=True)
    assert torch.equal(found.g_idx[by_activation], torch.arange(COLUMNS) // 32)


def test_the_same_input_gives_the_same_bytes(layer):
    first, second = solved(layer)[0], solved(layer)[0]
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scales, second.scales)


def test_a_channel_without_activations_is_rounded_to_nearest():
    weight, hessian = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)), torch.eye(32)
    hessian[5, 5] = 0
    recipe = Recipe(group_size=32, clip_search=False)
    weight_format = recipe.weight_format([(32, 32)])
    found = solve(weight, factorize(hessian, recipe, "x"), weight_format, recipe)
    assert torch.equal(
        weight_format.pack(found.codes, found.scales, found.zeros)["qweight"],
        weight_format.quantize(weight)["qweight"],
    )


def test_damping_grows_until_the_hessian_factors(layer, caplog):
    hessian = layer[1].clone()
    hessian.diagonal().sub_(
        0.1 * hessian.diagonal().mean()
    )  # rounding may do this to a singular matrix; this makes sure
    factor = factorize(hessian, Recipe(damp_percent=0.001, group_size=32), "layer")
    assert 0.001 < factor.damping <= 1
    assert "Trying" in caplog.text


@pytest.mark.parametrize(
    ("hessian", "named"),
    [
        (torch.zeros(32, 32), "reached a layer"),
        (torch.full((32, 32), float("nan")), "not finite"),
        (torch.eye(32) * torch.tensor(float("inf")), "not finite"),
        (torch.ones(32, 32) - 3 * torch.ones(32).diag() + torch.eye(32) * 2.5, "cannot be factored"),
    ],
)
def test_unusable_hessians_are_named(hessian, named):
    with pytest.raises(SetupError, match=named):
        factorize(hessian, Recipe(group_size=32), "layer")


@pytest.mark.parametrize(
    ("weight", "named"),
    [
        (torch.zeros(32, 40), "does not support"),
        (torch.zeros(30, 64), "does not support"),
        (torch.full((32, 64), float("nan")), "not finite"),
    ],
)
def test_unusable_weights_are_named(weight, named):
    recipe = Recipe(group_size=32)
    size = weight.shape[1]
    with pytest.raises(FormatError, match=named):
        solve(
            weight,
            factorize(torch.eye(size), recipe, "x"),
            recipe.weight_format([weight.shape]),
            recipe,
            "layer",
        )
