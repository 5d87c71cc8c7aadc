"""Distillation of quantized decoder layers against the float model.

Adam lowers the squared error of a decoder layer's outputs against the float model's hidden states. It trains
the scales, norms, and biases; the codes stay fixed. Yao et al. 2022, arXiv 2206.01861, distill layer by
layer. Chen et al. 2024, arXiv 2407.11062, train only scales with fixed codes.

The float model runs in step with the quantized model, so each layer also corrects errors of the layers before
it. The format and dtypes do not change. Values are rounded to the stored dtypes before the final error is
measured. If the error did not fall, the decoder layer keeps its earlier values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from hfq.formats import Format
from hfq.quantization.decoder_layer import as_weight, put_weight
from hfq.quantization.folding import put
from hfq.quantization.layer_inputs import Call, forward_decoder_layer, run_decoder_layer
from hfq.recipes.recipe import Recipe

__all__ = ["Distillation", "Teacher"]

_RATE = 5e-3
"""Initial learning rate of Adam, as a fraction of each value."""
_NARROWEST = 0.25
"""Least value of a trained scale, as a fraction of its initial value."""


class Teacher:
    """Hidden states of the float model, advanced one decoder layer at a time.

    Args:
        hidden: Inputs of the first decoder layer.
    """

    def __init__(self, hidden: Sequence[torch.Tensor]) -> None:
        self.hidden = list(hidden)

    def advance(self, decoder_layer: nn.Module, calls: Sequence[Call]) -> list[torch.Tensor]:
        """Runs the next decoder layer, which holds its float weights, and returns its outputs."""
        for index, call in enumerate(calls):
            self.hidden[index] = run_decoder_layer(decoder_layer, self.hidden[index], call)
        return self.hidden


class Distillation:
    """Trains the scales, norms, and biases of one quantized decoder layer.

    Args:
        decoder_layer: The decoder layer. Its linear layers hold their quantized weights.
        linears: Quantized linear layers by name.
        quantized: Tensors of each quantized layer.
        changed: Other parameters that quantization changed, by name within the decoder layer.
        weight_format: Format of the quantized layers.
        recipe: Method and number of steps.
        dtype_of: Returns the stored dtype of a parameter, given its name within the decoder layer.
    """

    def __init__(
        self,
        decoder_layer: nn.Module,
        linears: Mapping[str, nn.Module],
        quantized: dict[str, dict[str, torch.Tensor]],
        changed: dict[str, torch.Tensor],
        weight_format: Format,
        recipe: Recipe,
        dtype_of: Callable[[str], torch.dtype],
    ) -> None:
        self.decoder_layer = decoder_layer
        self.quantized = quantized
        self.changed = changed
        self.recipe = recipe
        self.dtype_of = dtype_of
        self.format = weight_format
        self.layers = [_Layer(linears[name], quantized[name], weight_format, recipe) for name in quantized]
        self.dense = {
            name: _Dense(decoder_layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, parameter in decoder_layer.named_parameters()
            if parameter.dim() == 1
        }

    def run(
        self, batches: Sequence[torch.Tensor], calls: Sequence[Call], targets: Sequence[torch.Tensor]
    ) -> tuple[float, float]:
        """Trains, rounds to the stored dtypes, and keeps the result if the error fell.

        Args:
            batches: Hidden states that enter the quantized decoder layer, [batch, length, hidden].
            calls: Other arguments of the decoder layer, for each batch.
            targets: Outputs of the float decoder layer, for each batch.

        Returns:
            Mean squared error of the decoder layer's outputs, before and after.
        """
        before = self._error(batches, calls, targets)
        if before == 0:
            return before, before
        values = [*(layer.ratio for layer in self.layers), *(dense.shift for dense in self.dense.values())]
        optimizer = torch.optim.Adam(values, lr=_RATE, eps=1e-12)
        for step in range(self.recipe.distill_steps):
            optimizer.param_groups[0]["lr"] = (
                _RATE * (1 + math.cos(math.pi * step / self.recipe.distill_steps)) / 2
            )
            index = step % len(batches)
            self._put(rounded=False)
            loss = (
                _squared(
                    forward_decoder_layer(self.decoder_layer, batches[index], calls[index]), targets[index]
                )
                / before
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self._put(rounded=True)
        after = self._error(batches, calls, targets)
        if not after < before:  # also true for NaN
            self._put_back()
            return before, before
        for name, layer in zip(self.quantized, self.layers, strict=True):
            self.quantized[name]["scales"] = layer.rounded()
        self.changed.update({name: dense.rounded(self.dtype_of(name)) for name, dense in self.dense.items()})
        return before, after

    def _put(self, rounded: bool) -> None:
        with torch.set_grad_enabled(not rounded):
            for layer in self.layers:
                layer.put(rounded)
            for name, dense in self.dense.items():
                dense.put(self.dtype_of(name) if rounded else None)

    def _put_back(self) -> None:
        for name, layer in zip(self.quantized, self.layers, strict=True):
            put_weight(layer.layer, as_weight(self.format, self.recipe, self.quantized[name]))
        for dense in self.dense.values():
            put(dense.module, dense.local, dense.start)

    def _error(
        self, batches: Sequence[torch.Tensor], calls: Sequence[Call], targets: Sequence[torch.Tensor]
    ) -> float:
        total = 0.0
        for hidden, call, target in zip(batches, calls, targets, strict=True):
            total += float(_squared(run_decoder_layer(self.decoder_layer, hidden, call), target)) * len(
                hidden
            )
        return total / sum(map(len, batches))


class _Layer:
    """Quantized layer with fixed codes and zero points, and a trained ratio for each scale."""

    def __init__(
        self, layer: nn.Module, quantized: Mapping[str, torch.Tensor], weight_format: Format, recipe: Recipe
    ) -> None:
        self.layer, self.scales = layer, quantized["scales"]
        self.centred = as_weight(weight_format, recipe, {**quantized, "scales": torch.ones_like(self.scales)})
        in_features = self.centred.shape[1]
        g_idx = quantized.get("g_idx")
        if g_idx is not None and g_idx.numel() == in_features:
            self.group = g_idx.long()
        else:
            self.group = torch.arange(in_features) // (in_features // len(self.scales))
        self.ratio = nn.Parameter(torch.ones_like(self.scales, dtype=torch.float32))

    def put(self, rounded: bool) -> None:
        """Sets the layer's weight from the rounded scales or from the trained scales."""
        scales = self.rounded().float() if rounded else self.scales.float() * self.ratio.clamp(min=_NARROWEST)
        weight = self.centred * scales.t().index_select(1, self.group)
        self.layer._parameters["weight"] = weight if isinstance(self.layer, nn.Linear) else weight.t()  # type: ignore[assignment]

    def rounded(self) -> torch.Tensor:
        """Returns the scales in their stored dtype."""
        return (self.scales.float() * self.ratio.detach().clamp(min=_NARROWEST)).to(self.scales.dtype)


class _Dense:
    """Weight of a norm, or a bias, trained in units of its mean magnitude."""

    def __init__(self, module: nn.Module, local: str) -> None:
        self.module, self.local = module, local
        self.start: torch.Tensor = module._parameters[local].detach()  # type: ignore[union-attr]
        self.unit = float(self.start.abs().mean())
        self.shift = nn.Parameter(torch.zeros_like(self.start))

    def put(self, dtype: torch.dtype | None) -> None:
        """Sets the module's value, rounded to `dtype`, or as trained if `dtype` is None."""
        value = self.start + self.unit * self.shift if dtype is None else self.rounded(dtype).float()
        self.module._parameters[self.local] = value  # type: ignore[assignment]

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the value in its stored dtype."""
        return (self.start + self.unit * self.shift.detach()).to(dtype)


def _squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()
