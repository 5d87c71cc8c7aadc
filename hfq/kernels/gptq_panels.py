"""Panels of GPTQ in plain torch, in the order that its codes lie in: [in_features, rows], so that nothing is transposed.

The integers and the products are those of `Gptq.dequantize_into`, bit for bit, in buffers that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.formats.buffers import thread_buffer
from hfq.formats.gptq import Gptq

__all__ = ["fill_gptq", "is_fillable"]

_CPU = torch.device("cpu")


def is_fillable(weight_format: object) -> bool:
    """Whether each of the codes lies in one word."""
    return isinstance(weight_format, Gptq) and not weight_format.is_planar and 32 % weight_format.num_bits == 0


def fill_gptq(weight_format: Gptq, tensors: Mapping[str, torch.Tensor], start: int, rows: int) -> torch.Tensor:
    """Output rows [start, start + rows) of the weight: float32 [rows, in_features], a transposed view of a kept buffer."""
    words, share = tensors["qweight"][:, start : start + rows], 32 // weight_format.num_bits
    in_features = words.shape[0] * share
    codes = thread_buffer("codes", torch.int32, _CPU, in_features * rows).view(-1, share, rows)
    for place in range(share):
        torch.bitwise_right_shift(words, place * weight_format.num_bits, out=codes[:, place])
    codes = codes.bitwise_and_((1 << weight_format.num_bits) - 1).view(in_features, rows)
    panel = thread_buffer("panel", torch.float32, _CPU, in_features * rows).view(in_features, rows)
    scales = tensors["scales"][:, start : start + rows].to(torch.float32)
    zeros = weight_format.zero_points(tensors["qzeros"], start, start + rows)
    span = in_features if weight_format.group_size == -1 else weight_format.group_size
    if not weight_format.act_order and span * scales.shape[0] == in_features:
        grouped = panel.view(-1, span, rows)
        torch.sub(codes.view(-1, span, rows), zeros[:, None], out=grouped)
        grouped.mul_(scales[:, None])
        return panel.t()
    group = tensors["g_idx"].to(torch.int64) if weight_format.act_order else torch.arange(in_features) // span
    spread = thread_buffer("spread", torch.int32, _CPU, in_features * rows).view(in_features, rows)
    panel.copy_(codes.sub_(torch.index_select(zeros.to(torch.int32), 0, group, out=spread)))
    panel.mul_(torch.index_select(scales, 0, group, out=spread.view(torch.float32)))
    return panel.t()
