"""Panels of AWQ's gemm in plain torch, in the order that its codes lie in: [in_features, rows], so that nothing is transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch

from hfq.formats.awq import Awq
from hfq.formats.codecs.thread_buffers import thread_buffer

__all__ = ["PART_NBYTES", "fill_awq", "is_in_columns"]

PART_NBYTES = 1 << 20
"""The most bytes of float32 that a panel is made of at once, unless a group has more."""


def is_in_columns(weight_format: object) -> TypeGuard[Awq]:
    """Whether `fill_awq` takes this format."""
    return isinstance(weight_format, Awq) and weight_format.version == "gemm"


def fill_awq(
    weight_format: Awq, tensors: Mapping[str, torch.Tensor], start: int, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """Output rows [start, start + rows) of the weight: [rows, in_features], rounded to `dtype`, a transposed view of a kept buffer."""
    in_features, groups = tensors["qweight"].shape[0], tensors["scales"].shape[0]
    panel = thread_buffer("panel", dtype, torch.device("cpu"), in_features * rows).view(in_features, rows)
    stop, span = start + rows, in_features // groups
    zeros = weight_format.look_up_columns(tensors[weight_format.zeros_name], start, stop)[:, None]
    scales = tensors["scales"][:, None, start:stop].to(torch.float32)
    multiple = 1 if groups == 1 else span
    step = max(PART_NBYTES // (4 * max(rows, 1)) // multiple, 1) * multiple
    for first in range(0, in_features, step):
        part = panel[first : first + step]
        weight = weight_format.look_up_columns(tensors["qweight"][first : first + step], start, stop)
        of = slice(first // span, -(-(first + len(part)) // span))
        weight.unflatten(0, (of.stop - of.start, -1)).sub_(zeros[of]).mul_(scales[of])
        part.copy_(weight)
    return panel.t()
