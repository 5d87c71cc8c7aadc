"""GPTQ: codes chosen one input channel after the other, each error made good by the channels that are still
floats.

Frantar et al. 2023, arXiv 2210.17323; Chee et al. 2023, arXiv 2307.13304 (theorem 6) show that it is the same
as feedback through an LDL factorization of the Hessian, and that is the form here: with H = L L^T over the
channels in reverse order and F = L / diag(L), channel k is rounded at w_k + sum over channels j done before
of (w_j - q_j) F_jk. One Cholesky factorization is all that is needed, where the usual form inverts H and
factors the inverse. The sums are matrix products over halves of halves of the channels, so that almost all of
the work is in large products.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from hfq.errors import FormatError, SetupError
from hfq.formats.gptq import Gptq
from hfq.quantization.malloc_trim import trim_heap
from hfq.quantization.triangular_matrix import TriangularMatrix
from hfq.recipes.recipe import Recipe

__all__ = ["Factor", "Solved", "check_moments", "factorize", "solve"]

logger = logging.getLogger(__name__)

_LEAF = 16
_PART_NBYTES = 8 << 20
_CHECKED_ROWS = 256
_CLIP_STEPS = 20
_NARROWEST = 0.4
_MOST_DAMPING = 1.0


@dataclass(frozen=True)
class Factor:
    """The factored Hessian of one input; layers that share the input share it.

    Attributes:
        feedback: float32 [in, in], lower triangular with ones on the diagonal, over the channels in the
            reverse of their order; what lies above the diagonal is not looked at.
        variances: float32 [in], the squared diagonal of L: what an error of 1 in a channel costs once the
            later ones have made good.
        order: int64 [in]: the channels in the reverse of the order they are quantized in.
        damping: The share of the mean diagonal that was added to it.
    """

    feedback: TriangularMatrix | torch.Tensor
    variances: torch.Tensor
    order: torch.Tensor
    damping: float


@dataclass(frozen=True)
class Solved:
    """A quantized layer.

    Attributes:
        codes: uint8 [in, out].
        scales: float32 [groups, out], values that F16 holds.
        zeros: float32 [groups, out].
        g_idx: int64 [in], the group of each channel.
        loss: The mean squared error of the layer's outputs on the calibration set (of the damped Hessian).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    g_idx: torch.Tensor
    loss: float


def check_moments(name: str, mean: float, is_finite: bool) -> None:
    """Refuses second moments of an input that say nothing of it.

    Args:
        name: The layer's name.
        mean: The mean of their diagonal.
        is_finite: Whether all are finite.

    Raises:
        SetupError: Names the layer.
    """
    if not is_finite:
        raise SetupError(
            "The activations that reach a layer are not finite; it cannot be quantized.",
            tensor=name,
            expected="finite activations",
            found=f"a Hessian whose diagonal has a mean of {mean}",
            fix="check the model on this calibration text; run it in float32",
        )
    if mean <= 0:
        raise SetupError(
            "No token of the calibration set reached a layer, or all its activations are zero.",
            tensor=name,
            expected="activations other than zero",
            found="none",
            fix="use more, or other, calibration text",
        )


def factorize(hessian: TriangularMatrix | torch.Tensor, recipe: Recipe, name: str) -> Factor:
    """Orders the channels and factors their damped Hessian; where that fails the damping grows.

    Args:
        hessian: float32 [in, in], the mean over tokens of x x^T; used up.
        recipe: How the channels are ordered, and the damping to begin with.
        name: The layer's name, for messages.

    Raises:
        SetupError: No token reached the layer, a value is not finite, or no damping up to the diagonal's mean
            itself helps.
    """
    matrix = TriangularMatrix.of(hessian)
    diagonal = matrix.diagonal()
    mean = float(diagonal.mean())
    check_moments(name, mean, bool(torch.isfinite(diagonal).all()) and matrix.is_finite())
    order = _order(diagonal, recipe).flip(0)
    damping, added = recipe.damp_percent, 0.0
    matrix = matrix.permute(order)
    while damping <= _MOST_DAMPING:
        matrix.add_to_diagonal(damping * mean - added)
        added = damping * mean
        if matrix.factor():
            roots = matrix.diagonal()
            return Factor(matrix.divide(roots), roots.square(), order, damping)
        logger.warning(
            "%s: its Hessian is not positive definite with damping %g; trying %g.", name, damping, 2 * damping
        )
        damping *= 2
    raise SetupError(
        "The Hessian of a layer cannot be factored.",
        tensor=name,
        expected=f"a positive definite one with damping {_MOST_DAMPING:g}",
        found=f"a mean diagonal of {mean:g}",
        fix="use more calibration text, or a larger damp_percent",
    )


def solve(
    weight: torch.Tensor, factor: Factor, weight_format: Gptq, recipe: Recipe, name: str = ""
) -> Solved:
    """Quantizes one layer.

    Args:
        weight: float [out, in].
        factor: The factored Hessian of its input.
        weight_format: The dialect: bits, groups, symmetry.
        recipe: The method's options.
        name: The layer's name, for messages.

    Raises:
        FormatError: Groups do not divide the input, or the weight is not finite or out of the range of the
            dialect's scales.
    """
    _check(weight, weight_format, name)
    out_features, in_features = weight.shape
    span = in_features if weight_format.group_size == -1 else weight_format.group_size
    codes = torch.empty(in_features, out_features, dtype=torch.uint8)
    scales, zeros = torch.full((2, in_features // span, out_features), torch.nan)
    loss, rows = (
        0.0,
        max(_PART_NBYTES // (4 * in_features), in_features // 16) // 32 * 32,
    )  # an eighth of the factor
    rows = -(-out_features // -(-out_features // max(rows, 32)) // 32) * 32
    for start in range(0, out_features, rows):  # outputs know nothing of each other
        part = slice(start, start + rows)
        solver = _Solver(
            weight[part].detach(),
            factor,
            weight_format,
            recipe,
            codes[:, part],
            scales[:, part],
            zeros[:, part],
        )
        loss += float(solver.run().double().sum())
        g_idx = solver.g_idx
        del solver  # before the next part is taken
        trim_heap()
    return Solved(codes, scales, zeros, g_idx, loss / out_features)


class _Solver:
    """The state of one solve. `rows` holds, channel by channel in reverse order, the float to be rounded,
    then the error made.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        factor: Factor,
        weight_format: Gptq,
        recipe: Recipe,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
    ) -> None:
        self.format = weight_format
        self.recipe = recipe
        self.factor = factor
        self.feedback = TriangularMatrix.of(factor.feedback)
        out_features, self.size = weight.shape
        self.span = self.size if weight_format.group_size == -1 else weight_format.group_size
        self.top = (1 << weight_format.num_bits) - 1
        self.weight = weight.t()[factor.order]
        self.rows = self.weight.to(torch.float32, copy=True)
        self.codes = codes
        self.scales = scales
        self.zeros = zeros
        self.g_idx = torch.empty(self.size, dtype=torch.int64)
        self.loss = torch.zeros(out_features)

    def run(self) -> torch.Tensor:
        """Fills codes, scales and zeros; the loss of each output [out]."""
        if self.recipe.static_groups:
            places = torch.empty_like(self.factor.order)
            places[self.factor.order] = torch.arange(self.size)
            for group in range(len(self.scales)):
                channels = places[group * self.span : (group + 1) * self.span]
                self._fit(group, self.weight[channels].float(), self.factor.variances[channels])
        self._halve(0, self.size)
        return self.loss

    def _halve(self, start: int, stop: int) -> None:
        """Quantizes channels [start, stop) from the last to the first, whose floats hold the errors of all
        after them.
        """
        size, unit = stop - start, _LEAF if self.recipe.static_groups else self.span
        if size <= unit:
            (self._leaf if self.recipe.static_groups else self._group)(start, stop)
            return
        middle = start + max(size // 2 // unit, 1) * unit
        self._halve(middle, stop)
        self._make_good(start, middle, stop)
        self._halve(start, middle)

    def _make_good(self, start: int, middle: int, stop: int) -> None:
        for first, last, feedback in self.feedback.pieces(middle, stop):
            self.rows[start:middle].addmm_(feedback[:, start:middle].t(), self.rows[first:last])

    def _group(self, start: int, stop: int) -> None:
        """Fits the scales of one group to what its weights would be if they stayed floats, and quantizes
        it.
        """
        original = self.weight[start:stop].float()
        group = (
            (self.size - stop) // self.span
            if self.recipe.desc_act
            else int(self.factor.order[start]) // self.span
        )
        if stop < self.size:
            upper = self.feedback.corner(start, stop).t()
            shift = torch.linalg.solve_triangular(
                upper, self.rows[start:stop] - original, upper=True, unitriangular=True
            )
            original = shift.add_(original)
        self._fit(group, original, self.factor.variances[start:stop])
        self._quarter(start, stop)

    def _quarter(self, start: int, stop: int) -> None:
        """As `_halve`, within a group."""
        if stop - start <= _LEAF:
            self._leaf(start, stop)
            return
        middle = start + -(-(stop - start) // 2 // _LEAF) * _LEAF
        self._quarter(middle, stop)
        self._make_good(start, middle, stop)
        self._quarter(start, middle)

    def _leaf(self, start: int, stop: int) -> None:
        """Quantizes some channels, one after the other."""
        channels, groups = self.factor.order[start:stop], self._groups(start, stop)
        original = self.weight[start:stop].float()
        rows = self.rows[start:stop]
        feedback = self.feedback.corner(start, stop)
        codes, errors = torch.empty_like(rows), torch.empty_like(rows)
        each = zip(
            range(stop - start),
            rows.unbind(),
            original.unbind(),
            codes.unbind(),
            errors.unbind(),
            self.scales[groups].unbind(),
            self.zeros[groups].unbind(),
            feedback.unbind(),
            strict=True,
        )
        for row, value, floats, code, error, scale, zero, shares in reversed(list(each)):
            torch.addcdiv(zero, value, scale, out=code).round_().clamp_(0, self.top)
            torch.sub(code, zero, out=error).mul_(scale)
            torch.sub(floats, error, out=error)
            if row:
                rows[:row].addr_(shares[:row], error)
        self.codes[channels] = codes.to(torch.uint8)
        self.g_idx[channels] = groups
        residuals = rows.sub_(original).add_(errors)
        self.loss += residuals.square_().mul_(self.factor.variances[start:stop, None]).sum(0)
        rows.copy_(errors)

    def _groups(self, start: int, stop: int) -> torch.Tensor:
        """int64, the groups of channels."""
        if self.recipe.desc_act and not self.recipe.static_groups:
            return (self.size - 1 - torch.arange(start, stop)) // self.span
        return self.factor.order[start:stop] // self.span

    def _fit(self, group: int, weights: torch.Tensor, importance: torch.Tensor) -> None:
        """Settles the scales and zero points of one group [span, out]."""
        low, high = weights.amin(0), weights.amax(0)
        scales, zeros = self.format.scales_and_zeros(low, high)
        if self.recipe.narrows:
            scales, zeros = self._narrowed(weights, importance[:, None], low, high, scales, zeros)
        self.scales[group], self.zeros[group] = scales, zeros

    def _narrowed(
        self,
        weights: torch.Tensor,
        importance: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of ranges that are narrower by steps, the one of the least squared error for each output."""
        best = self._error(weights, importance, scales, zeros)
        for step in range(1, _CLIP_STEPS):
            share = 1 - step * (1 - _NARROWEST) / (_CLIP_STEPS - 1)
            tried, offsets = self.format.scales_and_zeros(low * share, high * share)
            error = self._error(weights, importance, tried, offsets)
            is_better = error < best
            best = torch.where(is_better, error, best)
            scales, zeros = torch.where(is_better, tried, scales), torch.where(is_better, offsets, zeros)
        return scales, zeros

    def _error(
        self, weights: torch.Tensor, importance: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> torch.Tensor:
        codes = torch.addcdiv(zeros, weights, scales).round_().clamp_(0, self.top)
        return codes.sub_(zeros).mul_(scales).sub_(weights).square_().mul_(importance).sum(0)


def _order(diagonal: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The channels in the order in which they are quantized."""
    if recipe.desc_act:
        return diagonal.argsort(descending=True, stable=True)
    span = recipe.group_size if recipe.group_size != -1 else len(diagonal)
    if not recipe.act_group_aware or len(diagonal) % span:
        return torch.arange(len(diagonal))
    groups = diagonal.view(-1, span)
    within = groups.argsort(dim=1, descending=True, stable=True) + torch.arange(len(groups))[:, None] * span
    return within[groups.mean(1).argsort(descending=True, stable=True)].flatten()


def _check(weight: torch.Tensor, weight_format: Gptq, name: str) -> None:
    out_features, in_features = weight.shape
    span = in_features if weight_format.group_size == -1 else weight_format.group_size
    bits = weight_format.num_bits
    if in_features % 32 or out_features % 32 or in_features % span:
        raise FormatError(
            f"GPTQ with {bits} bits in groups of {weight_format.group_size} cannot hold a layer of this "
            f"size.",
            tensor=name,
            found=f"[{out_features}, {in_features}]",
            expected="sizes divisible by 32, and an input divisible by the group size",
            fix="choose another group size, or leave this layer dense (modules_to_not_convert)",
        )
    if not all(torch.isfinite(part).all() for part in weight.split(_CHECKED_ROWS)):
        raise FormatError(
            "A weight is not finite; the layer cannot be quantized.",
            tensor=name,
            expected="finite weights",
            found=f"{int((~torch.isfinite(weight)).sum())} that are not",
            fix="download the checkpoint again",
        )
