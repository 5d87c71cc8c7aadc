"""Launches of the Triton kernels: blocks, splits of the sum, and buffers.

A product of few rows has two launches, one that prepares the activations and one that multiplies. If there
are few tiles of outputs, the input is split, and the last program of a tile adds the parts in one order. The
splits depend on the layer's sizes alone, so that results do not depend on the device or on tuning.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.kernels.cuda.layers import Layer, Layout, fast

__all__ = [
    "EXPANDED_NBYTES",
    "FEW_ROWS",
    "SOME_ROWS",
    "Launch",
    "Product",
    "device_code",
    "expand",
    "is_interpreted",
    "tensors_of",
    "triton_dtype",
]

FEW_ROWS = 4
"""The most activation rows that are multiplied without tensor cores."""

SOME_ROWS = 64
"""The most activation rows that are multiplied while decoding; more rows use `expand`."""

EXPANDED_NBYTES = 64 << 20
"""Bytes of a panel that `expand` writes. Not tuned."""

_PROGRAMS = 512
"""The number of programs that the splits of the sum aim at. Not tuned."""

_MOST_SPLITS = 16

_PREPARED_AT_ONCE = 256
"""Units that a program of `prepare` writes."""

_PLAIN = Layout("integers", 8)
"""The layout of activations in the order of the input."""

_EXPONENT = 64
"""Activations of `few` are multiplied by two to this power if the codec's values lack an exponent."""


Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of the tile of a program.

    Attributes:
        units: Units, or channels across words, of a step.
        outputs: Outputs of a tile, or words that hold codes of several outputs.
        warps: Warps of a program.
        stages: Stages of a pipelined loop.
    """

    units: int
    outputs: int
    warps: int = 4
    stages: int = 2


class Launch:
    """A kernel with its constants.

    After the first launch the compiled kernel is launched directly, without Triton's own search for it.
    """

    __slots__ = ("compiled", "constants", "kernel", "options")

    def __init__(self, kernel: Any, constants: tuple, blocks: Blocks) -> None:
        self.kernel, self.constants, self.compiled = kernel, constants, None
        self.options = {} if is_interpreted() else {"num_warps": blocks.warps, "num_stages": blocks.stages}

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        if self.compiled is None:
            self.compiled = self.kernel[grid](*arguments, *self.constants, **self.options)
        else:
            self.compiled[grid](*arguments, *self.constants)


Launched = tuple[Launch, Grid, tuple]
"""A kernel with its grid and its arguments."""


class Product:
    """The product of at most `size` rows of a dtype by a layer.

    Attributes:
        size: 1, 2, 4, 16, 32, or 64 rows.
        uses_dot: True if tensor cores multiply, by a weight rounded to the dtype of the activations.
        is_across: True if a word holds codes of several outputs.
        layer: The layer, loaded in whole words where its sizes allow.
        bias: The bias, or None.
        blocks: The sizes of tiles.
        splits: Parts of the sum.
        grid: Tiles, splits, and 1.
        multiply: The kernel that multiplies.
        sizes: The arguments of the kernel after the number of rows.

    Args:
        layer: The layer.
        dtype: The dtype of the activations.
        count: The most rows.
        bias: The bias, or None.
        is_split: False if one program computes each sum.
    """

    def __init__(
        self,
        layer: Layer,
        dtype: torch.dtype,
        count: int,
        bias: torch.Tensor | None,
        is_split: bool = True,
    ) -> None:
        self.uses_dot = count > FEW_ROWS
        self.size = next(size for size in (1, 2, 4, 16, 32, 64) if size >= count)
        self.bias = bias
        self.layer = layer = fast(layer) or layer
        layout = layer.layout
        self.is_across = layout.loading == "across"
        self._prepared_rows = min(self.size, 4)
        device = device_code()
        self._codec = device.CODECS[layout.codec]
        lacks_exponent = self._codec.exponent and not self.uses_dot
        self._dot = triton_dtype(torch.float32 if is_interpreted() or not self.uses_dot else dtype)
        self._values_dtype = torch.float32 if is_interpreted() or not self.uses_dot else dtype
        self._dtype = triton_dtype(dtype)
        self._rescale = 2.0 ** (self._codec.exponent - (_EXPONENT if lacks_exponent else 0))
        self.blocks = blocks = self._blocks()
        self._units = layer.in_features if self.is_across else layer.units
        self._positions = 1 if self.is_across else layout.positions
        outputs = layer.out_features // layout.positions if self.is_across else layer.out_features
        tiles = -(-outputs // blocks.outputs)
        self._step = blocks.units
        if self.is_across and not self.uses_dot:
            self._step = _common(layout.span, layer.in_features, 8 * blocks.units)
        steps = -(-self._units // self._step)
        splits = max(min(_PROGRAMS // max(tiles, 1), _MOST_SPLITS if is_split else 1, steps), 1)
        self._steps = -(-steps // splits)
        self.splits = -(-steps // self._steps)
        self.grid = (tiles, self.splits, 1)
        is_even = self._step * self._steps * self.splits == self._units and outputs % blocks.outputs == 0
        self.layer = dataclasses.replace(layer, layout=dataclasses.replace(layout, is_even=is_even))
        self.multiply = Launch(*self._kernel(blocks), blocks)
        self._has_sums = layout.zero != "none" and not self.uses_dot and not self.is_across
        prepared = layer if not self.is_across else dataclasses.replace(layer, layout=_PLAIN)
        self._prepare_constants = (
            prepared.layout,
            2.0**_EXPONENT if lacks_exponent else 1.0,
            layer.columns is not None,
            self._has_sums,
            self._dtype if self.uses_dot else triton_dtype(torch.float32),
            self._dot,
            self._prepared_rows,
            _PREPARED_AT_ONCE,
        )
        self._prepare: dict[bool, Launch] = {}
        self.sizes = self._sizes()
        self._tensors = tensors_of(layer)

    def __call__(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Multiplies rows [count, in_features], dense in a row, into out [count, out_features]."""
        for launch, grid, arguments in self.launches(rows, out):
            launch(grid, *arguments)

    def launches(self, rows: torch.Tensor, out: torch.Tensor) -> tuple[Launched, ...]:
        """Returns the kernels of a product in their order, with their grids and arguments."""
        layer, device, size = self.layer, rows.device, self.size
        prepare, inputs = self.prepared(rows, size)
        parts = counters = out  # read and written by split sums alone
        if self.splits > 1:
            numel = size * self.splits * layer.out_features
            parts = thread_buffer("triton parts", torch.float32, device, numel, is_whole=True)
            counters = thread_buffer(
                "triton counters", torch.int32, device, self.grid[0], is_zero=True, is_whole=True
            )
        bias = self.bias if self.bias is not None else inputs[0]
        multiplied = *inputs, *self._tensors, bias, out, parts, counters, rows.shape[0], *self.sizes
        return prepare, (self.multiply, self.grid, multiplied)

    def prepared(self, rows: torch.Tensor, size: int) -> tuple[Launched, tuple[torch.Tensor, ...]]:
        """Returns the launch that prepares rows, and what it writes for `size` rows."""
        layer, device = self.layer, rows.device
        programs = -(-size // self._prepared_rows)
        size = programs * self._prepared_rows
        numel = size * self._positions * self._units
        sums = values = thread_buffer("triton values", self._values_dtype, device, numel, is_whole=True)
        if self._has_sums:
            sums = thread_buffer("triton sums", torch.float32, device, size * self._units, is_whole=True)
        is_aligned = rows.data_ptr() % 16 == 0
        prepare = self._prepare.get(is_aligned)
        if prepare is None:
            prepare = Launch(device_code().prepare, self._prepare_constants, Blocks(_PREPARED_AT_ONCE, 1))
            self._prepare[is_aligned] = prepare
        columns = layer.columns if layer.columns is not None else values
        grid = (programs, -(-self._units // _PREPARED_AT_ONCE), 1)
        count, in_features = rows.shape
        arguments = rows, columns, values, sums, count, in_features, self._units, rows.stride(0)
        inputs = (values, sums) if not (self.is_across or self.uses_dot) else (values,)
        return (prepare, grid, arguments), inputs

    def _blocks(self) -> Blocks:
        """Returns the tile sizes; those of the input decide bits, and are not tuned."""
        layout = self.layer.layout
        if self.is_across:
            units = _common(layout.span, self.layer.in_features, 32)
            if self.uses_dot:
                return Blocks(units, max(64 // layout.positions, 16))
            return Blocks(32, 16 if self.size == 1 else 8, 8 if self.size == 4 else 4)
        if layout.block is not None:
            return Blocks(16, 64, stages=1) if self.uses_dot else Blocks(32, 16, 8 if self.size == 4 else 4)
        if layout.loading not in ("runs", "quads") or layout.positions < 4:
            return Blocks(64, 32)
        if self.uses_dot:  # a pipeline of loads from a table would take more shared memory than cards have
            return Blocks(32, 64, stages=1 if layout.codec == "table" else 2)
        is_single = self.size == 1 and layout.count == 1
        warps = 8 if self.size == 4 else 4
        if self.layer.code_word == 1:
            return Blocks(64, 32 if is_single else 16, warps)
        return Blocks(32, 64 if is_single else 32, warps)

    def _kernel(self, blocks: Blocks) -> tuple[Any, tuple]:
        """Returns the kernel and its constants."""
        device, layout, ends = device_code(), self.layer.layout, (self._steps, self.splits)
        has_bias, dtype, size = self.bias is not None, self._dtype, self.size
        if self.is_across:
            start = (layout, has_bias, dtype)
            if self.uses_dot:
                return device.some_across, (*start, self._dot, size, blocks.units, blocks.outputs, *ends)
            units = min(blocks.units, self._step)
            return device.few_across, (*start, size, units, blocks.outputs, self._step // units, *ends)
        common = (self._codec.decode, self._codec.invalid, layout, self._rescale, has_bias, dtype)
        if self.uses_dot:
            return device.some, (*common, self._dot, size, blocks.units, blocks.outputs, *ends)
        return device.few, (*common, size, blocks.units, blocks.outputs, *ends)

    def _sizes(self) -> tuple[int | float, ...]:
        """Returns the sizes and strides, and at the end the numbers that belong to one layer."""
        layer = self.layer
        sizes, codes = (layer.out_features, layer.in_features), (layer.code_word, layer.code_other)
        steps = (layer.scale_n, layer.scale_g, layer.zero_word, layer.zero_other, layer.factor)
        if self.is_across:
            return *sizes, *codes, *steps
        return *sizes, self._units, *codes, layer.slab, *steps, layer.nested_offset


def tensors_of(layer: Layer) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a layer in the order of a kernel's arguments."""
    others: tuple[torch.Tensor | None, ...] = ()
    if layer.layout.loading != "across":
        others = layer.index, layer.table, layer.nested, layer.nested_table
    spare = layer.scales
    return layer.codes, spare, *(_either(other, spare) for other in (layer.zeros, *others, layer.shared))


def expand(panel: torch.Tensor, layer: Layer, first: int) -> None:
    """Writes output rows of the weight, from `first` on, into a panel in its dtype."""
    device, layout, spare = device_code(), layer.layout, layer.scales
    codec = device.CODECS[layout.codec]
    others = (layer.index, layer.table, layer.nested, layer.nested_table, layer.shared, layer.columns)
    dot = panel.dtype if not is_interpreted() else torch.float32
    grid = (-(-panel.shape[1] // 128), -(-panel.shape[0] // 16), 1)
    device.expand[grid](
        panel,
        layer.codes,
        layer.scales,
        _either(layer.zeros, spare),
        *(_either(other, spare) for other in others),
        first,
        panel.shape[0],
        layer.in_features,
        layer.code_word,
        layer.code_other,
        layer.slab,
        layer.scale_n,
        layer.scale_g,
        layer.zero_word,
        layer.zero_other,
        layer.factor,
        layer.nested_offset,
        codec.decode,
        codec.invalid,
        layout,
        2.0**codec.exponent,
        layer.columns is not None,
        triton_dtype(panel.dtype),
        triton_dtype(dot),
        16,
        128,
    )


def _either(tensor: torch.Tensor | None, spare: torch.Tensor) -> torch.Tensor:
    """Returns a tensor, or one that a kernel receives and does not read."""
    return spare if tensor is None else tensor


def _common(span: int, in_features: int, most: int) -> int:
    """Returns the largest power of two, at most `most`, that divides each group."""
    size = 16
    while size * 2 <= most and (span % (size * 2) == 0 or span >= in_features):
        size *= 2
    return size


def device_code() -> Any:
    from hfq.kernels.cuda import device

    return device


@functools.cache
def triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


@functools.cache
def is_interpreted() -> bool:
    """Returns True if kernels run in Triton's interpreter; fixed when the kernels are defined."""
    return type(device_code().few).__name__ == "InterpretedFunction"
