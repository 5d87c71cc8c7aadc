"""Accelerators of this machine, of any kind that torch knows, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import PlacementError

__all__ = [
    "Accelerator",
    "accelerator_kind",
    "check_room",
    "describe_accelerator",
    "free_nbytes",
    "list_accelerators",
]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator of this machine.

    Attributes:
        device: Device in a device map, such as `"cuda:0"`.
        model: Name of the hardware.
        total_nbytes: Bytes of its memory; 0 if torch does not tell.
        free_nbytes: Bytes that are free; None if torch does not tell.
    """

    device: str
    model: str
    total_nbytes: int
    free_nbytes: int | None

    def __str__(self) -> str:
        free = "" if self.free_nbytes is None else f", {self.free_nbytes / 1e9:.1f} GB free"
        size = f", {self.total_nbytes / 1e9:.1f} GB" if self.total_nbytes else ""
        return f"{self.device}: {self.model}{size}{free}"


def accelerator_kind() -> str | None:
    """Returns the device type of the accelerators that torch finds; None if it finds none."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and torch.accelerator.device_count() else None


def list_accelerators() -> list[str]:
    """Returns the accelerators that torch finds, as devices of a device map."""
    kind = accelerator_kind()
    if kind is None or kind == "mps":  # the one device of mps has no number
        return [] if kind is None else [kind]
    return [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]


def describe_accelerator(device: str) -> Accelerator:
    """Returns name and memory of an accelerator of this machine."""
    facts = getattr(torch.get_device_module(torch.device(device).type), "get_device_properties", None)
    found = None if facts is None else facts(torch.device(device).index)
    free, total = _memory(device) or (None, 0)
    return Accelerator(
        device, getattr(found, "name", device), int(getattr(found, "total_memory", total)), free
    )


def free_nbytes(device: str) -> int | None:
    """Returns the bytes that this process can still allocate on an accelerator.

    They include what torch's allocator keeps for later allocations. The result is None if torch does not tell
    the memory of this kind of accelerator.
    """
    found = _memory(device)
    if found is None:
        return None
    kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return found[0] + max(kept, 0)


def check_room(weights: Mapping[str, int], buffers: Mapping[str, int], is_limited: bool = False) -> None:
    """Raises an error if accelerators have less free memory than a load needs.

    Args:
        weights: Bytes of weights by device.
        buffers: Least bytes of the offload buffer by device.
        is_limited: True if the user's `max_memory` is why they are there.

    Raises:
        PlacementError: Names every accelerator that is too small, with its bytes.
    """
    needs = {device: (weights.get(device, 0), buffers.get(device, 0)) for device in {**weights, **buffers}}
    free = {device: free_nbytes(device) for device in needs if device not in ("cpu", "disk")}
    short = {device: room for device, room in free.items() if room is not None and room < sum(needs[device])}
    if not short:
        return
    expected = [
        f"{device}: {needs[device][0]:,} B of weights and {needs[device][1]:,} B of offload buffer"
        for device in short
    ]
    fix = 'Pass device_map="auto", move more modules to "cpu" or "disk", or free memory of the device.'
    if is_limited:
        limits = ", ".join(f"{device.partition(':')[2] or device}: {room}" for device, room in short.items())
        fix = f"Pass at most max_memory={{{limits}}}, leave max_memory out, or free memory of the device."
    raise PlacementError(
        f"{'max_memory' if is_limited else 'device_map'} places more on an accelerator than it has free. "
        f"Nothing was loaded.",
        expected="; ".join(expected),
        found="; ".join(f"{device}: {room:,} B free" for device, room in short.items()),
        fix=fix,
    )


def _memory(device: str) -> tuple[int, int] | None:
    """Returns (free, total) bytes of an accelerator; None if torch does not tell."""
    try:
        return torch.accelerator.get_memory_info(device)
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # its allocator has no such function
        return None
