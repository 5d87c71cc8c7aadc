"""Rows of ggml's blocks in safetensors, as gptqmodel writes them (quant_method gguf).

    qweight U8 [out, bytes of a row]     blocks, one after another
    W[n, k] = value(qweight[n], k)

The config names ggml's type: `bits` 4 with `format` q_0 is Q4_0, with q_k_m it is Q4_K. `dynamic` overrides
it for single layers. A row whose length is no multiple of the block is padded to whole blocks. Rows and
columns are in the model's order, unlike those of GGUF files.

Format: gptqmodel's `GGUFTorchLinear`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.checkpoint.gguf.block_types import BlockType, block_type
from hfq.errors import FormatError
from hfq.formats.base import FLOATS, Format, FormatVariant
from hfq.formats.codecs.ggml.blocks import decode_into
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.configs.gptq_config import is_gguf, module_options
from hfq.formats.gguf.block_rows import no_quantization
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["GptqmodelGguf"]

_TYPES = ("Q1_0", "Q2_0", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_NAME = re.compile(r"q(\d?)_(0|k)(_xs|_s|_m|_l|_g128)?")


@dataclass(frozen=True)
class GptqmodelGguf(Format):
    """Rows of blocks with the parameters of one module; see the module docstring.

    Attributes:
        type_name: ggml's type.
        in_features: Columns of the layer; None until its size is known.
    """

    name = "gptqmodel-gguf"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "GGUF blocks in safetensors",
            "gptqmodel",
            "qweight U8 (Q1_0, Q2_0, Q4_0, Q8_0, Q4_K, Q5_K, Q6_K)",
            ("gptqmodel-gguf-q8_0", "gptqmodel-gguf-q4_0"),
            ("gptqmodel-gguf-q4_k", "gptqmodel-gguf-q2_0"),
        ),
    )
    type_name: str = "Q4_0"
    in_features: int | None = None

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> GptqmodelGguf | None:
        if "qweight" not in tensors or not is_gguf(config):
            return None
        return cls(_read_type(module, tensors["qweight"], config))

    def sized(self, in_features: int, out_features: int) -> GptqmodelGguf:
        return dataclasses.replace(self, in_features=in_features)

    @property
    def type(self) -> BlockType:
        """ggml's type."""
        return block_type(self.type_name)

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        row = -(-in_features // self.type.size) * self.type.nbytes
        return (
            TensorSpec("qweight", ("U8",), (out_features, row), "codes"),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "qweight"

    @property
    def bits_per_code(self) -> float:
        return self.type.bits

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, row = tensors["qweight"].shape
        return out_features, self.in_features or row // self.type.nbytes * self.type.size

    def describe(self) -> str:
        return f"gptqmodel gguf {self.type_name}"

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        rows, columns = panel.shape
        stored = tensors["qweight"][start : start + rows]
        width = stored.shape[1] // self.type.nbytes * self.type.size
        if width == columns:
            decode_into(panel, stored, self.type_name, self.type.nbytes)
            return
        padded = thread_buffer("padded rows", torch.float32, panel.device, rows * width).view(rows, width)
        decode_into(padded, stored, self.type_name, self.type.nbytes)
        panel.copy_(padded[:, :columns])

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.type_name not in ("Q4_0", "Q8_0"):
            raise no_quantization(self)
        values = torch.nn.functional.pad(weight.detach().to(torch.float32), (0, -weight.shape[1] % 32))
        blocks = values.unflatten(1, (-1, 32))
        largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
        scale = largest.abs() / 127 if self.type_name == "Q8_0" else largest / -8
        codes = blocks / torch.where(scale == 0, 1, scale)
        if self.type_name == "Q8_0":
            stored = codes.round().to(torch.int8).view(torch.uint8)
        else:
            nibbles = (codes + 8.5).clamp(0, 15).to(torch.uint8)
            stored = nibbles[..., :16] | nibbles[..., 16:] << 4
        return {"qweight": torch.cat([scale.to(torch.float16).view(torch.uint8), stored], 2).flatten(1)}


def _read_type(module: str, weight: TensorInfo, config: Mapping) -> str:
    """Returns ggml's type, which the config names for a module.

    Raises:
        FormatError: gptqmodel does not write such a type.
    """
    options = module_options(module, config)
    bits, named = options.get("bits"), options.get("format") or options.get("checkpoint_format")
    for text in (bits, named if named != "gguf" else None):
        found = _NAME.fullmatch(text.lower().replace("-", "_")) if isinstance(text, str) else None
        if found:
            name = f"Q{found[1] or bits}_{found[2].upper()}"
            if name in _TYPES:
                return name
    raise FormatError(
        f"quantization_config names no type of ggml for {module}. Nothing was loaded.",
        file=weight.range.file,
        tensor=weight.name,
        expected=f"bits and format of {', '.join(_TYPES)}, such as 4 and 'q_k_m'",
        found=f"bits={bits!r}, format={named!r}",
        fix="Restore the original bits and format in config.json.",
    )
