"""AWQ in its three layouts, with 4 bits per code, or 2 to 8 in gemm files of gptqmodel.

gemm (AutoAWQ, gptqmodel, auto-round):
    qweight I32 [in, out / 8], qzeros I32 [groups, out / 8], scales [groups, out]
    Nibble i of a word holds column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i].          W[n, k] = (q - z) * s
    Other than 4 bits: qweight [in, out * bits / 32] and qzeros [groups, out * bits / 32], plain bit streams
    along the output.
gemv:
    qweight I32 [out, in / 8], qzeros I32 [out, w], scales [out, 8 w]
    Nibbles in order; groups first, then padding.                              W[n, k] = (q - z) * s
gemv_fast (llm-awq: `scaled_zeros` instead of `qzeros`):
    qweight I16 [out / 4, in], scales and qzeros [8 w, out], qzeros = -(z * s)
    Rows are interleaved by four, and channels reordered within 32.            W[n, k] = q * s + qzeros

Format: AutoAWQ's `WQLinear_GEMM`, `WQLinear_GEMV`, `WQLinear_GEMVFast`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, FormatVariant, bounded_int
from hfq.formats.codecs.awq_words import deinterleave, interleave, order_columns, reorder_columns
from hfq.formats.codecs.bit_packing import pack_stream, unpack_stream
from hfq.formats.codecs.groups import apply_groups, check_divides
from hfq.formats.codecs.nibbles import look_up_nibbles
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.configs.gptq_config import is_awq, is_gguf, module_options
from hfq.formats.layouts.row_order import AwqOrder
from hfq.formats.layouts.slicing import AwqShards
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["Awq"]

Version = Literal["gemm", "gemv", "gemv_fast"]
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each column


@dataclass(frozen=True)
class Awq(AwqShards, AwqOrder):
    """AWQ with the parameters of one module; see the module docstring for the layouts.

    Attributes:
        version: The layout.
        group_size: Input channels that share a scale; -1 for all.
        zeros_name: `qzeros`, or `scaled_zeros` in files of llm-awq.
        num_bits: 4; 2 to 8 for gemm.
    """

    name = "awq"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "AWQ gemm",
            "AutoAWQ, gptqmodel, auto-round (auto_awq)",
            "qweight I32, qzeros, scales",
            ("awq-gemm", "awq-gemm-w3"),
            ("autoawq-gemm-g32",),
            is_emitted=True,
        ),
        FormatVariant(
            "AWQ gemv",
            "AutoAWQ",
            "qweight I32, qzeros, scales",
            ("awq-gemv",),
            ("autoawq-gemv-g32", "autoawq-gemv-g64"),
        ),
        FormatVariant(
            "AWQ gemv_fast, llm-awq",
            "AutoAWQ, llm-awq",
            "qweight I16, qzeros or scaled_zeros, scales",
            ("awq-gemv-fast",),
            ("autoawq-gemv_fast-g64",),
        ),
    )
    version: Version = "gemm"
    group_size: int = 128
    zeros_name: str = "qzeros"
    num_bits: int = 4

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Awq | None:
        if "qweight" not in tensors or is_gguf(config) or not is_awq(tensors, config):
            return None
        config = module_options(module, config)
        bits = _read_bits(module, config)
        version: Version
        qweight, scales = tensors["qweight"], tensors.get("scales")
        if len(qweight.shape) != 2:
            version = "gemv_fast" if qweight.dtype == "I16" else "gemm"
            return cls(
                version=version, group_size=-1, num_bits=bits
            )  # so that the check of its specs reports the shape
        is_gemm = scales is None or len(scales.shape) != 2 or scales.shape[1] * bits == 32 * qweight.shape[-1]
        if is_gemm and scales is not None and scales.shape[:1] == qweight.shape[:1]:
            is_gemm = not _names_gemv(module, scales, config)
        version = "gemv_fast" if qweight.dtype == "I16" else "gemm" if is_gemm else "gemv"
        hinted = bounded_int(
            config, "group_size", lambda size: size == -1 or 0 < size < 1 << 24, "-1 or a size", module
        )
        in_features = {
            "gemm": qweight.shape[0],
            "gemv": 8 * qweight.shape[-1],
            "gemv_fast": qweight.shape[-1],
        }[version]
        if hinted is None:
            hinted = _guess_group_size(version, in_features, scales)
        zeros_name = "scaled_zeros" if "scaled_zeros" in tensors else "qzeros"
        if bits != 4 and version != "gemm":
            raise FormatError(
                f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
                file=qweight.range.file,
                tensor=qweight.name,
                expected=f"{bits} bits, as config.json says",
                found=f"qweight {qweight} and scales {scales}",
                fix="Restore the original `bits` in config.json.",
            )
        return cls(version=version, group_size=hinted, zeros_name=zeros_name, num_bits=bits)

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        span = in_features if self.group_size == -1 else self.group_size
        check_divides(in_features, span, "AWQ")
        multiple = {"gemm": 1, "gemv": 8, "gemv_fast": 64}[self.version]
        check_divides(in_features, multiple, f"AWQ {self.version}", "a word")
        share = {"gemm": 8 if self.num_bits in (4, 8) else 32, "gemv": 1, "gemv_fast": 4}[self.version]
        if out_features % share:
            raise FormatError(
                f"AWQ {self.version} cannot hold a layer of this output size.",
                expected=f"a multiple of {share}",
                found=f"{out_features} output channels",
                fix="Choose another method, or add the layer to modules_to_not_convert.",
            )
        groups = in_features // span
        width, words = zeros_width(in_features, span), out_features * self.num_bits // 32
        codes, zeros, scales, dtype, zero_dtypes = {
            "gemm": ((in_features, words), (groups, words), (groups, out_features), "I32", ("I32",)),
            "gemv": (
                (out_features, in_features // 8),
                (out_features, width),
                (out_features, 8 * width),
                "I32",
                ("I32",),
            ),
            "gemv_fast": (
                (out_features // 4, in_features),
                (8 * width, out_features),
                (8 * width, out_features),
                "I16",
                FLOATS,
            ),
        }[self.version]
        return (
            TensorSpec("qweight", (dtype,), codes, "codes"),
            TensorSpec(self.zeros_name, zero_dtypes, zeros, "zero_point"),
            TensorSpec("scales", FLOATS, scales, "scale"),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "qweight"

    @property
    def row_multiple(self) -> int:
        return {"gemm": 8 if self.num_bits == 4 else 32, "gemv": 1, "gemv_fast": 4}[self.version]

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        first, second = tensors["qweight"].shape
        return {
            "gemm": (second * 32 // self.num_bits, first),
            "gemv": (first, 8 * second),
            "gemv_fast": (4 * first, second),
        }[self.version]

    def describe(self) -> str:
        return f"awq {self.version} int{self.num_bits} g{self.group_size}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Awq:
        check_finite(module, "scales", tensors["scales"])
        if self.version == "gemv_fast":
            check_finite(module, self.zeros_name, tensors[self.zeros_name])
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop, in_features = start + panel.shape[0], panel.shape[1]
        span = in_features if self.group_size == -1 else self.group_size
        groups = in_features // span
        qweight = tensors["qweight"]
        scales = tensors["scales"]
        zeros = tensors[self.zeros_name]
        if self.version == "gemm":
            weight = self._look_up_columns(qweight, start, stop)
            grouped = weight.unflatten(0, (groups, span)).sub_(
                self._look_up_columns(zeros, start, stop)[:, None]
            )
            grouped.mul_(scales[:, None, start:stop].to(torch.float32))
            panel.copy_(weight.t())
            return
        if self.version == "gemv":
            look_up_nibbles(panel, qweight[start:stop], torch.arange(16.0, device=panel.device))
            zero, scale = unpack_stream(zeros[start:stop].t(), 4, groups).t(), scales[start:stop, :groups]
        else:
            panel.copy_(deinterleave(qweight[start // 4 : -(-stop // 4)])[: stop - start])
            zero, scale = zeros[:groups, start:stop].t(), scales[:groups, start:stop].t()
            apply_groups(panel, torch.Tensor.mul_, scale.to(torch.float32), span)
            apply_groups(panel, torch.Tensor.add_, zero.to(torch.float32), span)
            return
        apply_groups(panel, torch.Tensor.sub_, zero.to(torch.float32), span)
        apply_groups(panel, torch.Tensor.mul_, scale.to(torch.float32), span)

    def _look_up_columns(self, words: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns the codes, or zero points, of output rows [start, stop) in gemm's words.

        The result is float32 [words, stop - start], contiguous.
        """
        if self.num_bits != 4:
            return self._unpack_columns(words, start, stop).contiguous().to(torch.float32)
        columns = torch.empty(len(words), stop - start, device=words.device)
        part = order_columns(words[:, start // 8 : -(-stop // 8)])
        look_up_nibbles(columns, part, torch.arange(16.0, device=words.device))
        return columns

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        self.tensor_specs(in_features, out_features)
        span = in_features if self.group_size == -1 else self.group_size
        grouped = weight.detach().to(torch.float32).unflatten(1, (-1, span))
        scales, zeros = self.scales_and_zeros(grouped.amin(2), grouped.amax(2))
        codes = (grouped / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, (1 << self.num_bits) - 1)
        return self.pack(codes.flatten(1), scales, zeros)

    def scales_and_zeros(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scales and zero points for ranges `[low, high]` of weights.

        Scales are float32 values that F16 can represent.

        Raises:
            FormatError: A range is too wide for F16.
        """
        low = low.clamp(max=0)
        high = high.clamp(min=0)
        top = (1 << self.num_bits) - 1
        scales = torch.where(high == low, 1, (high - low) / top).to(torch.float16).float()
        if not torch.isfinite(scales).all():
            raise FormatError(
                "The weight is out of the range of F16 scales.",
                found=f"amplitudes up to {torch.maximum(-low, high).max():g}",
                expected=f"ranges of at most {torch.finfo(torch.float16).max * top:g}",
                fix="Add the layer to modules_to_not_convert.",
            )
        scales = torch.where(
            scales == 0, 1, scales
        )  # the weights are too small for F16, so all codes round to 0
        return scales, (-low / scales).round().clamp(0, top)

    def pack(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors of a layer.

        Args:
            codes: Codes [out, in].
            scales: Scales [out, groups].
            zeros: Zero points [out, groups].
        """
        codes = codes.to(torch.int32)
        zeros = zeros.to(torch.int32)
        scale = scales.to(torch.float16)
        if self.version == "gemm":
            packed = {"qweight": self._pack_columns(codes.t()), "qzeros": self._pack_columns(zeros.t())}
            return packed | {"scales": scale.t().contiguous()}
        in_features = codes.shape[1]
        span = in_features if self.group_size == -1 else self.group_size
        padding = (0, 8 * zeros_width(in_features, span) - zeros.shape[1])
        zeros, scale = torch.nn.functional.pad(zeros, padding), torch.nn.functional.pad(scale, padding)
        if self.version == "gemv":
            packed = {"qweight": pack_stream(codes.t(), 4), "qzeros": pack_stream(zeros.t(), 4)}
            return {name: words.t().contiguous() for name, words in packed.items()} | {"scales": scale}
        scaled = -(zeros.float() * scale.float()).to(torch.float16)
        return {
            "qweight": interleave(codes),
            self.zeros_name: scaled.t().contiguous(),
            "scales": scale.t().contiguous(),
        }

    def _unpack_columns(self, words: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns columns [start, stop) of gemm's words; start is a multiple of `row_multiple`."""
        part = words[:, start * self.num_bits // 32 : -(-stop * self.num_bits // 32)]
        if self.num_bits != 4:
            return unpack_stream(part.t(), self.num_bits, stop - start).t()
        shifts = torch.tensor(_PLACES, dtype=torch.int32, device=words.device) * 4
        return ((part[:, :, None] >> shifts) & 15).flatten(1)[:, : stop - start]

    def _pack_columns(self, codes: torch.Tensor) -> torch.Tensor:
        if self.num_bits == 4:
            codes = reorder_columns(codes)
        return pack_stream(codes.t(), self.num_bits).t().contiguous()


def zeros_width(in_features: int, group_size: int) -> int:
    """Returns the words of zero points in a row, as AutoAWQ's `calculate_zeros_width`."""
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    words = -(-(in_features // group_size) // 8)
    return multiple * -(-words // multiple)


def _names_gemv(module: str, scales: TensorInfo, config: Mapping) -> bool:
    """Returns True if the config calls the layout gemv, for shapes that also fit gemm.

    Raises:
        FormatError: The config does not name the layout.
    """
    version = config.get("version") or config.get("checkpoint_format") or config.get("format")
    if version is None:
        raise FormatError(
            f"The AWQ layout of {module} is ambiguous: it can be gemm or gemv. Nothing was loaded.",
            file=scales.range.file,
            tensor=scales.name,
            expected="version in quantization_config",
            found=str(scales),
            fix="Restore the original version in config.json.",
        )
    return str(version).lower() == "gemv"


def _read_bits(module: str, config: Mapping) -> int:
    """Returns the bits of a code.

    Raises:
        FormatError: The config names a layout that is not one of AWQ's, or an invalid number of bits.
    """
    version = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
    if config.get("quant_method") == "awq" and str(version).lower() not in (
        "gemm",
        "gemv",
        "gemv_fast",
        "llm-awq",
    ):
        raise FormatError(
            f"version={version!r} is an AWQ layout that hfq does not support. Nothing was loaded.",
            tensor=module,
            file="config.json",
            expected="gemm, gemv, gemv_fast, or llm-awq",
            found=repr(version),
            fix="Export the checkpoint again with version='gemm'.",
        )
    return bounded_int(config, "bits", lambda bits: 2 <= bits <= 8, "2 to 8", module) or 4


def _guess_group_size(version: Version, in_features: int, scales: TensorInfo | None) -> int:
    """Returns the group size that the shape of the scales implies.

    It is used if the config does not state the group size.
    """
    if scales is None or len(scales.shape) != 2 or not all(scales.shape):
        return 128
    if version == "gemm":
        return max(in_features // scales.shape[0], 1)
    width = scales.shape[1 if version == "gemv" else 0] // 8
    sizes = {
        size
        for size in (32, 64, 128, 256, 512, 1024, in_features)
        if size <= in_features and in_features % size == 0
    }
    fitting = sorted(size for size in sizes if zeros_width(in_features, size) == width)
    if len(fitting) != 1:
        raise FormatError(
            f"The group size of an AWQ {version} layer is ambiguous. Nothing was loaded.",
            file=scales.range.file,
            tensor=scales.name,
            expected="group_size in quantization_config",
            found=f"{scales}, which fits groups of {fitting}",
            fix="Restore the original group_size in config.json.",
        )
    return fitting[0]
