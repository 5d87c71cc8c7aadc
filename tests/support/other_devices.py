"""Calls of the kernels of the CPU with tensors of which one is on another device."""

from collections.abc import Iterator

import torch

from hfq.formats import ActivationScheme
from hfq.formats.compressed_tensors import IntQuantized
from hfq.kernels.registry import KERNELS
from tests.support.kernel_layers import CASES, Case

__all__ = ["ON_CPU", "calls_with"]

ON_CPU = [name for name, kernel in KERNELS.items() if kernel.devices == ("cpu",)]
"""Names of the kernels that compute on a CPU alone."""

_BYTES = Case(IntQuantized(codes_dtype="I8", scale_shape=(64, 1)), 64, 64)


def calls_with(kernel_name: str, device: str) -> Iterator[tuple[str, tuple]]:
    """Yields (name of a tensor, arguments of `linear`), with that tensor on a device and all others on CPU."""
    kernel = KERNELS[kernel_name]
    for case in [_BYTES] if kernel.rounds else CASES.values():
        weight_format, tensors = case.make()
        activations = torch.randn(2, case.in_features)
        scheme = [ActivationScheme("token", dtype="int8")] if kernel.rounds else []
        yield "activations", (activations.to(device), tensors, weight_format, *scheme)
        for name, tensor in tensors.items():
            moved = {**tensors, name: tensor.to(device)}
            yield name, (activations, moved, weight_format, *scheme)
