"""AWQ: input channels that carry large activations are scaled up before rounding, and what feeds them is
scaled down.

Lin et al. 2024, arXiv 2306.00978, section 3.2. A channel's scale is its activations' mean magnitude to the
power of an exponent in [0, 1), the one of a grid of 20 with the least squared error of the outputs of all
layers that share the input; then each range of weights is narrowed where that lowers the error (AutoAWQ's
`_search_best_clip`). AutoAWQ runs the layers for each point of the grid. The squared error over all tokens is
tr(D H D^T), with D the error of the weights and H the second moments of the input, so one run is enough here.
Layers are taken from the last to the first: one whose rows take the scale of a later one is rounded after
that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hfq.formats.awq import Awq
from hfq.formats.layouts.rounding import check_finite_weight
from hfq.loading.matching.quantizable_layers import is_expert
from hfq.quantization.decoder_layer import DecoderLayerQuantizer
from hfq.quantization.folding import Fold, Trace, find_fold, trace
from hfq.quantization.gptq import check_moments
from hfq.quantization.layer_inputs import Call, Moments, Stage, measure
from hfq.quantization.progress import LayerReport

__all__ = ["AwqQuantizer", "InputMoments", "Rounding", "search_scale"]

_EXPONENTS = 20
_CLIP_STEPS = 20
_NARROWEST = 0.5
_ROWS = 1024


@dataclass
class InputMoments(Moments):
    """The second moments of what reached a layer, and the sum of each channel's magnitudes, float64 [in]."""

    magnitudes: torch.Tensor | float = 0.0

    def add(self, inputs: torch.Tensor) -> None:
        """Adds activations [..., in]."""
        super().add(inputs)
        self.magnitudes = self.magnitudes + inputs.abs().flatten(0, -2).sum(0, dtype=torch.float64)


class AwqQuantizer(DecoderLayerQuantizer):
    """Quantizes the layers of one block by AWQ."""

    def run(
        self, batches: Sequence[torch.Tensor], calls: Sequence[Call]
    ) -> tuple[dict[str, dict[str, torch.Tensor]], list[LayerReport]]:
        """As `DecoderLayerQuantizer.run`; the norms and biases that took a scale are in `changed`."""
        seen, known = trace(self.decoder_layer, self.linears, batches[0], calls[0]), dict[str, Fold | None]()
        groups = self._groups(seen, batches[0], calls[0])
        self.folds = {
            group[0]: find_fold(self.decoder_layer, self.linears, group, seen, batches[0], calls[0], known)
            for group in groups
        }
        del seen
        for part in self._parts(groups[::-1]):
            first = {group[0]: self.linears[group[0]] for group in part}
            is_last_known = not any(map(is_expert, first))
            moments = measure(self.decoder_layer, first, batches, calls, is_last_known, InputMoments)
            for group in part:
                self._quantize_group(group, moments.pop(group[0]))
        self._check_reached()
        return {name: self.quantized[name] for name in self.linears}, self.reports

    def _groups(self, seen: Trace, hidden: torch.Tensor, call: Call) -> Stage:
        """The layers by input, in the order in which the first of each runs."""
        groups: Stage = []
        for group in [group for stage in self._stages(hidden, call) for group in stage]:
            if not any(group[0] in other for other in groups):
                groups.append(seen.readers(group[0]) or group)
        return groups

    def _solve_group(self, group: list[str], moments: Moments) -> None:
        if not isinstance(moments, InputMoments) or not isinstance(self.format, Awq):
            raise TypeError(type(self.format).__name__)
        tokens, magnitudes = (
            moments.tokens,
            torch.as_tensor(moments.magnitudes).float() / max(moments.tokens, 1),
        )
        hessian = moments.mean().whole()
        check_moments(group[0], float(hessian.diagonal().mean()), bool(torch.isfinite(hessian.sum())))
        weights = [self._weight(name) for name in group]
        for name, weight in zip(group, weights, strict=True):
            check_finite_weight(name, weight)
        rounding = Rounding(self.format)
        fold, exponent = self.folds.get(group[0]), None
        if fold is not None:
            exponent, scale = search_scale(weights, hessian, magnitudes, fold, rounding)
            if exponent:
                given, changed = fold.give(scale, self.dtype_of)
                self.changed.update(changed)
                weights = [weight * given for weight in weights]
                hessian.div_(given).div_(given[:, None])
        for name, weight in zip(group, weights, strict=True):
            shares = rounding.search_shares(weight, hessian) if self.recipe.narrows else None
            codes, scales, zeros = rounding.codes(weight, shares)
            quantized = self.format.pack(codes.flatten(1), scales, zeros)
            loss = _error(self.format.dequantize(quantized) - weight, hessian) / len(weight)
            self._keep(name, quantized, LayerReport(name, "awq", tokens, loss, exponent=exponent))


class Rounding:
    """Rounds weights to a format's codes, with ranges that may be narrowed.

    Args:
        weight_format: AWQ's, which says bits and groups.
    """

    def __init__(self, weight_format: Awq) -> None:
        self.format, self.top = weight_format, (1 << weight_format.num_bits) - 1

    def codes(
        self, weight: torch.Tensor, shares: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes [out, groups, span], scales and zero points [out, groups] of float32 weights [out, in].

        Args:
            weight: The weights.
            shares: float32 [out, groups], what of each range is kept; None for all.
        """
        grouped = self._grouped(weight)
        low, high = grouped.amin(2), grouped.amax(2)
        scales, zeros = self.format.scales_and_zeros(
            *((low, high) if shares is None else (low * shares, high * shares))
        )
        codes = (grouped / scales[:, :, None]).add_(zeros[:, :, None]).round_().clamp_(0, self.top)
        return codes, scales, zeros

    def rounded(self, weight: torch.Tensor, shares: torch.Tensor | None = None) -> torch.Tensor:
        """What the codes of weights mean: float32 [out, in]."""
        codes, scales, zeros = self.codes(weight, shares)
        return codes.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).flatten(1)

    def search_shares(self, weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
        """The share of each range [out, groups] with the least squared error of the outputs, each group by
        itself.

        Args:
            weight: float32 [out, in].
            hessian: float32 [in, in], the second moments of the input.
        """
        span = self._grouped(weight).shape[2]
        blocks = torch.stack(
            [hessian[start : start + span, start : start + span] for start in range(0, len(hessian), span)]
        )
        found = []
        for rows in weight.split(_ROWS):
            shares = torch.ones(len(rows), len(blocks))
            best = torch.full_like(shares, torch.inf)
            for step in range(int(_CLIP_STEPS * (1 - _NARROWEST))):
                tried = torch.full_like(shares, 1 - step / _CLIP_STEPS)
                wrong = self._grouped(self.rounded(rows, tried) - rows).transpose(0, 1)
                error = torch.bmm(wrong, blocks).mul_(wrong).sum(2).t()
                shares, best = torch.where(error < best, tried, shares), torch.minimum(error, best)
            found.append(shares)
        return torch.cat(found)

    def _grouped(self, weight: torch.Tensor) -> torch.Tensor:
        size = self.format.group_size
        return weight.unflatten(1, (-1, weight.shape[1] if size == -1 else size))


def search_scale(
    weights: Sequence[torch.Tensor],
    hessian: torch.Tensor,
    magnitudes: torch.Tensor,
    fold: Fold,
    rounding: Rounding,
) -> tuple[float, torch.Tensor]:
    """The exponent of the least error, and the scale that it means for the output channels of what feeds the
    layers.

    Args:
        weights: float32 [out, in] of each layer with this input.
        hessian: float32 [in, in], the second moments of the input.
        magnitudes: float32 [in], the mean magnitude of each channel.
        fold: What feeds the layers.
        rounding: How they will be rounded.
    """
    count = int(fold.channels.max()) + 1
    sums = torch.zeros(2, count).index_add_(
        1, fold.channels, torch.stack([magnitudes, torch.ones_like(magnitudes)])
    )
    fed = sums[1] > 0
    outputs = fold.out_features
    best, chosen = torch.inf, (0.0, torch.ones(outputs))
    for step in range(_EXPONENTS):
        powers = (sums[0, fed] / sums[1, fed]).pow(step / _EXPONENTS).clamp_(min=1e-4)
        scale = torch.ones(outputs)
        scale[:count][fed] = powers / (powers.max() * powers.min()).sqrt()
        inputs, error = scale[fold.channels], 0.0
        for weight in weights:
            for rows in weight.split(_ROWS):
                error += _error(rounding.rounded(rows * inputs).div_(inputs).sub_(rows), hessian)
        if error < best:
            best, chosen = error, (step / _EXPONENTS, scale)
    return chosen


def _error(wrong: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(D H D^T): the squared error of the outputs, summed over them, of weights that are wrong by D [out,
    in].
    """
    return sum(float((rows @ hessian).mul_(rows).sum(dtype=torch.float64)) for rows in wrong.split(_ROWS))
