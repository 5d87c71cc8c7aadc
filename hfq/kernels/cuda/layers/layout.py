"""Description of a quantized layer for the Triton kernels.

A `Layout` is what a kernel is compiled for. A `Layer` adds the tensors, their strides, and the sizes. A layer
is always described element by element: how code (n, k), its scale, and its zero point are found. `fast`
derives from it, where the sizes allow, how a kernel loads each word once and decodes all codes of the word.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["PLANES", "BlockPlaces", "Layer", "Layout", "Place", "fast"]

Loading = Literal["stream", "planes", "slabs", "quads", "blocks", "runs", "across"]
Scale = Literal["float", "power", "e4m3", "e5m3", "nested", "half_power", "six_bits", "bytes", "split_bits"]
Place = Literal["plain", "high_first", "awq"]

PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Widths of the bit planes of gptqmodel's planar layout, the lowest first; other bits have one plane."""


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_UNIT = 16
"""Codes of a unit of a block; no group is smaller."""


@dataclass(frozen=True)
class BlockPlaces:
    """Places of the parts of one of ggml's blocks.

    Attributes:
        size: Codes of a block.
        nbytes: Bytes of a block.
        codes: The first byte of the codes, or of their lower four bits.
        run: Bytes whose lower halves come before their upper ones; 0 if each code is a byte.
        high: The first byte of the bits above the lower four, in runs of 32 bytes.
        high_bits: Bits of a code there.
        scale: The first byte of the float16 scale.
        word: Bits that are loaded at once.
    """

    size: int
    nbytes: int
    codes: int
    run: int = 0
    high: int = 0
    high_bits: int = 0
    scale: int = 0
    word: int = 8


@dataclass(frozen=True)
class Layout:
    """The properties of a layer that kernels are compiled for.

    Attributes:
        codec: The name of the codec in `hfq.kernels.cuda.device.codecs`.
        bits: Bits of a code.
        word: Bits of an element of the tensor of codes.
        loading: How a kernel finds codes. `stream`: code i of a stream of words. `planes`: bit planes.
            `slabs`: the weight is cut into slabs, and a word holds one code of each. `quads`: AWQ's
            gemv_fast. `blocks`: ggml's. For kernels that load whole words: `runs`, `quads`, and `blocks`.
        along: The index that streams run along: `k`, `n`, or `flat` (n * in_features + k).
        place: The order of codes in a stream: `plain`; `high_first`, pairs of nibbles swapped; `awq`, the
            even columns of eight first.
        straddles: True if a code may be in two words.
        slabs: Number of slabs.
        count: Words of a unit, which is the least run of whole words that holds whole codes.
        positions: Codes of a unit.
        signed: True if codes are in two's complement.
        middle: The number that is subtracted from each code.
        grouping: The group of channel k: `span`, k // span; `index`, a stored index; `flat`, (n *
            in_features + k) // span; `columns`, (n * in_features + k) % span.
        span: Channels of a group.
        block_out: Output rows that share scales.
        offset: Output rows and channels of the first block that the layer lacks.
        scale: The stored scale: `float`, `power` (E8M0), `e4m3`, `e5m3`, or `nested` (codes of a table). In
            blocks: `float`, `half_power` (E8M0, halved), or a float times codes: `six_bits` (Q4_K and Q5_K),
            `bytes` (Q6_K), or `split_bits` (IQ4_XS).
        divides: True if codes are divided by scales.
        has_factor: True if scales are multiplied by the layer's factor.
        nested_size: Scales that share a nested scale.
        zero: The zero point: `none`, `packed` in words or blocks, or `stored` as a number.
        zero_bits: Bits of a packed zero point.
        zero_along: The index that packed zero points run along: `n` or `g`.
        zero_place: As `place`, or `planes`.
        zero_reading: As in `Gptq.zero_reading`.
        zero_middle: The number that is subtracted from each zero point.
        zero_sign: 0 if the zero point is subtracted from the code; 1 or -1 if it is a float that is added to,
            or subtracted from, the product of code and scale.
        is_even: True if tiles divide the layer, so that kernels need no masks.
        shared: The scale of the whole layer: `none`, `multiplies`, or `divides`.
        block: The places in a block, for `loading="blocks"`.
        rows: The order of stored rows: start, first, second, and inner of `StoredOrder`; None if it is that
            of the outputs.
    """

    codec: str
    bits: int
    word: int = 32
    loading: Loading = "stream"
    along: Literal["k", "n", "flat"] = "k"
    place: Place = "plain"
    straddles: bool = True
    slabs: int = 1
    count: int = 1
    positions: int = 1
    signed: bool = False
    middle: float = 0.0
    grouping: Literal["span", "index", "flat", "columns"] = "span"
    span: int = 1
    block_out: int = 1
    offset: tuple[int, int] = (0, 0)
    scale: Scale = "float"
    divides: bool = False
    has_factor: bool = False
    nested_size: int = 1
    zero: Literal["none", "packed", "stored"] = "none"
    zero_bits: int = 4
    zero_along: Literal["n", "g"] = "n"
    zero_place: Literal["plain", "awq", "planes"] = "plain"
    zero_reading: str = "stored"
    zero_middle: float = 0.0
    zero_sign: int = 0
    is_even: bool = False
    shared: Literal["none", "multiplies", "divides"] = "none"
    block: BlockPlaces | None = None
    rows: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer on a device. All strides are in elements.

    Attributes:
        layout: What kernels are compiled for.
        codes: The codes, as unsigned bytes or int32 words.
        scales: The scales; bytes for `power`, `e4m3`, `e5m3`, and `nested`.
        out_features: The number of outputs.
        in_features: The number of inputs.
        code_word: Stride of `codes` from a word to the next word of a stream.
        code_other: Stride of `codes` from a stream to the next one.
        slab: Elements of a slab.
        scale_n: Stride of `scales` from an output, or block of outputs, to the next one.
        scale_g: Stride of `scales` from a group to the next one.
        zeros: Zero points, if the layout has them.
        zero_word: Stride of `zeros` from a word, or value, to the next one along `zero_along`.
        zero_other: Stride of `zeros` along the other index.
        index: The group of each channel, for `grouping="index"`.
        table: float32 [16], the values of codes, for the codec `table`.
        nested: float32, the scales of nested scales.
        nested_table: float32 [256], the values of nested scales.
        nested_offset: The number that is added to each nested scale.
        shared: A number that multiplies or divides the whole layer.
        factor: A number that multiplies each scale, with `has_factor`.
        columns: A scale for each input channel; None if there are none.
    """

    layout: Layout
    codes: torch.Tensor
    scales: torch.Tensor
    out_features: int
    in_features: int
    code_word: int = 1
    code_other: int = 0
    slab: int = 1
    scale_n: int = 0
    scale_g: int = 0
    zeros: torch.Tensor | None = None
    zero_word: int = 1
    zero_other: int = 0
    index: torch.Tensor | None = None
    table: torch.Tensor | None = None
    nested: torch.Tensor | None = None
    nested_table: torch.Tensor | None = None
    nested_offset: float = 0.0
    shared: torch.Tensor | None = None
    factor: float = 1.0
    columns: torch.Tensor | None = None

    @property
    def units(self) -> int:
        """The number of units of a row."""
        return -(-self.in_features // self.layout.positions)


def fast(layer: Layer) -> Layer | None:
    """Returns the layer in units of whole words, or None if its sizes do not allow it.

    All codes of a unit must belong to one group, and rows must begin at whole words.
    """
    layout = layer.layout
    if layout.grouping != "span":
        return None
    if layout.block is not None:
        return _blocks(layer, layout.block)
    if layout.loading == "slabs" or layout.along == "n":
        return _across(layer)
    if layout.loading == "planes":
        made = layer, layout.bits, 32
    elif layout.loading == "quads":
        made = layer, 1, 8
    else:
        made = _runs(layer)
    layer, count, positions = made
    if layout.span % positions or layout.offset[1] % positions:
        return None
    loading: Loading = "quads" if layout.loading == "quads" else "runs"
    codec = "planes" if layout.loading == "planes" else layout.codec
    layout = dataclasses.replace(
        layer.layout, loading=loading, codec=codec, count=count, positions=positions, along="k"
    )
    return dataclasses.replace(layer, layout=layout)


def _blocks(layer: Layer, block: BlockPlaces) -> Layer:
    """Returns a layer of blocks in units, read in the widest words that its address allows."""
    first = layer.codes.data_ptr(), layer.codes.storage_offset()
    nbytes = math.gcd(block.nbytes, block.codes, block.high, *first, 4)
    layout = dataclasses.replace(
        layer.layout,
        bits=8,
        word=32,
        count=_UNIT // 4,
        positions=_UNIT,
        block=dataclasses.replace(block, word=8 * nbytes),
    )
    rows, halves = layer.codes.view(_WORDS[nbytes]), layer.codes.view(_WORDS[min(nbytes, 2)])
    return dataclasses.replace(
        layer,
        layout=layout,
        codes=rows,
        scales=halves,
        zeros=None if layer.zeros is None else halves,
        code_other=rows.shape[1],
        scale_n=halves.shape[1],
        zero_word=halves.shape[1],
    )


def _runs(layer: Layer) -> tuple[Layer, int, int]:
    """Returns the layer in its widest words, and the words and codes of a unit."""
    layout, codes = layer.layout, layer.codes
    if layout.along == "flat":
        nbytes = layer.in_features * layout.bits // 8
        if layer.in_features * layout.bits % 8:
            return layer, 1, layer.in_features + 1  # no span is a multiple of it
        layer = dataclasses.replace(layer, code_other=nbytes)
    is_dense = layer.code_word == 1 and layer.code_other % 4 == 0 and codes.numel() % 4 == 0
    if layout.word == 8 and is_dense and codes.data_ptr() % 4 == 0:
        layer = dataclasses.replace(
            layer,
            codes=codes.view(-1).view(torch.int32),
            code_other=layer.code_other // 4,
            layout=dataclasses.replace(layout, word=32),
        )
    word = layer.layout.word
    if not layout.straddles:
        return layer, 1, word // layout.bits
    bits = math.lcm(word, layout.bits)
    return layer, bits // word, bits // layout.bits


def _across(layer: Layer) -> Layer | None:
    """Returns a layer whose words hold codes of several outputs."""
    layout = layer.layout
    share = layout.slabs if layout.loading == "slabs" else layout.word // layout.bits
    is_whole = share & (share - 1) == 0 and layer.out_features % share == 0
    if layout.loading == "slabs":
        is_whole = is_whole and layer.slab * layout.slabs == layer.out_features * layer.in_features
        layer = dataclasses.replace(layer, code_word=layer.in_features, code_other=1)
    elif layout.word % layout.bits or (layout.straddles and 32 % layout.bits):
        return None
    if not is_whole or layout.span % 16 or layout.offset != (0, 0) or layout.block_out != 1:
        return None
    return dataclasses.replace(layer, layout=dataclasses.replace(layout, loading="across", positions=share))
