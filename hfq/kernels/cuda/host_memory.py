"""Registration of host memory with CUDA, so that copies from it are asynchronous."""

from __future__ import annotations

import logging

import torch

__all__ = ["can_pin", "pin", "unpin"]

logger = logging.getLogger("hfq")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


def can_pin(device: torch.device) -> bool:
    """Returns True if the runtime of an accelerator pins existing memory, as CUDA's does."""
    return hasattr(torch.get_device_module(device), "cudart")


def pin(address: int, nbytes: int, device: torch.device) -> bool:
    """Pins existing host memory for all devices of the runtime.

    A failure is logged. Copies from the memory are correct then, but do not overlap with computation.

    Args:
        address: Address of the first byte.
        nbytes: Number of bytes, above 0.
        device: The device whose context is used, so that none is created on another device.

    Returns:
        True if the memory is pinned; `unpin` must be called before it is unmapped.
    """
    module = torch.get_device_module(device)
    with module.device(device):
        status = int(module.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if status != 0:
            _clear_error(device)
            logger.warning(
                "hfq: %d bytes of host memory could not be pinned (CUDA error %d); copies will not overlap",
                nbytes,
                status,
            )
    return status == 0


def unpin(address: int, device: torch.device) -> None:
    """Unpins memory that `pin` pinned."""
    torch.get_device_module(device).cudart().cudaHostUnregister(address)


def _clear_error(device: torch.device) -> None:
    """Takes the pending error, which the next unrelated kernel launch would raise otherwise."""
    clear = getattr(torch.get_device_module(device).cudart(), "cudaGetLastError", None)
    if clear is not None:
        clear()
