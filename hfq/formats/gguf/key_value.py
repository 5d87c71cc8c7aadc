"""`kv_b_proj` of DeepSeek, which GGUF files store as two tensors with a dimension of heads.

    <m>.k_b [heads, rank, key]      the rows of keys, transposed in each head
    <m>.v_b [heads, value, rank]    the rows of values
    W = for each head: its rows of keys, then its rows of values

Both tensors are rows of blocks or of numbers (see block_rows.py). The blocks of `k_b` run along the rows of
the model's weight, so a panel consists of whole heads.

Source: `convert_hf_to_gguf.py` of llama.cpp (`DeepseekV2Model`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.checkpoint.gguf.block_types import block_type
from hfq.errors import FormatError
from hfq.formats.base import FLOATS, Format
from hfq.formats.codecs.ggml.blocks import decode_into
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.gguf.block_rows import no_quantization
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["GgufKeyValue"]


@dataclass(frozen=True)
class GgufKeyValue(Format):
    """`kv_b_proj` with the parameters of one module; see the module docstring.

    Attributes:
        key_type: ggml's type of `k_b`.
        value_type: ggml's type of `v_b`.
        heads: The number of heads.
        key: Rows of keys in each head.
        value: Rows of values in each head.
        rank: The number of input channels.
    """

    name = "gguf-key-value"
    key_type: str
    value_type: str
    heads: int
    key: int
    value: int
    rank: int

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> GgufKeyValue | None:
        keys, values = tensors.get("k_b"), tensors.get("v_b")
        if keys is None or values is None or keys.blocks is None or values.blocks is None:
            return None
        if len(keys.shape) != 3 or len(values.shape) != 3:
            return None
        sizes = [_elements(keys), _elements(values)]
        heads, value, rank = values.shape[0], values.shape[1], sizes[1]
        return cls(keys.blocks.type, values.blocks.type, heads, sizes[0], value, rank)

    def sized(self, in_features: int, out_features: int) -> GgufKeyValue:
        if (out_features, in_features) != (self.heads * self.row_multiple, self.rank):
            raise FormatError(
                "The stored keys and values have other sizes than the layer.",
                expected=f"{out_features} rows of {in_features} channels",
                found=f"{self.heads} heads of {self.key} and {self.value} rows of {self.rank} channels",
                fix="Download config.json of this model, or the GGUF file, again.",
            )
        return self

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        return (
            _spec("k_b", self.key_type, (self.heads, self.rank, self.key)),
            _spec("v_b", self.value_type, (self.heads, self.value, self.rank)),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "k_b"

    @property
    def bits_per_code(self) -> float:
        return block_type(self.key_type).bits

    @property
    def row_multiple(self) -> int:
        return self.key + self.value

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        return self.heads * self.row_multiple, self.rank

    def describe(self) -> str:
        return f"gguf {self.key_type} keys, {self.value_type} values"

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        first = start // self.row_multiple
        whole = thread_buffer("keys", torch.float32, panel.device, self.rank * self.key)
        whole = whole.view(self.rank, self.key)
        for offset in range(0, panel.shape[0], self.row_multiple):
            head = first + offset // self.row_multiple
            decode_into(whole, tensors["k_b"][head], self.key_type, block_type(self.key_type).nbytes)
            panel[offset : offset + self.key] = whole.t()
            values = panel[offset + self.key : offset + self.row_multiple]
            decode_into(values, tensors["v_b"][head], self.value_type, block_type(self.value_type).nbytes)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        raise no_quantization(self)


def _elements(info: TensorInfo) -> int:
    """Returns the elements of a row."""
    kind = block_type(info.blocks.type) if info.blocks is not None else None
    if kind is None or kind.dtype != "U8":
        return info.shape[-1]
    return info.shape[-1] // kind.nbytes * kind.size


def _spec(name: str, type_name: str, shape: tuple[int, ...]) -> TensorSpec:
    kind = block_type(type_name)
    if kind.dtype == "U8":
        shape = (*shape[:-1], shape[-1] // kind.size * kind.nbytes)
    return TensorSpec(name, (kind.dtype,), shape, "codes")
