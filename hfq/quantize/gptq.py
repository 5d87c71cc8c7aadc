"""GPTQ: codes chosen one input channel after the other, each error made good by the channels that are still floats.

Frantar et al. 2023, arXiv 2210.17323; Chee et al. 2023, arXiv 2307.13304 (theorem 6) show that it is the same as feedback through
an LDL factorization of the Hessian, and that is the form here: with H = L L^T over the channels in reverse order and
F = L / diag(L), channel k is rounded at w_k + sum over channels j done before of (w_j - q_j) F_jk. One Cholesky factorization is all
that is needed, where the usual form inverts H and factors the inverse. The sums are matrix products over halves of halves of
the channels, so that almost all of the work is in large products.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from hfq.errors import FormatError, SetupError
from hfq.formats.gptq import Gptq
from hfq.formats.recipe import Recipe

__all__ = ["Factor", "Solved", "factorize", "solve"]

logger = logging.getLogger(__name__)

_LEAF = 16
_CLIP_STEPS = 20
_NARROWEST = 0.4
_MOST_DAMPING = 1.0


@dataclass(frozen=True)
class Factor:
    """The factored Hessian of one input; layers that share the input share it.

    Attributes:
        feedback: float32 [in, in], lower triangular with ones on the diagonal, over the channels in the reverse of their order.
        variances: float32 [in], the squared diagonal of L: what an error of 1 in a channel costs once the later ones have made good.
        order: int64 [in]: the channels in the reverse of the order they are quantized in.
        damping: The share of the mean diagonal that was added to it.
    """

    feedback: torch.Tensor
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


def factorize(hessian: torch.Tensor, recipe: Recipe, name: str) -> Factor:
    """Orders the channels and factors their damped Hessian; where that fails the damping grows.

    Args:
        hessian: float32 [in, in], the mean over tokens of x x^T; overwritten.
        recipe: How the channels are ordered, and the damping to begin with.
        name: The layer's name, for messages.

    Raises:
        SetupError: No token reached the layer, a value is not finite, or no damping up to the diagonal's mean itself helps.
    """
    diagonal = hessian.diagonal().clone()
    mean = float(diagonal.mean())
    if not torch.isfinite(diagonal).all() or not torch.isfinite(hessian.sum()):
        raise SetupError(
            "The activations that reach a layer are not finite; it cannot be quantized.", tensor=name, expected="finite activations",
            found=f"a Hessian whose diagonal has a mean of {mean}", fix="check the model on this calibration text; run it in float32",
        )  # fmt: skip
    if mean <= 0:
        raise SetupError(
            "No token of the calibration set reached a layer, or all its activations are zero.", tensor=name,
            expected="activations other than zero", found="none", fix="use more, or other, calibration text",
        )  # fmt: skip
    order = _order(diagonal, recipe).flip(0)
    damping, added = recipe.damping, 0.0
    while damping <= _MOST_DAMPING:
        hessian.diagonal().add_(damping * mean - added)
        added = damping * mean
        factor = hessian[
            order[:, None], order
        ].mT  # symmetric: the transpose is in LAPACK's own layout, and is factored in place
        info = torch.linalg.cholesky_ex(factor, out=(factor, torch.empty((), dtype=torch.int32))).info
        if not info and torch.isfinite(factor.diagonal()).all():
            variances = factor.diagonal().square()
            return Factor(factor.div_(factor.diagonal().clone()), variances, order, damping)
        del factor
        logger.warning("%s: its Hessian is not positive definite with damping %g; trying %g.", name, damping, 2 * damping)
        damping *= 2
    raise SetupError(
        "The Hessian of a layer cannot be factored.", tensor=name, expected=f"a positive definite one with damping {_MOST_DAMPING:g}",
        found=f"a mean diagonal of {mean:g}", fix="use more calibration text, or a larger damping",
    )  # fmt: skip


def solve(weight: torch.Tensor, factor: Factor, weight_format: Gptq, recipe: Recipe, name: str = "") -> Solved:
    """Quantizes one layer.

    Args:
        weight: float [out, in].
        factor: The factored Hessian of its input.
        weight_format: The dialect: bits, groups, symmetry.
        recipe: The method's options.
        name: The layer's name, for messages.

    Raises:
        FormatError: Groups do not divide the input, or the weight is not finite or out of the range of the dialect's scales.
    """
    _check(weight, weight_format, name)
    return _Solver(weight, factor, weight_format, recipe).run()


class _Solver:
    """The state of one solve. `rows` holds, channel by channel in reverse order, the float to be rounded, then the error made."""

    def __init__(self, weight: torch.Tensor, factor: Factor, weight_format: Gptq, recipe: Recipe) -> None:
        self.format, self.recipe, self.factor = weight_format, recipe, factor
        self.weight = weight.detach()
        out_features, self.size = weight.shape
        self.span = self.size if weight_format.group_size == -1 else weight_format.group_size
        self.top = (1 << weight_format.num_bits) - 1
        self.rows = self.weight.t()[factor.order].to(torch.float32).contiguous()
        self.codes = torch.empty(self.size, out_features, dtype=torch.uint8)
        self.scales, self.zeros = torch.full((2, self.size // self.span, out_features), torch.nan)
        self.g_idx = torch.empty(self.size, dtype=torch.int64)
        self.loss = torch.zeros(out_features)

    def run(self) -> Solved:
        if self.recipe.static_groups:
            importance = self._importance()
            for group in range(len(self.scales)):
                channels = slice(group * self.span, (group + 1) * self.span)
                self._fit(group, self.weight[:, channels].t().float(), importance[channels])
        self._halve(0, self.size)
        codes = torch.empty_like(self.codes)
        codes[self.factor.order] = self.codes
        loss = float(self.loss.double().mean())
        return Solved(codes, self.scales, self.zeros, self.g_idx, loss)

    def _importance(self) -> torch.Tensor:
        """The variances in the order of the file."""
        importance = torch.empty_like(self.factor.variances)
        importance[self.factor.order] = self.factor.variances
        return importance

    def _halve(self, start: int, stop: int) -> None:
        """Quantizes channels [start, stop) from the last to the first, whose floats hold the errors of all after them."""
        size, unit = stop - start, _LEAF if self.recipe.static_groups else self.span
        if size <= unit:
            (self._leaf if self.recipe.static_groups else self._group)(start, stop)
            return
        middle = start + max(size // 2 // unit, 1) * unit
        self._halve(middle, stop)
        self._make_good(start, middle, stop)
        self._halve(start, middle)

    def _make_good(self, start: int, middle: int, stop: int) -> None:
        feedback = self.factor.feedback[middle:stop, start:middle]
        self.rows[start:middle].addmm_(feedback.t(), self.rows[middle:stop])

    def _group(self, start: int, stop: int) -> None:
        """Fits the scales of one group to what its weights would be if they stayed floats, and quantizes it."""
        order = self.factor.order[start:stop]
        original = self.weight[:, order].t().float()
        group = (self.size - stop) // self.span if self.recipe.act_order else int(order[0]) // self.span
        if stop < self.size:
            upper = self.factor.feedback[start:stop, start:stop].t()
            shift = torch.linalg.solve_triangular(upper, self.rows[start:stop] - original, upper=True, unitriangular=True)
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
        size, order = self.size, self.factor.order[start:stop]
        original, channels = self.weight[:, order].t().float(), order.tolist()
        residuals = torch.empty_like(original)
        for row in range(stop - 1, start - 1, -1):
            channel = channels[row - start]
            is_scattered = self.recipe.act_order and not self.recipe.static_groups
            group = (size - 1 - row) // self.span if is_scattered else channel // self.span
            self.g_idx[channel] = group
            value, scale, zero = self.rows[row], self.scales[group], self.zeros[group]
            code = torch.addcdiv(zero, value, scale).round_().clamp_(0, self.top)
            self.codes[row] = code
            rounded = code.sub_(zero).mul_(scale)
            torch.sub(value, rounded, out=residuals[row - start])
            torch.sub(original[row - start], rounded, out=value)
            if row > start:
                self.rows[start:row].addr_(self.factor.feedback[row, start:row], value)
        self.loss += residuals.square_().mul_(self.factor.variances[start:stop, None]).sum(0)

    def _fit(self, group: int, weights: torch.Tensor, importance: torch.Tensor) -> None:
        """Settles the scales and zero points of one group [span, out]."""
        low, high = weights.amin(0), weights.amax(0)
        scales, zeros = self.format.scales_and_zeros(low, high)
        if self.recipe.narrows:
            scales, zeros = self._narrowed(weights, importance[:, None], low, high, scales, zeros)
        self.scales[group], self.zeros[group] = scales, zeros

    def _narrowed(self, weights, importance, low, high, scales, zeros) -> tuple[torch.Tensor, torch.Tensor]:
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

    def _error(self, weights, importance, scales, zeros) -> torch.Tensor:
        codes = torch.addcdiv(zeros, weights, scales).round_().clamp_(0, self.top)
        return codes.sub_(zeros).mul_(scales).sub_(weights).square_().mul_(importance).sum(0)


def _order(diagonal: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The channels in the order in which they are quantized."""
    if recipe.act_order:
        return diagonal.argsort(descending=True, stable=True)
    span = recipe.group_size if recipe.group_size != -1 else len(diagonal)
    if not recipe.group_order or len(diagonal) % span:
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
            f"GPTQ with {bits} bits in groups of {weight_format.group_size} cannot hold a layer of this size.", tensor=name,
            found=f"[{out_features}, {in_features}]", expected="sizes divisible by 32, and an input divisible by the group size",
            fix="choose another group size, or leave this layer dense (modules_to_not_convert)",
        )  # fmt: skip
    if not torch.isfinite(weight).all():
        raise FormatError(
            "A weight is not finite; the layer cannot be quantized.", tensor=name, expected="finite weights",
            found=f"{int((~torch.isfinite(weight)).sum())} that are not", fix="download the checkpoint again",
        )  # fmt: skip
