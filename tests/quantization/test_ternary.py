"""Tests of GPTQ with three values per row."""

import pytest
import torch

from hfq import SetupError
from hfq.formats.qmoe import Qmoe
from hfq.quantization.gptq import factorize
from hfq.quantization.ternary import solve_ternary
from hfq.recipes.recipe import Recipe

ROWS, COLUMNS = 48, 75
RECIPE = Recipe("qmoe-gptq")


@pytest.fixture(scope="module")
def layer():
    """Returns a weight, and the second moments of correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(COLUMNS, COLUMNS, generator=generator) * torch.rand(COLUMNS, generator=generator) * 2
    inputs = torch.randn(1000, COLUMNS, generator=generator) @ mixed
    return torch.randn(ROWS, COLUMNS, generator=generator), inputs.t() @ inputs / len(inputs)


def solved(layer):
    factor = factorize(layer[1].clone(), RECIPE, "layer")
    found = solve_ternary(layer[0], factor, RECIPE)
    values = torch.stack((torch.zeros(ROWS), found.zeros[0], found.scales[0]), 1)
    return found, factor, values.gather(1, found.codes.t().long())


def cost(layer, quantized, damping=0.0):
    """Returns the mean squared error of the outputs."""
    error, hessian = (layer[0] - quantized).double(), layer[1].double()
    hessian = hessian + torch.eye(COLUMNS) * damping * hessian.diagonal().mean()
    return float((error @ hessian * error).sum() / ROWS)


def plain(layer, order, damping):
    """Algorithm 1 of GPTQ in float64, column by column, with the nearest of three values."""
    weight, hessian = layer[0].double()[:, order], layer[1].double()
    hessian = hessian + torch.eye(COLUMNS) * damping * hessian.diagonal().mean()
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian[order][:, order]), upper=True)
    low, high = (bound(layer[0], 1)[0].bfloat16() for bound in (torch.min, torch.max))
    values = torch.stack((low, torch.zeros_like(low), high), 1).double()
    quantized = torch.empty_like(weight)
    for column in range(COLUMNS):
        nearest = (weight[:, column, None] - values).abs().argmin(1, keepdim=True)
        quantized[:, column] = values.gather(1, nearest)[:, 0]
        error = (weight[:, column] - quantized[:, column]) / upper[column, column]
        weight[:, column:] -= error[:, None] * upper[column, column:]
    return quantized[:, order.argsort()]


def test_it_is_the_paper_s_algorithm_with_three_values(layer):
    found, factor, quantized = solved(layer)
    assert torch.equal(factor.order.flip(0), layer[1].diagonal().argsort(descending=True))
    expected = plain(layer, factor.order.flip(0), RECIPE.damp_percent)
    assert (quantized == expected).float().mean() > 0.98  # float32 against float64
    assert found.loss == pytest.approx(cost(layer, quantized, factor.damping), rel=1e-3)


def test_it_costs_less_than_rounding(layer):
    weight_format = Qmoe().sized(COLUMNS, ROWS)
    rounded = weight_format.dequantize(weight_format.quantize(layer[0]))
    assert cost(layer, solved(layer)[2]) < 0.6 * cost(layer, rounded)


def test_without_correlations_it_is_rounding(layer):
    found = solve_ternary(layer[0], factorize(torch.eye(COLUMNS), RECIPE, "layer"), RECIPE)
    packed = Qmoe().pack(found.codes.t(), torch.stack((found.zeros[0], found.scales[0]), 1))
    expected = Qmoe().quantize(layer[0])
    assert packed.keys() == expected.keys()
    assert all(torch.equal(packed[local], tensor) for local, tensor in expected.items())


def test_a_weight_that_is_not_finite_is_refused(layer):
    factor = factorize(layer[1].clone(), RECIPE, "layer")
    with pytest.raises(SetupError, match="not finite"):
        solve_ternary(torch.full((ROWS, COLUMNS), float("nan")), factor, RECIPE, "layer")
