"""Methods of the tables by their names there, and the measurements of each table."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from benchmarks.quality.measure import Quantize, Subject
from hfq.formats import Format
from hfq.formats.fp8 import Fp8
from hfq.quantization.textbook.k_means import fixed, kmeans
from hfq.quantization.textbook.linear import absmax, zero_point
from hfq.recipes.recipe import Recipe

__all__ = [
    "ACT_ORDER",
    "INT8",
    "NUMBER_FORMATS",
    "WEIGHTS_ALONE",
    "measure_gptq",
    "measure_int8",
    "measure_kmeans",
    "measure_rounded",
    "measure_rtn",
]

ACT_ORDER = "GPTQ, by activation"
_KMEANS_STEPS = 20
_PAPER = {"damp_percent": 0.01, "clip_search": False}
"""GPTQ as in its paper. The defaults of hfq differ."""

INT8: dict[str, dict[str, Any]] = {
    "int8 absmax": {"granularity": "tensor"},
    "int8 zeropoint": {"granularity": "tensor", "symmetric": False},
    "int8 absmax row-wise": {"granularity": "row"},
    "int8 absmax vector-wise": {"granularity": "vector"},
    "int8 zeropoint vector-wise": {"granularity": "vector", "symmetric": False},
    "int8 absmax row-wise + decomposition": {"granularity": "row", "decomposes": True},
    "absmax LLM.int8()": {"granularity": "vector", "decomposes": True},
    "zeropoint LLM.int8()": {"granularity": "vector", "symmetric": False, "decomposes": True},
}
"""Rows of LLM.int8()'s table, without the float row.

Rows with decomposition multiply outlier features in floats.
"""

WEIGHTS_ALONE: dict[str, tuple[float, Quantize]] = {
    "W8sym-A16": (8, lambda weight: absmax(weight, 8).dequantize()),
    "W8asym-A16": (8, lambda weight: zero_point(weight, 8).dequantize()),
    "W4sym-A16": (4, lambda weight: absmax(weight, 4).dequantize()),
    "W4asym-A16": (4, lambda weight: zero_point(weight, 4).dequantize()),
    "W4sym-A16, groups of 64": (4, lambda weight: absmax(weight, 4, "group", 64).dequantize()),
    "W4asym-A16, groups of 64": (4, lambda weight: zero_point(weight, 4, "group", 64).dequantize()),
}
"""(bits of a code, rounding) by name. absmax by row is also GLM-130B's recipe."""


def _through(weight_format: Format) -> Quantize:
    return lambda weight: weight_format.dequantize(weight_format.quantize(weight))


NUMBER_FORMATS: dict[str, tuple[float, Quantize]] = {
    "FP8 E4M3, by row": (8, _through(Fp8(strategy="channel"))),
    "FP8 E4M3, by tensor": (8, _through(Fp8(strategy="tensor"))),
    "FP8 E5M2, by row": (8, _through(Fp8(codes_dtype="F8_E5M2", strategy="channel"))),
    "FP4 E2M1, blocks of 32": (4, lambda weight: fixed(weight, "fp4_e2m1").dequantize()),
    "FP4 E1M2, blocks of 32": (4, lambda weight: fixed(weight, "fp4_e1m2").dequantize()),
    "FP4 E3M0, blocks of 32": (4, lambda weight: fixed(weight, "fp4_e3m0").dequantize()),
    "NF4, blocks of 32": (4, lambda weight: fixed(weight, "nf4").dequantize()),
}
"""(bits of a code, rounding) by name, like `WEIGHTS_ALONE`."""


def measure_rtn(subject: Subject, bits: Iterable[int]) -> None:
    """Measures rounding to nearest on GPTQ's grid, with a scale and a zero point per row."""
    for each in bits:
        recipe = Recipe(method="rtn", bits=each, group_size=-1, sym=False)
        subject.round("RTN", each, _through(recipe.weight_format([])))


def measure_gptq(subject: Subject, bits: Iterable[int], by_activation: bool = True) -> None:
    """Measures GPTQ as in its paper, with channels in their own order and by decreasing activation."""
    for each in bits:
        subject.solve("GPTQ", each, act_group_aware=False, **_PAPER)
        if by_activation:
            subject.solve(ACT_ORDER, each, **_PAPER)


def measure_kmeans(subject: Subject, bits: Iterable[int]) -> None:
    """Measures k-means with one table per row."""
    for each in bits:
        subject.round("k-means, by row", each, functools.partial(_kmeans, num_bits=each))


def _kmeans(weight: torch.Tensor, num_bits: int) -> torch.Tensor:
    return kmeans(weight, num_bits, by_row=True, steps=_KMEANS_STEPS).dequantize()


def measure_rounded(subject: Subject, methods: Mapping[str, tuple[float, Quantize]]) -> None:
    """Measures weight-only rounding."""
    for name, (bits, quantize) in methods.items():
        subject.round(name, bits, quantize)


def measure_int8(subject: Subject, threshold: float, methods: Iterable[str] = tuple(INT8)) -> None:
    """Measures int8 products. Features from `threshold` on are multiplied in floats."""
    for name in methods:
        options = dict(INT8[name])
        decomposes = options.pop("decomposes", False)
        subject.multiply_int8(name, threshold=threshold if decomposes else None, **options)
