"""GPTQ format of AutoGPTQ, gptqmodel, and auto-round.

Codes are packed along the input into int32 words. Scales and zero points belong to groups.

    qweight  I32 [in * bits / 32, out]      codes, a bit stream along the input
    qzeros   I32 [groups, out * bits / 32]  zero points, a bit stream along the output
    scales   F16 [groups, out]
    g_idx    I32 [in]                       the group of each input channel; absent or
                                            of length 1 if it is trivial

    W[n, k] = scales[g, n] * (q[k, n] - z[g, n])  with  g = g_idx[k]

Format: the packers of AutoGPTQ and gptqmodel. `checkpoint_format="gptq"` (v1) stores z - 1, and `"gptq_v2"`
stores z. `"gptq_p"` (gptqmodel's planar layout, 2 to 8 bits) stores z. It stores 32 codes in bit planes
instead of one stream.

Readers of v1 add the one in different ways, and the results differ for z = 0. gptqmodel adds it to the packed
word (to the masked field for 3 bits). AutoGPTQ adds it to each field without a mask.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, FormatVariant, bounded_int
from hfq.formats.codecs.bit_packing import pack_planes, pack_stream, unpack_planes, unpack_stream
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.configs.gptq_config import (
    BITS,
    PLANAR_BITS,
    ZeroReading,
    check_zero_points,
    is_awq,
    is_gguf,
    is_planar,
    module_options,
    names_writer,
    read_group_size,
    read_zero_reading,
    stored_bits,
)
from hfq.formats.layouts.row_order import GptqOrder
from hfq.formats.layouts.slicing import GptqShards
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["WORD_ONES", "Gptq"]

logger = logging.getLogger(__name__)

WORD_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Gptq(GptqShards, GptqOrder):
    """GPTQ with the parameters of one module; see the module docstring for the layout.

    Attributes:
        num_bits: 2, 3, 4 or 8; 2 to 8 if planar.
        group_size: Input channels that share a scale; -1 for all.
        symmetric: True if the config says that the zero points are constant, or says nothing.
        zero_reading: The computation of a zero point from its stored value.
        g_idx_length: The length of `g_idx` in the file; None if it is absent.
        says_symmetric: True if the config sets `sym` to true explicitly.
        is_nameless: True if the config names neither a method nor bits.
        names_writer: True if the config names the tool, or the layout, that stored the zero points.
        needs_g_idx: True if the config says `desc_act`, so that the groups are unknown without `g_idx`.
        is_planar: True if codes and zero points are in bit planes (`gptq_p`).
        act_order: True if the groups are scattered over the input (`desc_act`); set by `resolve`.
        stored_groups: The groups of the whole layer, in a slice that holds all scales; None elsewhere.
    """

    name = "gptq"
    variants = (
        FormatVariant(
            "GPTQ v1 (checkpoint_format gptq)",
            "gptqmodel, AutoGPTQ, auto-round (auto_gptq)",
            "qweight, qzeros, scales, g_idx",
            (
                "gptq-v1-w4-sym",
                "gptq-v1-w4-asym",
                "gptq-v1-w3-sym",
                "gptq-v1-w2-sym",
                "gptq-v1-w8-channel",
                "gptq-autogptq-w4",
            ),
            (
                "gptqmodel-gptq-w4g128-sym-v1",
                "gptqmodel-gptq-w3g128-sym",
                "gptqmodel-gptq-w4g64-descact",
                "gptqmodel-gptq-w2g32-sym",
                "gptqmodel-gptq-w4g32-asym-v1",
                "gptqmodel-gptq-w3g32-zero0-v1",
                "gptqmodel-gptq-w4g32-zero0-v1",
                "gptqmodel-gptq-w8gall-zero0-v1",
                "gptqmodel-gptq-dynamic-lmhead",
                "autoround-w2g32",
            ),
            is_emitted=True,
        ),
        FormatVariant(
            "GPTQ v2 (gptq_v2)",
            "gptqmodel",
            "qweight, qzeros, scales, g_idx",
            ("gptq-v2-w4-asym",),
            ("gptqmodel-gptq-w4g32-asym-v2", "gptqmodel-gptq-w4g32-zero0-v2"),
            is_emitted=True,
        ),
        FormatVariant(
            "GPTQ planar (gptq_p)",
            "gptqmodel",
            "qweight, qzeros, scales, g_idx",
            ("gptq-planar-w3", "gptq-planar-w5"),
            ("gptqmodel-gptqp-w3g32", "gptqmodel-gptqp-w5g32", "gptqmodel-gptqp-w7g32"),
        ),
    )
    num_bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    zero_reading: ZeroReading = "stored"
    g_idx_length: int | None = None
    says_symmetric: bool = False
    names_writer: bool = True
    is_nameless: bool = False
    needs_g_idx: bool = False
    is_planar: bool = False
    act_order: bool = False
    stored_groups: int | None = None

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Gptq | None:
        if "qweight" not in tensors or is_gguf(config) or is_awq(tensors, config):
            return None
        options = module_options(module, config)
        allowed = PLANAR_BITS if is_planar(config) else BITS
        hinted = bounded_int(options, "bits", lambda bits: bits in allowed, _listed(allowed), module)
        stored = stored_bits(tensors, allowed)
        if stored is not None and hinted is not None and stored != hinted:
            raise FormatError(
                f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
                file=tensors["qweight"].range.file,
                tensor=f"{module}.qzeros",
                expected=f"{hinted} bits, as config.json says",
                found=f"{stored} bits: qzeros {tensors['qzeros']} and scales {tensors['scales']}",
                fix="Restore the original `bits` (or `dynamic`) in config.json.",
            )
        num_bits = stored or hinted
        if num_bits is None:
            return None
        g_idx = tensors.get("g_idx")
        return cls(
            num_bits=num_bits,
            group_size=read_group_size(module, tensors, options, num_bits),
            symmetric=bool(options.get("sym", True)),
            zero_reading=read_zero_reading(module, config, num_bits),
            g_idx_length=g_idx.numel if g_idx is not None else None,
            says_symmetric=options.get("sym") is True,
            names_writer=names_writer(config),
            is_nameless=not (config.get("quant_method") or config.get("bits")),
            needs_g_idx=bool(options.get("desc_act", False)),
            is_planar=is_planar(config),
        )

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        if in_features * self.num_bits % 32:
            raise FormatError(
                "GPTQ cannot hold a layer of this input size.",
                expected=f"whole 32-bit words of {self.num_bits}-bit codes",
                found=f"{in_features} input channels",
                fix="Choose other bits, or add the layer to modules_to_not_convert.",
            )
        groups = 1 if self.group_size == -1 else -(-in_features // self.group_size)
        groups = self.stored_groups or groups
        is_trivial = self.g_idx_length in (None, 0, 1) and not self.needs_g_idx
        if is_trivial and groups > 1 and in_features % self.group_size:
            raise FormatError(
                "The groups of a GPTQ layer without g_idx do not divide its input.",
                found=f"{in_features} input channels",
                expected=f"a multiple of group_size={self.group_size}",
                fix="Restore the original group_size in config.json.",
            )
        words_in, words_out = self._words(in_features), self._words(out_features)
        needs_g_idx = self.needs_g_idx and groups > 1
        g_idx = self.g_idx_length if self.g_idx_length in (0, 1) and not needs_g_idx else in_features
        return (
            TensorSpec("qweight", ("I32",), (words_in, out_features), "codes"),
            TensorSpec("qzeros", ("I32",), (groups, words_out), "zero_point"),
            TensorSpec("scales", FLOATS, (groups, out_features), "scale"),
            TensorSpec("g_idx", ("I32", "I64"), (g_idx,), "index", optional=not needs_g_idx, bound=groups),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "qweight"

    @property
    def row_multiple(self) -> int:
        return 32

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        words, out_features = tensors["qweight"].shape
        return out_features, words * 32 // self.num_bits

    def describe(self) -> str:
        version = "planar" if self.is_planar else "v2" if self.zero_reading == "stored" else "v1"
        kind = "sym" if self.symmetric else "asym"
        order = " act-order" if self.act_order else ""
        return f"gptq {version} int{self.num_bits} g{self.group_size} {kind}{order}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Gptq:
        check_finite(module, "scales", tensors["scales"])
        reading = self._implied_zero_reading(module, tensors["qzeros"], tensors["scales"].shape[1])
        if reading != self.zero_reading:
            logger.warning(
                "%s: labeled %s, but its zero points are stored as in %s; hfq reads them as %s.",
                module,
                *(("gptq_v2", "v1", "v1") if self.zero_reading == "stored" else ("gptq (v1)", "v2", "v2")),
            )
        act_order, g_idx = self.act_order, tensors.get("g_idx")
        # an index of a layer that is cut was checked before
        if g_idx is not None and g_idx.numel() > 1 and not act_order:
            act_order = self._is_scattered(module, g_idx, tensors["scales"].shape[0])
        return dataclasses.replace(self, zero_reading=reading, act_order=act_order)

    def resolve_stack(self, tensors: Mapping[str, torch.Tensor]) -> Gptq | None:
        scales, qzeros, g_idx = tensors["scales"], tensors["qzeros"], tensors.get("g_idx")
        act_order: bool | None = self.act_order
        try:
            check_finite("", "scales", scales)
            reading = self._implied_zero_reading("", qzeros.flatten(0, 1), scales.shape[2])
        except FormatError:
            return None
        if g_idx is not None and g_idx[0].numel() > 1 and not act_order:
            act_order = self._are_scattered(g_idx, scales.shape[1])
        if act_order is None or reading != self.zero_reading:
            return None
        if self.symmetric and not bool((qzeros == qzeros[:1, :1]).all()):
            return None  # the zero points of one layer may be constant, and imply another reading
        return dataclasses.replace(self, act_order=act_order)

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop, in_features = start + panel.shape[0], panel.shape[1]
        scales = tensors["scales"][:, start:stop].to(torch.float32)
        zeros = self.zero_points(tensors["qzeros"], start, stop)
        codes = self._unpack(tensors["qweight"][:, start:stop], in_features)
        weight, groups = panel.t(), scales.shape[0]
        span = in_features if self.group_size == -1 else self.group_size
        if not self.act_order and span * groups == in_features:
            grouped = weight.unflatten(0, (groups, span))
            torch.sub(codes.unflatten(0, (groups, span)), zeros[:, None], out=grouped)
            grouped.mul_(scales[:, None])
            return
        if self.act_order:
            group = tensors["g_idx"].to(torch.int64)
        else:
            group = torch.arange(in_features, device=codes.device) // span
        torch.sub(codes, zeros[group], out=weight)
        weight.mul_(scales[group])

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        span = in_features if self.group_size == -1 else self.group_size
        if in_features * self.num_bits % 32 or out_features * self.num_bits % 32 or in_features % span:
            raise FormatError(
                "GPTQ cannot hold a weight of this shape.",
                found=f"[{out_features}, {in_features}]",
                expected=f"sizes divisible by 32 and an input divisible by group_size={self.group_size}",
                fix="Choose another group_size, or add the layer to modules_to_not_convert.",
            )
        grouped = weight.detach().to(torch.float32).t().reshape(in_features // span, span, out_features)
        scales, zeros = self.scales_and_zeros(grouped.amin(1), grouped.amax(1))
        codes = (grouped / scales[:, None] + zeros[:, None]).round().clamp(0, (1 << self.num_bits) - 1)
        g_idx = torch.arange(in_features) // span if (self.g_idx_length or 0) > 1 else None
        return self.pack(codes.reshape(in_features, out_features), scales, zeros, g_idx)

    def scales_and_zeros(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scales and zero points for ranges `[low, high]` of weights.

        Scales are float32 values that F16 can represent.

        Raises:
            FormatError: A range is too wide for F16.
        """
        top = (1 << self.num_bits) - 1
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = torch.maximum(-low, high) * 2 / top if self.symmetric else (high - low) / top
        scales = torch.where(scales == 0, 1, scales).to(torch.float16).float()
        if not torch.isfinite(scales).all():
            raise FormatError(
                "The weight is out of the range of F16 scales.",
                found=f"amplitudes up to {torch.maximum(-low, high).max():g}",
                expected=f"at most about {torch.finfo(torch.float16).max * top / 2:g}",
                fix="Add the layer to modules_to_not_convert.",
            )
        least = (
            1 if self.zero_reading == "field_plus_one" else 0
        )  # AutoGPTQ's reading cannot represent a zero point of 0
        middle = torch.full_like(scales, 1 << (self.num_bits - 1))
        return scales, middle if self.symmetric else (-low / scales).round().clamp(least, top)

    def pack(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        g_idx: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns the tensors of a layer.

        Args:
            codes: Codes [in, out].
            scales: Scales [groups, out].
            zeros: Zero points [groups, out].
            g_idx: The group of each channel [in]; None if it is not stored.
        """
        tensors = {"qweight": self._pack(codes), "qzeros": self._store_zeros(zeros.to(torch.int32))}
        tensors["scales"] = scales.to(torch.float16)
        return tensors if g_idx is None else {**tensors, "g_idx": g_idx.to(torch.int32)}

    def _words(self, count: int) -> int:
        return -(-count // 32) * self.num_bits if self.is_planar else -(-count * self.num_bits // 32)

    def zero_points(self, qzeros: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns the zero points of output columns [start, stop): int32 [groups, stop - start]."""
        first = start * self.num_bits // 32
        words = qzeros[:, first : self._words(stop)].t()
        if self.zero_reading == "word_plus_one":
            words = words + WORD_ONES[self.num_bits]
        zeros = self._unpack(words, stop - first * 32 // self.num_bits).t()
        if self.zero_reading == "field_plus_one":
            zeros = zeros + 1
        if self.zero_reading == "masked_plus_one":
            zeros = (zeros + 1) & ((1 << self.num_bits) - 1)
        return zeros.contiguous()

    def _store_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        if self.zero_reading == "word_plus_one":
            return (self._pack(zeros.t()) - WORD_ONES[self.num_bits]).t().contiguous()
        if self.zero_reading != "stored":
            zeros = (zeros - 1) & ((1 << self.num_bits) - 1)
        return self._pack(zeros.t()).t().contiguous()

    def _unpack(self, words: torch.Tensor, count: int) -> torch.Tensor:
        return (unpack_planes if self.is_planar else unpack_stream)(words, self.num_bits, count)

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        return (pack_planes if self.is_planar else pack_stream)(codes, self.num_bits)

    def _implied_zero_reading(self, module: str, qzeros: torch.Tensor, count: int) -> ZeroReading:
        """Returns the zero reading that the stored zero points imply.

        Symmetric zero points are one constant. This constant tells v1 from v2, regardless of the config's
        label.
        """
        if self.names_writer and not self.symmetric:
            return self.zero_reading  # any values are possible
        differing = (
            qzeros[:1] if bool((qzeros == qzeros[:1]).all()) else qzeros
        )  # the first group suffices if all groups are equal
        middle, stored = 1 << (self.num_bits - 1), self._unpack(differing.t(), count)
        check_zero_points(module, stored, self)
        if not self.symmetric or self.is_planar:
            return self.zero_reading
        labelled_v2 = self.zero_reading == "stored"
        if labelled_v2 and bool((stored == middle - 1).all()):
            return "masked_plus_one"
        if not labelled_v2 and bool((stored == middle).all()):
            return "stored"
        return self.zero_reading


def _listed(bits: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, bits[:-1]))} or {bits[-1]}"
