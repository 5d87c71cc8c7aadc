"""Gemma QAT: Google's checkpoints of quantization-aware training (quant_method gemma).

Linear layers:
    weight U8 [out, ceil(in * bits / 8)] for 2 or 4 bits, I8 [out, in] for 8 bits
    weight_scale [out, 1]
    input_activation_scale [], output_activation_scale []    0 leaves activations unquantized
Embeddings:
    embedding_quantized, embedding_scale [rows, blocks]

    W[n, k] = (code[n, k] - 2**(bits - 1)) * scale[n, block of k]       codes of 2 and 4 bits
    W[n, k] = code[n, k] * scale[n, block of k]                         codes of 8 bits

The first code of a byte is in its lowest bits. The width of a row tells the bits of a layer.

Format: `integrations/gemma_quant.py` of transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, ActivationScheme, Format, FormatVariant
from hfq.formats.codecs.constants import constant
from hfq.formats.codecs.groups import apply_groups, rows_of
from hfq.formats.codecs.nibbles import look_up_nibbles
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.layouts.scaled import Others, other_specs, other_tensors
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["GemmaQat"]

_NIBBLES = tuple(float(code - 8) for code in range(16))


@dataclass(frozen=True)
class GemmaQat(Format):
    """Gemma QAT with the parameters of one module; see the module docstring.

    Attributes:
        num_bits: 2, 4, or 8; 0 if only the size of the layer tells whether they are 2 or 4.
        is_embedding: True for the tensors of an embedding.
        width: Bytes in a row of codes.
        blocks: Scales in a row.
        size: (out, in) of the layer.
        scheme: The activation quantization that the checkpoint requests.
        others: Tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
    """

    name = "gemma-qat"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "Gemma QAT (2, 4, 8 bits)",
            "Google",
            "weight U8 or I8, weight_scale, input_activation_scale, output_activation_scale",
            ("gemma-qat-4bit", "gemma-qat-2bit", "gemma-qat-8bit"),
            ("transformers-gemma-4bit", "transformers-gemma-2bit"),
        ),
        FormatVariant(
            "Gemma QAT embeddings",
            "Google",
            "embedding_quantized U8 or I8, embedding_scale",
            ("gemma-qat-embedding",),
            ("transformers-gemma-embedding",),
        ),
    )
    num_bits: int = 4
    is_embedding: bool = False
    width: int = 0
    blocks: int = 1
    size: tuple[int, int] = (0, 0)
    scheme: ActivationScheme | None = None
    others: Others = ()

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> GemmaQat | None:
        is_embedding = "embedding_quantized" in tensors
        codes = tensors.get("embedding_quantized" if is_embedding else "weight")
        if config.get("quant_method") != "gemma" or codes is None or codes.dtype not in ("U8", "I8"):
            return None
        scale = tensors.get("embedding_scale")
        others = other_tensors(tensors, ("input_activation_scale", "output_activation_scale"))
        return cls(
            num_bits=8 if codes.dtype == "I8" else 0,
            is_embedding=is_embedding,
            width=codes.shape[-1] if codes.shape else 0,
            blocks=scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1,
            scheme=ActivationScheme("tensor", dtype="int8 of gemma") if others else None,
            others=others,
        )

    def sized(self, in_features: int, out_features: int) -> GemmaQat:
        """Returns this format with the bits that the width of a row implies."""
        candidates = [self.num_bits] if self.num_bits else [2, 4]
        fitting = [bits for bits in candidates if self.width == _width(in_features, bits)]
        if len(fitting) != 1:
            raise FormatError(
                "The quantized codes of a layer do not fit its input.",
                expected=f"{in_features} codes of {' or '.join(map(str, candidates))} bits",
                found=f"{self.width} bytes in a row",
                fix="Restore the original config.json of the checkpoint.",
            )
        if not self.blocks or in_features % self.blocks:
            raise FormatError(
                "The scales of an embedding do not fit its rows.",
                expected=f"a number of blocks that divides {in_features}",
                found=f"{self.blocks} scales in a row",
                fix="Restore the original config.json of the checkpoint.",
            )
        return dataclasses.replace(self, num_bits=fitting[0], size=(out_features, in_features))

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        codes = (out_features, _width(in_features, self.num_bits))
        specs = (
            TensorSpec(self.codes_name, ("I8" if self.num_bits == 8 else "U8",), codes, "codes"),
            TensorSpec(self.scale_name, FLOATS, (out_features, self.blocks), "scale"),
        )
        if self.is_embedding:
            return specs
        bias = TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True)
        return (*specs, *other_specs(self.others), bias)

    @property
    def codes_name(self) -> str:
        return "embedding_quantized" if self.is_embedding else "weight"

    @property
    def scale_name(self) -> str:
        return "embedding_scale" if self.is_embedding else "weight_scale"

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        return self.size

    def describe(self) -> str:
        return f"gemma-qat int{self.num_bits or '?'}{' embedding' if self.is_embedding else ''}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> GemmaQat:
        check_finite(module, self.scale_name, tensors[self.scale_name])
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop, in_features = start + panel.shape[0], panel.shape[1]
        packed = tensors[self.codes_name][start:stop]
        if self.num_bits == 4:
            look_up_nibbles(panel, packed, constant(_NIBBLES, panel.device))
        elif self.num_bits == 8:
            panel.copy_(packed)
        else:
            shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
            codes = (packed[:, :, None] >> shifts) & 3
            torch.sub(codes.flatten(1)[:, :in_features], 2.0, out=panel)
        scale = rows_of(tensors[self.scale_name], start, stop)
        apply_groups(panel, torch.Tensor.mul_, scale, in_features // self.blocks)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        half, share = 1 << (self.num_bits - 1), 8 // self.num_bits
        grouped = weight.detach().to(torch.float32).unflatten(1, (self.blocks, -1))
        scale = grouped.abs().amax(2) / (half - 0.5)
        scale = torch.where(scale == 0, 1, scale)
        codes = (grouped / scale[:, :, None]).round().clamp(-half, half - 1).flatten(1).to(torch.int8)
        if share > 1:
            codes = torch.nn.functional.pad(codes + half, (0, -codes.shape[1] % share)).to(torch.uint8)
            parts = codes.unflatten(1, (-1, share))
            codes = parts[:, :, 0].clone()
            for place in range(1, share):
                codes |= parts[:, :, place] << place * self.num_bits
        others = {name: torch.zeros(shape) for name, _, shape in self.others}
        return {self.codes_name: codes, self.scale_name: scale, **others}


def _width(in_features: int, num_bits: int) -> int:
    """Returns the bytes in a row of codes."""
    return -(-in_features * num_bits // 8)
