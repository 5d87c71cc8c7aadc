"""Quantization of a float layer by rounding to nearest."""

from __future__ import annotations

import functools
import math

import torch

from hfq.errors import SetupError
from hfq.formats.base import Format
from hfq.formats.codecs.dtypes import safetensors_dtype

__all__ = ["check_finite_weight", "round_weight", "rounded_tensors"]

_ROWS = 128
"""Output rows of a small layer that is quantized to find the tensors of a format.

They are a multiple of the blocks and words of every format.
"""


def round_weight(name: str, weight: torch.Tensor, weight_format: Format) -> dict[str, torch.Tensor]:
    """Quantizes a layer by rounding to nearest.

    Args:
        name: The layer's name, for messages.
        weight: float32 [out, in].
        weight_format: The format of the result.

    Returns:
        The tensors of `rounded_tensors`, by local name.

    Raises:
        SetupError: A weight is not finite.
        FormatError: The format cannot hold the weight.
    """
    check_finite_weight(name, weight)
    return weight_format.quantize(weight)


def check_finite_weight(name: str, weight: torch.Tensor) -> None:
    """Raises an error if a weight [out, in] contains NaN or infinity.

    Raises:
        SetupError: Names the layer.
    """
    wrong = sum(int((~torch.isfinite(part)).sum()) for part in weight.split(_ROWS))
    if wrong:
        raise SetupError(
            "The layer cannot be quantized, because a weight is not finite.",
            tensor=name,
            expected="finite weights",
            found=f"{wrong} weights that are not finite",
            fix="Download the checkpoint again.",
        )


def rounded_tensors(
    weight_format: Format, out_features: int, in_features: int
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Returns the tensors that `weight_format.quantize` creates for a layer of this size.

    Returns:
        (safetensors dtype, shape, bytes) by local name.

    Raises:
        FormatError: The format cannot hold a layer of this size.
    """
    shapes = {spec.name: spec.shape for spec in weight_format.tensor_specs(in_features, out_features)}
    found = {}
    for local, (dtype, itemsize) in _dtypes(weight_format).items():
        found[local] = dtype, shapes[local], math.prod(shapes[local]) * itemsize
    return found


@functools.lru_cache(maxsize=64)
def _dtypes(weight_format: Format) -> dict[str, tuple[str, int]]:
    """Returns the safetensors dtype and the bytes per element of each tensor.

    They come from a small quantized layer, because a spec may allow several dtypes.
    """
    columns = math.lcm(_ROWS, max(1, getattr(weight_format, "group_size", None) or 1))
    with torch.device("cpu"):  # transformers builds meta models under torch.device("meta")
        made = weight_format.quantize(torch.zeros(_ROWS, columns))
    return {local: (safetensors_dtype(tensor.dtype), tensor.dtype.itemsize) for local, tensor in made.items()}
