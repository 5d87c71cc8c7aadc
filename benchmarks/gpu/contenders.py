"""Products to compare: hfq's by format, and those of torch and bitsandbytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.bench import NotAvailable
from benchmarks.gpu.models import MODELS
from hfq.formats.base import Format
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.compressed_tensors import IntQuantized, PackQuantized
from hfq.formats.nvfp4 import Nvfp4
from hfq.kernels.layer_tensors import LayerTensors
from hfq.kernels.registry import choose_kernel
from hfq.tensor_spec import ByteRange, TensorInfo

__all__ = ["CONTENDERS", "FORMATS", "PLAIN", "Product", "hfq_product"]

PLAIN = "bf16"
GROUP = 128

Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Product:
    """A product with one weight.

    Attributes:
        kernel: Name of the kernel.
        nbytes: Bytes of the weight.
        bind: Returns the product with a copy of the weight of its own.
    """

    kernel: str
    nbytes: int
    bind: Callable[[], Multiply]


def hfq_product(name: str, size: tuple[int, int], device: torch.device) -> Product:
    """Returns hfq's product with a random weight.

    Args:
        name: Name of the format, one of `FORMATS`.
        size: (out, in) of the weight.
        device: The accelerator.
    """
    made, config = FORMATS[name](size[1])
    with torch.device(device):
        tensors = made.quantize(torch.randn(size, device=device).mul_(0.02))
    infos = {
        local: TensorInfo(
            f"m.{local}", safetensors_dtype(t.dtype), tuple(t.shape), ByteRange("m", 0, t.nbytes)
        )
        for local, t in tensors.items()
    }
    detected = type(made).detect("m", infos, config)
    if detected is None:
        raise NotAvailable(f"{name} is not detected")
    settled = detected.sized(size[1], size[0]).resolve("m", tensors)
    kernel = choose_kernel("auto", settled, size[1], size[0], device.type)

    def bind() -> Multiply:
        held = LayerTensors({local: tensor.clone() for local, tensor in tensors.items()})
        return lambda rows: kernel.linear(rows, held, settled)

    return Product(kernel.name, sum(tensor.nbytes for tensor in tensors.values()), bind)


def _compressed(format: str, num_bits: int, type: str, **options: Any) -> dict[str, Any]:
    weights = {"num_bits": num_bits, "type": type, "symmetric": True, **options}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


def _packed(in_features: int) -> tuple[Format, dict[str, Any]]:
    config = _compressed("pack-quantized", 4, "int", strategy="group", group_size=GROUP)
    return PackQuantized(num_bits=4, scale_shape=(1, in_features // GROUP)), config


def _int8(in_features: int) -> tuple[Format, dict[str, Any]]:
    return IntQuantized(scale_shape=(2, 1)), _compressed("int-quantized", 8, "int", strategy="channel")


def _nvfp4(in_features: int) -> tuple[Format, dict[str, Any]]:
    config = _compressed("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16)
    return Nvfp4(), config


def _of_model(name: str) -> Callable[[int], tuple[Format, dict[str, Any]]]:
    return lambda _: (MODELS[name].format, MODELS[name].config)


FORMATS: dict[str, Callable[[int], tuple[Format, dict[str, Any]]]] = {
    "gptq4": _of_model("8b-gptq4"),
    "int4 rows": _packed,
    "mxfp4": _of_model("moe-mxfp4"),
    "fp8": _of_model("8b-fp8"),
    "awq": _of_model("8b-awq"),
    "nvfp4": _nvfp4,
    "nf4": _of_model("8b-nf4"),
    "int8": _int8,
}
"""Formats and their quantization_config by name, for a number of input channels."""


def _plain(size: tuple[int, int], device: torch.device) -> Product:
    weight = torch.randn(size, device=device).mul_(0.02).bfloat16()

    def bind() -> Multiply:
        own = weight.clone()
        return lambda rows: functional.linear(rows, own)

    return Product("cuBLAS", weight.nbytes, bind)


def _scaled_by_tensor(size: tuple[int, int], device: torch.device) -> Product:
    """Returns `torch._scaled_mm` with one scale each; the rows are rounded before."""
    _needs_cuda(device)
    weight = torch.randn(size, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)

    def bind() -> Multiply:
        own = weight.clone()

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            codes = rows.to(torch.float8_e4m3fn)
            return torch._scaled_mm(codes, own.t(), one, one, out_dtype=torch.bfloat16)

        return multiply

    return Product("torch._scaled_mm", weight.nbytes, bind)


def _scaled_by_block(size: tuple[int, int], device: torch.device) -> Product:
    """Returns `F.scaled_mm` with scales of 1 x 128 and 128 x 128; the rows are rounded before.

    cuBLAS needs the scales of the weight with the blocks of a column together, padded to 4.
    """
    _needs_cuda(device)
    out_features, in_features = size
    weight = torch.randn(size, device=device).to(torch.float8_e4m3fn)
    padded = -(-(in_features // GROUP) // 4) * 4
    scales = torch.ones(out_features // GROUP, padded, device=device).t()
    kinds = functional.ScalingType

    def bind() -> Multiply:
        own = weight.clone()

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            count = -(-len(rows) // 4) * 4
            codes = functional.pad(rows, (0, 0, 0, count - len(rows))).to(torch.float8_e4m3fn)
            row_scales = torch.ones(in_features // GROUP, count, device=device).t()
            return functional.scaled_mm(
                codes, own.t(), row_scales, kinds.BlockWise1x128, scales, kinds.BlockWise128x128
            )[: len(rows)]

        return multiply

    return Product("F.scaled_mm", weight.nbytes + scales.nbytes, bind)


def _int4_of_torch(size: tuple[int, int], device: torch.device) -> Product:
    _needs_cuda(device)
    out_features, in_features = size
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    packed = torch._convert_weight_to_int4pack(codes, 8)
    scales = torch.full((in_features // GROUP, out_features, 2), 0.01, dtype=torch.bfloat16, device=device)

    def bind() -> Multiply:
        own = packed.clone()
        return lambda rows: torch._weight_int4pack_mm(rows, own, GROUP, scales)

    return Product("torch._weight_int4pack_mm", packed.nbytes + scales.nbytes, bind)


def _bitsandbytes(size: tuple[int, int], device: torch.device) -> Product:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise NotAvailable("bitsandbytes is not installed")
    import bitsandbytes

    weight = torch.randn(size, device=device).mul_(0.02).bfloat16()
    packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4")

    def bind() -> Multiply:
        own = packed.clone()
        return lambda rows: bitsandbytes.matmul_4bit(rows, own.t(), quant_state=state)

    return Product("bitsandbytes", packed.nbytes + state.absmax.nbytes, bind)


def _needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise NotAvailable(f"{device.type} has no such product")


CONTENDERS: dict[str, Callable[[tuple[int, int], torch.device], Product]] = {
    PLAIN: _plain,
    "torch fp8 by tensor": _scaled_by_tensor,
    "torch fp8 by block": _scaled_by_block,
    "torch int4": _int4_of_torch,
    "bitsandbytes nf4": _bitsandbytes,
}
"""Products of others by name. `bf16` is the one that all are compared with."""
