"""AWQ: input channels with large activations are scaled up before rounding.

The module that produces the channels is scaled down to compensate. Lin et al. 2024, arXiv 2306.00978, section
3.2.

The scale of a channel is the mean magnitude of its activations to the power of an exponent in [0, 1). The
exponent comes from a grid of 20 and has the least squared output error over all layers that share the input.
Then each range of weights is narrowed if that lowers the error (AutoAWQ's `_search_best_clip`).

AutoAWQ runs the layers for each point of the grid. The squared error over all tokens is tr(D H D^T), with D
the error of the weights and H the second moments of the input. One run is therefore enough here. Layers are
quantized last to first: a layer whose rows absorb the scale of a later layer is rounded after it.
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
    """Second moments of a layer's input, and each channel's sum of magnitudes, float64 [in]."""

    magnitudes: torch.Tensor | float = 0.0

    def add(self, inputs: torch.Tensor) -> None:
        """Adds activations [..., in]."""
        super().add(inputs)
        self.magnitudes = self.magnitudes + inputs.abs().flatten(0, -2).sum(0, dtype=torch.float64)


class AwqQuantizer(DecoderLayerQuantizer):
    """Quantizes the linear layers of one decoder layer by AWQ."""

    def run(
        self, batches: Sequence[torch.Tensor], calls: Sequence[Call]
    ) -> tuple[dict[str, dict[str, torch.Tensor]], list[LayerReport]]:
        """Runs `DecoderLayerQuantizer.run`, and stores scaled norms and biases in `changed`."""
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
        """Returns the layers grouped by input, in execution order of the first layer of each group."""
        groups: Stage = []
        for group in [group for stage in self._stages(hidden, call) for group in stage]:
            if not any(group[0] in other for other in groups):
                groups.append(seen.readers(group[0]) or group)
        return groups

    def _solve_group(self, group: list[str], moments: Moments) -> None:
        if not isinstance(moments, InputMoments) or not isinstance(self.format, Awq):
            raise TypeError(type(self.format).__name__)
        tokens = moments.tokens
        magnitudes = torch.as_tensor(moments.magnitudes).float() / max(moments.tokens, 1)
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
    """Rounds weights to a format's codes, optionally with narrowed ranges.

    Args:
        weight_format: AWQ format, with bits and group size.
    """

    def __init__(self, weight_format: Awq) -> None:
        self.format, self.top = weight_format, (1 << weight_format.num_bits) - 1

    def codes(
        self, weight: torch.Tensor, shares: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns codes [out, groups, span], scales, and zero points [out, groups].

        Args:
            weight: float32 [out, in].
            shares: float32 [out, groups], the fraction of each range that is kept. None keeps all.
        """
        grouped = self._grouped(weight)
        low, high = grouped.amin(2), grouped.amax(2)
        scales, zeros = self.format.scales_and_zeros(
            *((low, high) if shares is None else (low * shares, high * shares))
        )
        codes = (grouped / scales[:, :, None]).add_(zeros[:, :, None]).round_().clamp_(0, self.top)
        return codes, scales, zeros

    def rounded(self, weight: torch.Tensor, shares: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the weights that the codes represent, float32 [out, in]."""
        codes, scales, zeros = self.codes(weight, shares)
        return codes.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).flatten(1)

    def search_shares(self, weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
        """Returns the fraction of each range with the least squared output error, [out, groups].

        Each group is searched independently.

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
    """Returns the exponent with the least error, and its scale for the feeding module's outputs.

    Args:
        weights: float32 [out, in] of each layer with this input.
        hessian: float32 [in, in], the second moments of the input.
        magnitudes: float32 [in], the mean magnitude of each channel.
        fold: Module that feeds the layers.
        rounding: Rounding of the layers.
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
    """Returns tr(D H D^T), the squared error summed over outputs, for weight errors D [out, in]."""
    return sum(float((rows @ hessian).mul_(rows).sum(dtype=torch.float64)) for rows in wrong.split(_ROWS))
