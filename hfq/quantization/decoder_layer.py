"""Quantization of one decoder layer, linear layer by linear layer in execution order.

Each linear layer is measured with all earlier ones already quantized.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from hfq.errors import SetupError
from hfq.formats import Format
from hfq.formats.codecs.thread_buffers import release_buffers
from hfq.formats.gptq import Gptq
from hfq.formats.layouts.rounding import check_finite_weight, round_weight
from hfq.formats.qmoe import Qmoe
from hfq.loading.matching.quantizable_layers import is_expert, size_of, without_number
from hfq.quantization.gptq import Factor, Solved, factorize, solve
from hfq.quantization.layer_inputs import Call, Moments, Stage, find_stages, measure
from hfq.quantization.malloc_trim import trim_heap
from hfq.quantization.progress import LayerReport
from hfq.quantization.temporary_forward import hold, tensors_of
from hfq.quantization.ternary import solve_ternary
from hfq.quantization.triangular_matrix import TriangularMatrix
from hfq.recipes.recipe import Recipe

__all__ = ["DecoderLayerQuantizer", "as_weight", "put_quantized", "put_weight"]

logger = logging.getLogger(__name__)

_MOMENTS_NBYTES = 512 << 20
"""Most bytes of moments gathered in one pass. A mixture with many experts needs several passes."""

_ROUNDED_NBYTES = 4 << 20
"""Most bytes of floats that are rounded to nearest in one step."""

_ROWS_MULTIPLE = 128
"""Rows of a weight that every format can quantize independently: an FP8 block has 128."""


class DecoderLayerQuantizer:
    """Quantizes the linear layers of one decoder layer in memory.

    Afterwards, each of them computes with its quantized weight.

    Args:
        decoder_layer: The decoder layer.
        linears: Linear layers to quantize, by name.
        weight_format: Format of the quantized layers.
        recipe: Method and options.
        read: Reads the stored weight of a layer on the meta device, given its name.
        dtype_of: Returns the stored dtype of a parameter, given its name within the decoder layer.

    Attributes:
        quantized: Tensors of each finished layer.
        changed: Other changed parameters in their stored dtypes, by name within the decoder layer.
    """

    def __init__(
        self,
        decoder_layer: nn.Module,
        linears: Mapping[str, nn.Module],
        weight_format: Format,
        recipe: Recipe,
        read: Callable[[str], torch.Tensor],
        dtype_of: Callable[[str], torch.dtype],
    ) -> None:
        self.decoder_layer = decoder_layer
        self.linears = dict(linears)
        self.format = weight_format
        self.recipe = recipe
        self.read = read
        self.dtype_of = dtype_of
        self.quantized: dict[str, dict[str, torch.Tensor]] = {}
        self.changed: dict[str, torch.Tensor] = {}
        self.reports: list[LayerReport] = []

    def run(
        self, batches: Sequence[torch.Tensor], calls: Sequence[Call]
    ) -> tuple[dict[str, dict[str, torch.Tensor]], list[LayerReport]]:
        """Quantizes all linear layers.

        Args:
            batches: Hidden states that enter the decoder layer, [batch, length, hidden]. Empty for methods
                that need none.
            calls: Other arguments of the decoder layer, for each batch.

        Returns:
            The quantized tensors of each layer, and a report on each.

        Raises:
            SetupError: No calibration token reached a layer other than an expert, or its inputs are not
                finite.
            FormatError: A weight cannot be quantized.
        """
        if not self.recipe.measures:
            for name in self.linears:
                self._round(name, None)
            return self.quantized, self.reports
        for stage in self._stages(batches[0], calls[0]):
            self._quantize_stage(stage, batches, calls)
        self._check_reached()
        return self.quantized, self.reports

    def _stages(self, hidden: torch.Tensor, call: Call) -> Iterator[Stage]:
        """Yields the stages, each split into parts whose moments fit in memory.

        Experts that the first batch does not reach join the stage of the experts that it reaches.
        """
        stages = find_stages(self.decoder_layer, self.linears, hidden, call, without_number)
        found = {name for stage in stages for group in stage for name in group}
        for stage in stages:
            patterns = [[without_number(name) for name in group] for group in stage]
            for name in [name for name in self.linears if name not in found and is_expert(name)]:
                like = next((pattern for pattern in patterns if pattern[0] == without_number(name)), None)
                if like is not None:
                    number = name[len(like[0].partition("*")[0]) :].partition(".")[0]
                    stage.append([local.replace("*", number) for local in like])
            yield from self._parts(stage)

    def _parts(self, groups: Stage) -> Iterator[Stage]:
        """Splits groups into parts whose moments fit in memory."""
        part: Stage = []
        nbytes = 0
        for group in groups:
            size = TriangularMatrix.nbytes_of(size_of(self.linears[group[0]])[1])
            if part and nbytes + size > _MOMENTS_NBYTES:
                yield part
                part, nbytes = [], 0
            part.append(group)
            nbytes += size
        yield part

    def _quantize_stage(self, stage: Stage, batches: Sequence[torch.Tensor], calls: Sequence[Call]) -> None:
        first = {group[0]: self.linears[group[0]] for group in stage}
        trim_heap()
        moments: dict[str, Moments] = measure(
            self.decoder_layer, first, batches, calls, is_last_known=not any(map(is_expert, first))
        )
        for group in stage:
            self._quantize_group(group, moments.pop(group[0]))

    def _quantize_group(self, group: list[str], moments: Moments) -> None:
        if not moments.tokens and is_expert(group[0]):
            for name in group:
                logger.warning(
                    "%s: no calibration token reached this expert. It is rounded to nearest.", name
                )
                self._round(name, 0)
            return
        in_features = moments.hessian.size
        if is_expert(group[0]) and moments.tokens < in_features:
            logger.warning(
                "%s: %d calibration tokens reached this expert, fewer than its %d inputs.",
                group[0],
                moments.tokens,
                in_features,
            )
        self._solve_group(group, moments)

    def _solve_group(self, group: list[str], moments: Moments) -> None:
        """Quantizes layers that share one input, which tokens reached."""
        tokens = moments.tokens
        release_buffers()  # of finished forward passes
        trim_heap()
        factor = factorize(moments.mean(), self.recipe, group[0])
        damping = factor.damping
        trim_heap()
        for name in group:
            solved = self._solve(name, factor)
            if name == group[-1]:
                del factor
            trim_heap()
            quantized = _packed(self.format, solved)
            report = LayerReport(name, self.recipe.method, tokens, solved.loss, damping)
            del solved
            self._keep(name, quantized, report)

    def _solve(self, name: str, factor: Factor) -> Solved:
        if isinstance(self.format, Qmoe):
            return solve_ternary(self._weight(name), factor, self.recipe, name)
        return solve(self._weight(name), factor, _as_gptq(self.format), self.recipe, name)

    def _round(self, name: str, tokens: int | None) -> None:
        method = "rtn" if self.recipe.measures else self.recipe.method
        quantized, error = self._rounded(name, self._weight(name))
        self._keep(name, quantized, LayerReport(name, method, tokens, error if tokens is None else None))

    def _rounded(self, name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], float]:
        """Returns the quantized tensors of a weight [out, in], and the mean squared error."""
        check_finite_weight(name, weight)
        out_features, in_features = weight.shape
        reader = reader_format(self.format)
        rows = max(_ROUNDED_NBYTES // (4 * in_features) // _ROWS_MULTIPLE, 1) * _ROWS_MULTIPLE
        if not self.format.has_fixed_size:  # then parts do not join
            rows, reader = out_features, self.format.sized(in_features, out_features)
        parts, error = [], 0.0
        for part in weight.split(rows):
            floats = part.to(torch.float32)
            parts.append(round_weight(name, floats, self.format))
            error += float(reader.dequantize(parts[-1]).sub_(floats).double().square_().sum())
        specs = {spec.name: spec.shape for spec in self.format.tensor_specs(in_features, out_features)}
        quantized = {local: _joined([part[local] for part in parts], specs[local]) for local in parts[0]}
        if "weight_shape" in quantized:  # parts hold their own shapes
            quantized["weight_shape"] = torch.tensor(weight.shape, dtype=quantized["weight_shape"].dtype)
        return quantized, error / weight.numel()

    def _keep(self, name: str, quantized: dict[str, torch.Tensor], report: LayerReport) -> None:
        self.quantized[name] = quantized
        self.reports.append(report)
        if self.recipe.needs_calibration:
            put_quantized(self.linears[name], self.format, self.recipe, quantized)
        trim_heap()

    def _weight(self, name: str) -> torch.Tensor:
        """Returns the weight [out, in] from memory or from the checkpoint."""
        layer = self.linears[name]
        held = tensors_of(layer)
        if held is not None:
            return held["weight"]
        parameter: torch.Tensor = layer._parameters["weight"]  # type: ignore[assignment]
        weight = self.read(name) if parameter.is_meta else parameter.detach()
        return weight if isinstance(layer, nn.Linear) else weight.t()

    def _check_reached(self) -> None:
        missing = [name for name in self.linears if name not in self.quantized]
        if missing:
            raise SetupError(
                "No calibration token reached a layer, so the layer cannot be quantized.",
                tensor=missing[0],
                expected="layers that run",
                found=f"{len(missing)} layers that do not run: {', '.join(missing[:4])}",
                fix="Add these layers to modules_to_not_convert.",
            )


def reader_format(weight_format: Format, is_scattered: bool = False) -> Format:
    """Returns the format as detected in the finished checkpoint, where act_order is known."""
    if isinstance(weight_format, Gptq):
        return dataclasses.replace(weight_format, act_order=is_scattered)
    return weight_format


def as_weight(weight_format: Format, recipe: Recipe, quantized: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the float32 weight [out, in] that a reader of the checkpoint computes with."""
    return reader_format(weight_format, recipe.scatters_groups).dequantize(quantized)


def put_quantized(
    layer: nn.Module, weight_format: Format, recipe: Recipe, quantized: Mapping[str, torch.Tensor]
) -> None:
    """Makes a layer compute with quantized tensors.

    A layer under a temporary forward computes with the tensors directly. Any other layer gets their weight in
    float32.
    """
    if not weight_format.has_fixed_size:
        out_features, in_features = size_of(layer)
        weight_format = weight_format.sized(in_features, out_features)
    if tensors_of(layer) is None:
        put_weight(layer, as_weight(weight_format, recipe, quantized))
    else:
        hold(layer, quantized, reader_format(weight_format, recipe.scatters_groups))


def put_weight(layer: nn.Module, weight: torch.Tensor) -> None:
    """Sets the weight [out, in] of a linear layer or a Conv1D."""
    value = weight if isinstance(layer, nn.Linear) else weight.t().contiguous()
    layer._parameters["weight"] = nn.Parameter(value, requires_grad=False)


def _joined(parts: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Concatenates parts of a tensor along the dimension in which they differ from `shape`.

    Returns the first part if there is no such dimension.
    """
    divided = [
        dim for dim, (size, found) in enumerate(zip(shape, parts[0].shape, strict=True)) if size != found
    ]
    return torch.cat(parts, divided[0]) if divided else parts[0]


def _packed(weight_format: Format, solved: Solved) -> dict[str, torch.Tensor]:
    """Returns the stored tensors of a solved layer."""
    if isinstance(weight_format, Qmoe):
        bounds = torch.stack((solved.zeros[0], solved.scales[0]), 1)
        return weight_format.pack(solved.codes.t(), bounds)
    return _as_gptq(weight_format).pack(solved.codes, solved.scales, solved.zeros, solved.g_idx)


def _as_gptq(weight_format: Format) -> Gptq:
    if not isinstance(weight_format, Gptq):
        raise SetupError(
            f"GPTQ cannot be written as {weight_format.describe()}.",
            expected="GPTQ",
            found=weight_format.name,
            fix="Use a recipe whose format is GPTQ.",
        )
    return weight_format
