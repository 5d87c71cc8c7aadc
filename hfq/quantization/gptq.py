"""GPTQ: rounding one input channel at a time, with later channels correcting each error.

Frantar et al. 2023, arXiv 2210.17323. Chee et al. 2023, arXiv 2307.13304 (theorem 6), show that GPTQ equals
feedback through an LDL factorization of the Hessian. This module uses that form.

Let H = L L^T over the channels in reverse order, and F = L / diag(L). Channel k is rounded at w_k + the sum
of (w_j - q_j) F_jk over all channels j quantized before it. This needs one Cholesky factorization. The usual
form inverts H and factors the inverse. The sums are matrix products over recursively halved ranges of
channels, so large products do almost all of the work.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hfq.errors import FormatError, SetupError
from hfq.formats.gptq import Gptq
from hfq.quantization.malloc_trim import trim_heap
from hfq.quantization.triangular_matrix import TriangularMatrix
from hfq.recipes.recipe import Recipe

__all__ = ["Factor", "Solved", "Solver", "check_moments", "factorize", "solve", "solve_parts"]

logger = logging.getLogger(__name__)

_LEAF = 16
_PART_NBYTES = 8 << 20
_CHECKED_ROWS = 256
_CLIP_STEPS = 20
_NARROWEST = 0.4
_MOST_DAMPING = 1.0


@dataclass(frozen=True)
class Factor:
    """Factored Hessian of one input, used by all layers with that input.

    Attributes:
        feedback: float32 [in, in], lower triangular with ones on the diagonal, over the channels in reverse
            order. Elements above the diagonal are not read.
        variances: float32 [in], the squared diagonal of L. This is the cost of an error of 1 in a channel
            after later channels have corrected it.
        order: int64 [in], the channels in reverse order of quantization.
        damping: Fraction of the mean diagonal that was added to the diagonal.
    """

    feedback: TriangularMatrix | torch.Tensor
    variances: torch.Tensor
    order: torch.Tensor
    damping: float


@dataclass(frozen=True)
class Solved:
    """Quantized weight of one layer, before bit packing.

    Attributes:
        codes: uint8 [in, out].
        scales: float32 [groups, out]. Every value is exact in float16.
        zeros: float32 [groups, out].
        g_idx: int64 [in], the group of each channel.
        loss: Mean squared error of the layer's outputs on the calibration data, computed with the damped
            Hessian.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    g_idx: torch.Tensor
    loss: float


def check_moments(name: str, mean: float, is_finite: bool) -> None:
    """Raises an error if the second moments of an input are not usable.

    Args:
        name: Name of the layer.
        mean: Mean of the diagonal of the moments.
        is_finite: True if all moments are finite.

    Raises:
        SetupError: The moments are not finite or all zero.
    """
    if not is_finite:
        raise SetupError(
            "The inputs of a layer are not finite, so the layer cannot be quantized.",
            tensor=name,
            expected="finite activations",
            found=f"a Hessian whose diagonal has a mean of {mean}",
            fix="Check that the model's outputs for this calibration data are finite in float32.",
        )
    if mean <= 0:
        raise SetupError(
            "No calibration token reached a layer, or all its inputs are zero.",
            tensor=name,
            expected="nonzero activations",
            found="none",
            fix="Pass more or different calibration data.",
        )


def factorize(hessian: TriangularMatrix | torch.Tensor, recipe: Recipe, name: str) -> Factor:
    """Orders the channels and factors their damped Hessian.

    The damping doubles until the factorization succeeds.

    Args:
        hessian: float32 [in, in], the mean over tokens of x x^T. Its memory is reused.
        recipe: Order of the channels and initial damping.
        name: Name of the layer, for messages.

    Raises:
        SetupError: No token reached the layer, a value is not finite, or no damping up to the mean of the
            diagonal is enough.
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
            "%s: the Hessian is not positive definite with damping %g. Trying %g.", name, damping, 2 * damping
        )
        damping *= 2
    raise SetupError(
        "The Hessian of a layer cannot be factored.",
        tensor=name,
        expected=f"a positive definite Hessian with damping {_MOST_DAMPING:g}",
        found=f"a mean diagonal of {mean:g}",
        fix="Pass more calibration data, or a larger damp_percent.",
    )


def solve(
    weight: torch.Tensor, factor: Factor, weight_format: Gptq, recipe: Recipe, name: str = ""
) -> Solved:
    """Quantizes one layer.

    Args:
        weight: float [out, in].
        factor: Factored Hessian of the layer's input.
        weight_format: Format variant, with bits, group size, and symmetry.
        recipe: Options of the method.
        name: Name of the layer, for messages.

    Raises:
        FormatError: The group size does not divide the input, or the weight is not finite or exceeds the
            range of the format's scales.
    """
    _check(weight, weight_format, name)
    span = weight.shape[1] if weight_format.group_size == -1 else weight_format.group_size
    make = functools.partial(_AffineSolver, weight_format)
    return solve_parts(make, weight, factor, recipe, span)


def solve_parts(
    make: Callable[..., Solver], weight: torch.Tensor, factor: Factor, recipe: Recipe, span: int
) -> Solved:
    """Quantizes some outputs after others, to bound memory.

    Args:
        make: Returns a `Solver` for the class's arguments.
        weight: float [out, in].
        factor: Factored Hessian of the layer's input.
        recipe: Options of the method.
        span: Channels of a group.
    """
    out_features, in_features = weight.shape
    codes = torch.empty(in_features, out_features, dtype=torch.uint8)
    scales, zeros = torch.full((2, in_features // span, out_features), torch.nan)
    loss = 0.0
    # an eighth of the factor's memory
    rows = max(_PART_NBYTES // (4 * in_features), in_features // 16) // 32 * 32
    rows = -(-out_features // -(-out_features // max(rows, 32)) // 32) * 32
    for start in range(0, out_features, rows):  # outputs are independent
        part = slice(start, start + rows)
        found = codes[:, part], scales[:, part], zeros[:, part]
        solver = make(weight[part].detach(), factor, recipe, span, *found)
        loss += float(solver.run().double().sum())
        g_idx = solver.g_idx
        del solver  # frees its memory before the next part
        trim_heap()
    return Solved(codes, scales, zeros, g_idx, loss / out_features)


class Solver(ABC):
    """State of one solve.

    `rows` holds one channel per row, in reverse order. A row holds the float to round, and after rounding its
    error. A subclass fits the scales and zero points of a group, and rounds a channel.

    Args:
        weight: float [out, in].
        factor: Factored Hessian of the layer's input.
        recipe: Options of the method.
        span: Channels of a group.
        codes: See `Solved`; written.
        scales: See `Solved`; written.
        zeros: See `Solved`; written.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        factor: Factor,
        recipe: Recipe,
        span: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
    ) -> None:
        self.recipe = recipe
        self.factor = factor
        self.feedback = TriangularMatrix.of(factor.feedback)
        out_features, self.size = weight.shape
        self.span = span
        self.weight = weight.t()[factor.order]
        self.rows = self.weight.to(torch.float32, copy=True)
        self.codes = codes
        self.scales = scales
        self.zeros = zeros
        self.g_idx = torch.empty(self.size, dtype=torch.int64)
        self.loss = torch.zeros(out_features)

    @abstractmethod
    def fit(self, group: int, weights: torch.Tensor, importance: torch.Tensor) -> None:
        """Sets the scales and zero points of one group [span, out]."""

    @abstractmethod
    def round(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        code: torch.Tensor,
        rounded: torch.Tensor,
    ) -> None:
        """Writes the codes of one channel [out], and the values that they stand for."""

    def run(self) -> torch.Tensor:
        """Fills codes, scales, and zeros. Returns the loss of each output [out]."""
        if self.recipe.static_groups:
            places = torch.empty_like(self.factor.order)
            places[self.factor.order] = torch.arange(self.size)
            for group in range(len(self.scales)):
                channels = places[group * self.span : (group + 1) * self.span]
                self.fit(group, self.weight[channels].float(), self.factor.variances[channels])
        self._halve(0, self.size)
        return self.loss

    def _halve(self, start: int, stop: int) -> None:
        """Quantizes channels [start, stop), last first.

        Their floats already contain the corrections of all later channels.
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
        """Fits the scales of one group, and quantizes the group.

        The scales fit the values that the weights would have if the whole group stayed unquantized.
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
        self.fit(group, original, self.factor.variances[start:stop])
        self._quarter(start, stop)

    def _quarter(self, start: int, stop: int) -> None:
        """Does the same as `_halve` within a group."""
        if stop - start <= _LEAF:
            self._leaf(start, stop)
            return
        middle = start + -(-(stop - start) // 2 // _LEAF) * _LEAF
        self._quarter(middle, stop)
        self._make_good(start, middle, stop)
        self._quarter(start, middle)

    def _leaf(self, start: int, stop: int) -> None:
        """Quantizes a few channels, one at a time."""
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
            self.round(value, scale, zero, code, error)
            torch.sub(floats, error, out=error)
            if row:
                rows[:row].addr_(shares[:row], error)
        self.codes[channels] = codes.to(torch.uint8)
        self.g_idx[channels] = groups
        residuals = rows.sub_(original).add_(errors)
        self.loss += residuals.square_().mul_(self.factor.variances[start:stop, None]).sum(0)
        rows.copy_(errors)

    def _groups(self, start: int, stop: int) -> torch.Tensor:
        """Returns the group of each channel, int64."""
        if self.recipe.desc_act and not self.recipe.static_groups:
            return (self.size - 1 - torch.arange(start, stop)) // self.span
        return self.factor.order[start:stop] // self.span


class _AffineSolver(Solver):
    """Rounding to the codes of GPTQ's format."""

    def __init__(self, weight_format: Gptq, *args: Any) -> None:
        super().__init__(*args)
        self.format = weight_format
        self.top = (1 << weight_format.num_bits) - 1

    def fit(self, group: int, weights: torch.Tensor, importance: torch.Tensor) -> None:
        """Sets the scales and zero points of one group [span, out]."""
        low, high = weights.amin(0), weights.amax(0)
        scales, zeros = self.format.scales_and_zeros(low, high)
        if self.recipe.narrows:
            scales, zeros = self._narrowed(weights, importance[:, None], low, high, scales, zeros)
        self.scales[group], self.zeros[group] = scales, zeros

    def round(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        code: torch.Tensor,
        rounded: torch.Tensor,
    ) -> None:
        torch.addcdiv(zero, values, scale, out=code).round_().clamp_(0, self.top)
        torch.sub(code, zero, out=rounded).mul_(scale)

    def _narrowed(
        self,
        weights: torch.Tensor,
        importance: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scales and zero points of the narrowed range with the least error per output."""
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
    """Returns the channels in order of quantization."""
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
            f"GPTQ with {bits} bits in groups of {weight_format.group_size} does not support a layer of this "
            f"size.",
            tensor=name,
            found=f"[{out_features}, {in_features}]",
            expected="sizes divisible by 32, and an input size divisible by the group size",
            fix="Choose another group size, or add this layer to modules_to_not_convert.",
        )
    if not all(torch.isfinite(part).all() for part in weight.split(_CHECKED_ROWS)):
        raise FormatError(
            "A weight contains values that are not finite, so the layer cannot be quantized.",
            tensor=name,
            expected="finite weights",
            found=f"{int((~torch.isfinite(weight)).sum())} values that are not finite",
            fix="Download the checkpoint again.",
        )
