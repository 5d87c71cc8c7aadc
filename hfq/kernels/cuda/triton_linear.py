"""Triton kernels for CUDA devices: GPTQ of 2, 3, 4, and 8 bits, and FP8.

The kernels read the checkpoint's bytes. Few activation rows are multiplied while the codes are decoded, tile
by tile. For more rows, the reference kernel dequantizes panels for the device's own product. As there, a
tile of the weight is rounded once to the activations' dtype, and products are summed in float32. If there
are few tiles, the input is split, and the parts are added in one order. Results are therefore the same in
every call.

Tested in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`); never run on a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from hfq.formats import ActivationScheme, Format
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import WORD_ONES, Gptq
from hfq.kernels import reference
from hfq.kernels.activations import quantize_activations

__all__ = [
    "FUSED_ROWS",
    "linear",
    "quantize_rows",
    "quantized_linear",
    "reason_against",
    "reason_against_scheme",
    "reason_missing",
]

FUSED_ROWS = 64
"""The most activation rows that are multiplied while decoding; more rows use panels.

Not tuned: published crossovers of such kernels are between 64 and 128 rows (vllm#2497).
"""

_PROGRAMS = 256
"""Target number of programs: about two per multiprocessor of a large GPU. Not tuned."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_SPLITS = 16
_BLOCK_N = 64
_BLOCK_K = 64
_QUANTIZED_AT_ONCE = 1024


def reason_missing() -> str | None:
    """Returns why this machine cannot run the kernels, or None."""
    if not torch.cuda.is_available():
        return "this machine has no CUDA device"
    return "triton is not installed" if importlib.util.find_spec("triton") is None else None


def reason_against(weight_format: Format, in_features: int, out_features: int) -> str | None:
    """Returns why the kernels cannot multiply by a layer, or None."""
    if type(weight_format) is Gptq:  # a subclass may interpret its codes differently
        return "it does not read gptq's bit planes" if weight_format.is_planar else None
    if type(weight_format) is Fp8:
        return "the layer is cut within a block" if weight_format.block_offset != (0, 0) else None
    return f"it does not read {weight_format.name}"


def reason_against_scheme(
    weight_format: Format, scheme: ActivationScheme, in_features: int, out_features: int
) -> str | None:
    """Returns why `quantized_linear` cannot multiply by a layer under a scheme, or None."""
    if type(weight_format) is not Fp8:
        return f"it does not read {weight_format.name}"
    if scheme.dtype != "e4m3":
        return f"it does not round to {scheme.dtype}"
    return reason_against(weight_format, in_features, out_features)


def linear(
    activations: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> torch.Tensor:
    """Computes `reference.linear`, and calls it for more than `FUSED_ROWS` rows."""
    rows = activations.reshape(-1, activations.shape[-1])
    if not 0 < rows.shape[0] <= FUSED_ROWS or not rows.shape[1] or rows.dtype not in _DTYPES:
        return reference.linear(activations, tensors, weight_format)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out_features = weight_format.shape(tensors)[0]
    launch = _launch_gptq if isinstance(weight_format, Gptq) else _launch_fp8
    product = _Product(rows, out_features)
    launch(product, tensors, weight_format)  # type: ignore[arg-type]
    return _finish(product, activations, tensors)


def quantized_linear(
    activations: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Format,
    scheme: ActivationScheme,
) -> torch.Tensor:
    """Computes `linear` of activations rounded as by `quantize_activations`.

    One kernel rounds the activations if each token or group has a scale.
    """
    rows = activations.reshape(-1, activations.shape[-1])
    is_fused = scheme.scale_name is None and scheme.strategy != "tensor"
    if not is_fused or not 0 < rows.shape[0] <= FUSED_ROWS or not rows.shape[1]:
        return linear(quantize_activations(activations, scheme, tensors), tensors, weight_format)
    codes, scales = quantize_rows(rows, scheme)
    product = _Product(rows, weight_format.shape(tensors)[0])
    _launch_fp8(product, tensors, weight_format, (codes, scales, _group_size(rows, scheme)))  # type: ignore[arg-type]
    return _finish(product, activations, tensors)


def quantize_rows(rows: torch.Tensor, scheme: ActivationScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds activations to e4m3 under a scale for each token or group, in one kernel.

    Args:
        rows: [tokens, in_features], float32, bfloat16 or float16.
        scheme: A dynamic scheme of strategy token or group.

    Returns:
        Codes, float8_e4m3fn [tokens, in_features], and scales, float32 [tokens, groups]. The products of both
        equal the result of `quantize_activations`.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    (count, in_features), group_size = rows.shape, _group_size(rows, scheme)
    groups = -(-in_features // group_size)
    codes = torch.empty(count, in_features, dtype=torch.int8, device=rows.device)
    scales = torch.empty(count, groups, dtype=torch.float32, device=rows.device)
    block = min(_QUANTIZED_AT_ONCE, 1 << (group_size - 1).bit_length())
    with torch.cuda.device_of(rows):
        _device().quantize_e4m3[(count, groups)](
            rows,
            codes,
            scales,
            in_features,
            group_size,
            rows.stride(0),
            scheme.upper_bound or 0.0,
            HAS_BOUND=scheme.upper_bound is not None,
            BLOCK=block,
            STEPS=-(-group_size // block),
        )
    return codes.view(torch.float8_e4m3fn), scales


def _group_size(rows: torch.Tensor, scheme: ActivationScheme) -> int:
    return scheme.group_size if scheme.strategy == "group" and scheme.group_size else rows.shape[1]


class _Product:
    """Buffer for the parts of a product, and the launch options of its kernel."""

    def __init__(self, rows: torch.Tensor, out_features: int) -> None:
        self.rows, self.out_features = rows, out_features
        count, in_features = rows.shape
        self.block_m = 16 if count <= 16 else 32 if count <= 32 else 64
        tiles = -(-count // self.block_m) * -(-out_features // _BLOCK_N)
        blocks = -(-in_features // _BLOCK_K)
        splits = max(min(_PROGRAMS // max(tiles, 1), _MOST_SPLITS, blocks), 1)
        self.steps = -(-blocks // splits)
        self.splits = -(-blocks // self.steps)
        self.partial = torch.empty(self.splits, count, out_features, dtype=torch.float32, device=rows.device)

    @property
    def grid(self) -> tuple[int, int, int]:
        return -(-self.rows.shape[0] // self.block_m), -(-self.out_features // _BLOCK_N), self.splits

    def options(self) -> dict[str, Any]:
        """Returns the dtypes and the tile sizes as keyword arguments of a kernel."""
        own = _triton_dtypes()[self.rows.dtype]
        dot = _triton_dtypes()[torch.float32] if _is_interpreted() else own
        return {
            "DTYPE": own,
            "DOT": dot,
            "BLOCK_M": self.block_m,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": _BLOCK_K,
            "STEPS": self.steps,
        }


def _launch_gptq(product: _Product, tensors: Mapping[str, torch.Tensor], weight_format: Gptq) -> None:
    rows = product.rows
    scales = tensors["scales"].contiguous()
    zeros = tensors["qzeros"].contiguous()
    in_features = rows.shape[1]
    index = tensors["g_idx"].contiguous() if weight_format.act_order else zeros
    span = in_features if weight_format.group_size == -1 else weight_format.group_size
    with torch.cuda.device_of(rows):
        _device().gptq_linear[product.grid](
            rows,
            tensors["qweight"].contiguous(),
            zeros,
            scales,
            index,
            product.partial,
            rows.shape[0],
            product.out_features,
            in_features,
            span,
            rows.stride(0),
            zeros.shape[1],
            BITS=weight_format.num_bits,
            READING=weight_format.zero_reading,
            ONES=WORD_ONES.get(weight_format.num_bits, 0),
            HAS_INDEX=weight_format.act_order,
            **product.options(),
        )


def _launch_fp8(
    product: _Product,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Fp8,
    quantized: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> None:
    in_features = product.rows.shape[1]
    scale = tensors[weight_format.scale_name]
    is_power = scale.element_size() == 1
    scale = (scale.view(torch.uint8) if is_power else scale).contiguous()
    block_out, block_in, stride = _sharing(weight_format, scale, product.out_features, in_features)
    rows, row_scales, row_group = quantized or (product.rows, product.partial, in_features)
    with torch.cuda.device_of(product.rows):
        _device().fp8_linear[product.grid](
            rows.view(torch.int8) if quantized else rows,
            row_scales,
            tensors["weight"].contiguous().view(torch.int8),
            scale,
            product.partial,
            rows.shape[0],
            product.out_features,
            in_features,
            rows.stride(0),
            row_group,
            -(-in_features // row_group),
            block_out,
            block_in,
            stride,
            IS_QUANTIZED=quantized is not None,
            IS_E4M3=weight_format.codes_dtype == "F8_E4M3",
            IS_POWER=is_power,
            DIVIDES=weight_format.reciprocal,
            **product.options(),
        )


def _sharing(
    weight_format: Fp8, scale: torch.Tensor, out_features: int, in_features: int
) -> tuple[int, int, int]:
    """Returns the outputs and inputs that share a scale, and the stride of scales.

    The stride is the number of scales from one run of such outputs to the next.
    """
    if weight_format.strategy == "tensor":
        return out_features, in_features, 0
    if weight_format.strategy == "channel":
        return 1, in_features, 1
    if weight_format.strategy == "group":
        return 1, weight_format.group_size or in_features, scale.shape[-1]
    block = weight_format.block_structure or (128, 128)
    return *block, scale.shape[2 if scale.dim() == 4 else -1]


def _finish(
    product: _Product, activations: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Adds the parts and the bias.

    The result is a new tensor, since code after a layer may write into its output.
    """
    shape = (*activations.shape[:-1], product.out_features)
    result = torch.empty(shape, dtype=activations.dtype, device=activations.device)
    result.view(-1, product.out_features).copy_(
        product.partial[0] if product.splits == 1 else product.partial.sum(0)
    )
    bias = tensors.get("bias")
    if bias is not None:
        result += bias.to(result.dtype)
    return result


def _device() -> Any:
    from hfq.kernels.cuda import triton_device

    return triton_device


@functools.cache
def _triton_dtypes() -> dict[torch.dtype, Any]:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _is_interpreted() -> bool:
    """Returns True if kernels run in Triton's interpreter; fixed when the kernels are defined."""
    return type(_device().gptq_linear).__name__ == "InterpretedFunction"
