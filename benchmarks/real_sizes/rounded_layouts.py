"""Layouts of linear layers whose tensors a format of hfq makes from normal weights.

Uniform codes would not do: those of NF4 have another mean than zero, so that each layer would amplify one
direction and all tokens would become the same; some of NVFP4's scales are NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints import LAYOUTS
from hfq.formats import Format
from hfq.formats.awq import Awq
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.compressed_tensors import IntQuantized
from hfq.formats.nvfp4 import Nvfp4
from hfq.machine_profile.probe_models import GROUP, Planned, WeightLayout
from hfq.recipes.scheme import group_config
from hfq.recipes.schemes import SCHEMES

__all__ = ["ROUNDED", "find_layout"]

_DEVIATION = 0.02
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
}
_NVFP4 = {
    "format": "nvfp4-pack-quantized",
    "weights": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "symmetric": True,
        "group_size": 16,
    },
    "input_activations": None,
}
_INT8 = {
    "format": "int-quantized",
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": None,
}


def _scheme(name: str) -> tuple[Format, Mapping[str, Any]]:
    scheme = SCHEMES[name]
    return scheme.make(scheme.bits[0]), scheme.quantization_config(scheme.bits[0], ["lm_head"])


ROUNDED: dict[str, Callable[[], tuple[Format, Mapping[str, Any]]]] = {
    "awq": lambda: (Awq(version="gemm", group_size=GROUP), _AWQ),
    "nf4": lambda: (Bnb4Bit(), _NF4),
    "mxfp4": lambda: _scheme("mxfp4"),
    "nvfp4": lambda: (Nvfp4(), group_config(_NVFP4, ["lm_head"])),
    "int8": lambda: (IntQuantized(scale_shape=(2, 1)), group_config(_INT8, ["lm_head"])),
    "w8a16": lambda: _scheme("w8a16"),
}
"""{name: function that returns a format and the `quantization_config` of a checkpoint}."""


def find_layout(name: str) -> WeightLayout:
    """Returns a layout: one of `benchmarks.checkpoints`, or of `ROUNDED`.

    A rounded one keeps the quantized weights of each size of layer. The layers of a model have the same
    weights with their codes rotated, so that no two layers are equal.
    """
    if name in LAYOUTS:
        return LAYOUTS[name]
    weight_format, config = ROUNDED[name]()
    rounded = functools.cache(functools.partial(_rounded, weight_format))
    return WeightLayout(name, dict(config), lambda rows, columns: dict(rounded(rows, columns)))


def _rounded(weight_format: Format, rows: int, columns: int) -> dict[str, Planned]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * _DEVIATION
    return {
        local: _planned(tensor, is_rotated=local == weight_format.codes_name)
        for local, tensor in weight_format.quantize(weight).items()
    }


def _planned(tensor: torch.Tensor, is_rotated: bool) -> Planned:
    raw = tensor.contiguous().reshape(tensor.shape or (1,)).view(torch.uint8).numpy()

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.roll(raw, int(random.integers(len(raw))), axis=0) if is_rotated else raw

    return Planned(safetensors_dtype(tensor.dtype), tuple(tensor.shape), draw)
