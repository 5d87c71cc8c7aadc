"""Pinned host memory: copies from it run while an accelerator computes.

CUDA pins memory that exists already; other accelerators pin what they allocate themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Collection, Iterator

import numpy as np
import torch

from hfq.kernels.cuda import host_memory as registration
from hfq.offload.host_memory import huge_buffer
from hfq.offload.unit_layout import PAGE

__all__ = ["PIECE_NBYTES", "can_pin_in_place", "pin_in_place", "pinned_memory"]

PIECE_NBYTES = 256 << 20
"""Bytes that are pinned at a time. No copy may cross the end of a piece."""

_MADV_DONTFORK = getattr(mmap, "MADV_DONTFORK", 10)


def can_pin_in_place(devices: Collection[torch.device]) -> bool:
    """Returns True if all of these accelerators can pin memory that exists already."""
    return all(registration.can_pin(device) for device in devices)


def pinned_memory(
    nbytes: int, devices: Collection[torch.device], is_in_background: bool = False
) -> torch.Tensor:
    """Returns zeroed pinned memory that starts at a page: uint8 [nbytes].

    It is freed after all copies from it.

    Args:
        nbytes: The size.
        devices: The accelerators that copy from it.
        is_in_background: True to return before the memory is pinned. Earlier copies do not overlap with
            computation.
    """
    if nbytes and can_pin_in_place(devices):
        return pin_in_place(huge_buffer(nbytes, is_touched=True).numpy(), devices, is_in_background)
    with torch.inference_mode(False):
        whole = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True)
        first = -whole.data_ptr() % PAGE
        owner = whole[first : first + nbytes].zero_().numpy().view(_Owner)
        weakref.finalize(owner, _finish_copies, tuple(devices))
        return torch.from_numpy(owner)


def pin_in_place(
    memory: np.ndarray, devices: Collection[torch.device], is_in_background: bool
) -> torch.Tensor:
    """Pins existing memory, and returns a tensor of it.

    The memory is unpinned when the last view of the tensor is freed, after all copies from it. The child of a
    fork does not have it.

    Args:
        memory: uint8 [nbytes], from the start of a page. It is not pinned yet.
        devices: The accelerators that copy from it, which must be able to pin existing memory.
        is_in_background: True to return before the memory is pinned.
    """
    owner = memory.view(_Owner)  # its finalizer runs before the memory is unmapped
    pieces = _Pieces(owner.ctypes.data, owner.nbytes, tuple(devices))
    weakref.finalize(owner, pieces.release)
    if is_in_background:
        threading.Thread(target=pieces.pin, name="hfq-pin", daemon=True).start()
    else:
        pieces.pin()
    with torch.inference_mode(False):
        return torch.from_numpy(owner)


def _finish_copies(devices: Collection[torch.device]) -> None:
    """Waits for everything that devices have been given; errors of it are not raised here."""
    for device in devices:
        with contextlib.suppress(RuntimeError):
            torch.accelerator.synchronize(device)


class _Owner(np.ndarray):
    """An array that can have a finalizer."""


class _Pieces:
    """Pins one range of addresses piece by piece, and unpins it again."""

    def __init__(self, address: int, nbytes: int, devices: tuple[torch.device, ...]) -> None:
        self._address, self._nbytes, self._devices = address, nbytes, devices
        self._lock = threading.Lock()
        self._pinned: list[int] = []
        self._is_released = False

    def pin(self) -> None:
        """Pins all pieces, until the memory is released."""
        with self._lock:
            if self._is_released:  # its addresses may belong to other memory by now
                return
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(self._address), ctypes.c_size_t(self._nbytes), _MADV_DONTFORK
            )
        for first, nbytes in self._ranges():
            with self._lock:
                if self._is_released or not registration.pin(first, nbytes, self._devices[0]):
                    return
                self._pinned.append(first)

    def release(self) -> None:
        """Waits for the copies of all devices, and unpins the memory."""
        self._is_released = True
        with self._lock:
            _finish_copies(self._devices)
            while self._pinned:
                registration.unpin(self._pinned.pop(), self._devices[0])

    def _ranges(self) -> Iterator[tuple[int, int]]:
        for offset in range(0, self._nbytes, PIECE_NBYTES):
            yield self._address + offset, min(PIECE_NBYTES, self._nbytes - offset)
