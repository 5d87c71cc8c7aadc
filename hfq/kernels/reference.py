"""The reference kernel: plain torch for every format and device.

Every other kernel is tested against it. The weight is dequantized panel by panel. All calls of a thread
reuse one buffer, so that no call allocates the weight as floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from hfq.formats import Format
from hfq.formats.codecs.thread_buffers import thread_buffer

__all__ = ["ACCELERATOR_PANEL_NBYTES", "PANEL_NBYTES", "linear", "linear_grad"]

PANEL_NBYTES = 1 << 20
"""Bytes of a float32 panel on a CPU, unless `row_multiple` rows need more."""

ACCELERATOR_PANEL_NBYTES = 16 << 20
"""Bytes of a float32 panel on other devices, where panels require several launches. Not tuned."""


def linear(
    activations: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> torch.Tensor:
    """Computes `activations @ W.T (+ bias)`, with W rounded once to the activations' dtype.

    Args:
        activations: [..., in_features], float32, bfloat16 or float16.
        tensors: The module's tensors by local name, on the activations' device.
        weight_format: The format of the tensors.

    Returns:
        [..., out_features] in the activations' dtype.
    """
    rows = activations.reshape(-1, activations.shape[-1])
    out_features, _ = weight_format.shape(tensors)
    result = rows.new_empty(
        *activations.shape[:-1], out_features
    )  # no view: code after a layer may write into its output
    flat = result.view(rows.shape[0], out_features)
    for start, panel in _panels(tensors, weight_format, activations.dtype):
        torch.mm(rows, panel.t(), out=flat[:, start : start + panel.shape[0]])
    bias = tensors.get("bias")
    if bias is not None:
        result += bias.to(result.dtype)
    return result


def linear_grad(
    grad: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> torch.Tensor:
    """Computes the gradient of `linear` for its activations.

    The gradient is `grad @ W`, summed over panels in float32.

    Args:
        grad: [..., out_features].
        tensors: The module's tensors by local name, on the gradient's device.
        weight_format: The format of the tensors.

    Returns:
        [..., in_features] in the gradient's dtype.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    _, in_features = weight_format.shape(tensors)
    result = torch.zeros(rows.shape[0], in_features, dtype=torch.float32, device=grad.device)
    for start, panel in _panels(tensors, weight_format, grad.dtype):
        result += rows[:, start : start + panel.shape[0]] @ panel
    return result.to(grad.dtype).view(*grad.shape[:-1], in_features)


def _panels(
    tensors: Mapping[str, torch.Tensor], weight_format: Format, dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (first output row, [rows, in_features] in `dtype`) of each panel.

    The next panel overwrites the previous one.
    """
    out_features, in_features = weight_format.shape(tensors)
    device = next(iter(tensors.values())).device
    multiple = weight_format.row_multiple
    nbytes = PANEL_NBYTES if device.type == "cpu" else ACCELERATOR_PANEL_NBYTES
    step = max(nbytes // (4 * max(in_features, 1)) // multiple, 1) * multiple
    for start in range(0, out_features, step):
        rows = min(step, out_features - start)
        panel = thread_buffer("panel", torch.float32, device, rows * in_features).view(rows, in_features)
        weight_format.dequantize_into(panel, tensors, start)
        if dtype != torch.float32:
            panel = (
                thread_buffer("panel", dtype, device, rows * in_features).view(rows, in_features).copy_(panel)
            )
        yield start, panel
