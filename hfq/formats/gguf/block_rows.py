"""Weights of GGUF files: rows of ggml's blocks, or of numbers.

    <m>.weight U8 [out, bytes of a row]     blocks, one after another; or F32, F16, or BF16 [out, in]
    <m>.scale F32 [1]                       optional, multiplies all weights (NVFP4)
    W[n, k] = value(weight[row(n)], column(k)) * scale

ggml's type is in the header of the file (`TensorInfo.blocks`), with the order in which the file stores rows
and columns: the converter of llama.cpp permutes those of some layers. A block does not cross rows, so a row
is decoded where it lies. Columns are permuted after a row is decoded.

Rows of numbers are a layer of this format if their order differs from the model's, if the model has the
transposed weight, or if they are fused experts. Other floats are unquantized.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.checkpoint.gguf.block_types import BlockType, block_type
from hfq.errors import FormatError
from hfq.formats.base import FLOATS, Format
from hfq.formats.codecs.constants import table
from hfq.formats.codecs.ggml.blocks import decode_into
from hfq.formats.codecs.groups import check_divides
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.layouts.scaled import Others, other_specs, other_tensors
from hfq.formats.layouts.slicing import BlockShards
from hfq.tensor_spec import Blocks, StoredOrder, TensorInfo, TensorSpec

__all__ = ["Gguf", "no_quantization", "positions"]

_OTHERS = ("input_scale",)


@dataclass(frozen=True)
class Gguf(BlockShards):
    """Rows of blocks with the parameters of one module; see the module docstring.

    Attributes:
        blocks: ggml's type, and the order of rows and columns.
        scale_shape: The shape of the stored scale; None without one.
        others: Tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
    """

    name = "gguf"
    blocks: Blocks
    scale_shape: tuple[int, ...] | None = None
    others: Others = ()

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Gguf | None:
        weight, scale = tensors.get("weight"), tensors.get("scale")
        if weight is None or weight.blocks is None or len(weight.shape) != 2 or not weight.blocks.is_layer:
            return None
        return cls(weight.blocks, None if scale is None else scale.shape, other_tensors(tensors, _OTHERS))

    @property
    def type(self) -> BlockType:
        """ggml's type."""
        return block_type(self.blocks.type)

    def sized(self, in_features: int, out_features: int) -> Gguf:
        for order, size, what in (
            (self.blocks.rows, out_features, "rows"),
            (self.blocks.columns, in_features, "columns"),
        ):
            if order is not None and order.size != size:
                raise FormatError(
                    f"The metadata of the file orders another number of {what} than the layer has.",
                    expected=f"{size} {what}",
                    found=f"{order.size} {what}",
                    fix="Download config.json of this model, or the GGUF file, again.",
                )
        return self

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        kind = self.type
        check_divides(in_features, kind.size, kind.name, "block")
        columns = in_features // kind.size * kind.nbytes if kind.dtype == "U8" else in_features
        specs = [TensorSpec("weight", (kind.dtype,), (out_features, columns), "codes")]
        if self.scale_shape is not None:
            specs.append(TensorSpec("scale", ("F32",), self.scale_shape or (), "scale"))
        return (
            *specs,
            *other_specs(self.others),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight"

    @property
    def bits_per_code(self) -> float:
        return self.type.bits

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, columns = tensors["weight"].shape
        kind = self.type
        return out_features, columns // kind.nbytes * kind.size if kind.dtype == "U8" else columns

    def describe(self) -> str:
        return f"gguf {self.blocks.type}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Gguf:
        scale = tensors.get("scale")
        if scale is not None:
            check_finite(module, "scale", scale)
            if scale.numel() != 1:
                raise FormatError(
                    "A scale has more than one value. Nothing was loaded.",
                    tensor=f"{module}.scale",
                    expected="1 value",
                    found=f"{scale.numel()} values",
                    fix="Download the checkpoint again.",
                )
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        weight, rows, columns = tensors["weight"], self.blocks.rows, self.blocks.columns
        stop = start + panel.shape[0]
        if rows is None:
            stored = weight[start:stop]
        else:
            stored = weight.index_select(0, positions(rows, weight.device)[start:stop])
        if columns is None:
            decode_into(panel, stored, self.type.name, self.type.nbytes)
        else:
            whole = thread_buffer("columns", torch.float32, panel.device, panel.numel()).view(panel.shape)
            decode_into(whole, stored, self.type.name, self.type.nbytes)
            torch.index_select(whole, 1, positions(columns, panel.device), out=panel)
        if "scale" in tensors:
            panel.mul_(tensors["scale"].reshape(1, 1))

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        raise no_quantization(self)

    def reorder(
        self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor
    ) -> tuple[Format, dict[str, torch.Tensor]]:
        rows = self.blocks.rows
        stored = order if rows is None else positions(rows, order.device)[order]
        moved = {"weight": tensors["weight"].index_select(0, stored)}
        if "bias" in tensors:
            moved["bias"] = tensors["bias"].index_select(0, order)
        blocks = dataclasses.replace(self.blocks, rows=None)
        return dataclasses.replace(self, blocks=blocks), {**tensors, **moved}


def positions(order: StoredOrder, device: torch.device) -> torch.Tensor:
    """Returns where a file stores each row or column of the model, int64 [elements]."""

    def make() -> torch.Tensor:
        found = torch.arange(order.size)
        moved = found[order.start :].view(order.outer, order.first, order.second, order.inner)
        return torch.cat([found[: order.start], moved.transpose(1, 2).reshape(-1)])

    return table(order, make, device)


def no_quantization(weight_format: Format) -> FormatError:
    """Returns the error for a request to quantize to a format of GGUF."""
    return FormatError(
        "hfq does not quantize to GGUF.",
        expected="a format that `hfq formats` lists as written",
        found=weight_format.describe(),
        fix="Quantize with llama-quantize of llama.cpp.",
    )
