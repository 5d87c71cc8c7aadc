"""Time of the interpreter for one call of a quantized layer, without the product."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from hfq.kernels.cpp.kernel import linear
from hfq.kernels.cpp.layer_struct import PRODUCT
from hfq.kernels.cpp.library import library
from hfq.modules.linear import QuantizedLinear

__all__ = ["host_seconds_per_layer"]

_PASSES = 20


def host_seconds_per_layer(model: nn.Module) -> float | None:
    """Measures the time that one call of a layer takes beyond its product.

    On a CPU, a Python function asks the C++ library for no rows, so that all but the product is measured. The
    call of this function is part of the time. On an accelerator, it is the time until the call returns, while
    the product may still run.

    Args:
        model: A loaded model.

    Returns:
        Seconds, of the fastest pass over the linear layers in memory of the first device. None without such
        layers, or if another kernel than `cpp` multiplies on the CPU.
    """
    layers = [
        module for module in model.modules() if isinstance(module, QuantizedLinear) and module.fits_graph()
    ]
    if not layers:
        return None
    device = layers[0].compute_device
    layers = [layer for layer in layers if layer.compute_device == device]
    compiled = library() if device.type == "cpu" else None
    if device.type == "cpu" and (
        compiled is None or any(layer.kernel.linear is not linear for layer in layers)
    ):
        return None
    inputs = [torch.zeros(1, layer.local_in_features, dtype=layer.dtype, device=device) for layer in layers]
    with torch.inference_mode(), _without_products(compiled):
        return min(_seconds(layers, inputs) for _ in range(_PASSES)) / len(layers)


def _seconds(layers: Sequence[QuantizedLinear], inputs: Sequence[torch.Tensor]) -> float:
    if inputs[0].device.type != "cpu":
        torch.accelerator.synchronize()
    started = time.perf_counter()
    for layer, activations in zip(layers, inputs, strict=True):
        layer(activations)
    return time.perf_counter() - started


@contextlib.contextmanager
def _without_products(compiled: ctypes.CDLL | None) -> Iterator[None]:
    """Makes the C++ library multiply no rows, in this process, until the context ends."""
    if compiled is None:
        yield
        return
    multiply, empty = compiled.hfq_linear, b""

    def multiply_no_rows(given: bytes) -> int:
        nonlocal empty
        if not empty:  # a layer's address is read before the number of rows
            address, *_ = PRODUCT.unpack(given)
            empty = PRODUCT.pack(address, 0, 0, 0, 0, 0, 1)
        multiply(empty)
        return 0

    compiled.hfq_linear = multiply_no_rows  # type: ignore[attr-defined]
    try:
        yield
    finally:
        compiled.hfq_linear = multiply  # type: ignore[attr-defined]
