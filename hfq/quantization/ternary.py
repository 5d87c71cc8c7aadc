"""GPTQ with three values per row: 0, the row's minimum, and its maximum.

Frantar and Alistarh 2023, arXiv 2310.16795. The values are those of rounding to nearest. The codes differ:
later channels correct the error of each, see `hfq.quantization.gptq`.
"""

from __future__ import annotations

import torch

from hfq.formats.layouts.rounding import check_finite_weight
from hfq.formats.qmoe import nearest_symbols, row_bounds
from hfq.quantization.gptq import Factor, Solved, Solver, solve_parts
from hfq.recipes.recipe import Recipe

__all__ = ["solve_ternary"]


def solve_ternary(weight: torch.Tensor, factor: Factor, recipe: Recipe, name: str = "") -> Solved:
    """Quantizes one layer.

    Args:
        weight: float [out, in].
        factor: Factored Hessian of the layer's input.
        recipe: Options of the method.
        name: Name of the layer, for messages.

    Returns:
        The symbols as codes, the maximum of each row as its scale, and the minimum as its zero point.

    Raises:
        SetupError: The weight is not finite.
    """
    check_finite_weight(name, weight)
    return solve_parts(_TernarySolver, weight, factor, recipe, weight.shape[1])


class _TernarySolver(Solver):
    """Rounding to the nearest of three values."""

    def fit(self, group: int, weights: torch.Tensor, importance: torch.Tensor) -> None:
        self.zeros[group], self.scales[group] = row_bounds(weights.t()).to(torch.float32).unbind(1)

    def round(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        code: torch.Tensor,
        rounded: torch.Tensor,
    ) -> None:
        code.copy_(nearest_symbols(values, zero, scale))
        torch.where(code == 2, scale, torch.where(code == 1, zero, 0), out=rounded)
