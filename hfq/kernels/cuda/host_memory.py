"""Registration of host memory with CUDA, so that copies from it are asynchronous."""

from __future__ import annotations

import logging

import torch

__all__ = ["pin", "unpin"]

logger = logging.getLogger("hfq")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


def pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Pins host memory for all CUDA devices.

    A failure is logged. Copies from the memory are correct then, but do not overlap with computation.

    Args:
        memory: uint8, in host memory.
        device: The device whose context is used, so that none is created on another device.

    Returns:
        True if the memory is pinned; `unpin` must be called before it is unmapped.
    """
    if not memory.numel():
        return False
    with torch.cuda.device(device):
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))
        if status != 0:
            _clear_error()
            logger.warning(
                "hfq: %d bytes of host memory could not be pinned (CUDA error %d); copies will not overlap",
                memory.numel(),
                status,
            )
    return status == 0


def unpin(memory: torch.Tensor) -> None:
    """Unpins memory that `pin` pinned."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _clear_error() -> None:
    """Takes the pending error, which the next unrelated kernel launch would raise otherwise."""
    clear = getattr(torch.cuda.cudart(), "cudaGetLastError", None)
    if clear is not None:
        clear()
