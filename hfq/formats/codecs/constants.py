"""Tables of values that every device holds once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

__all__ = ["constant", "table"]

_tables: dict[tuple[Hashable, torch.device], torch.Tensor] = {}


def constant(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Returns values as float32 on a device, as `table` does."""
    return table(values, lambda: torch.tensor(values, dtype=torch.float32), device)


def table(key: Hashable, make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns a tensor on a device, made and copied there by the first call and kept.

    The host waits for that copy, so that every stream may read the table. Nobody may write into it. It is
    created outside inference mode, so that autograd may save it. A FakeTensor belongs to the mode that
    created it and is not kept.

    Args:
        key: The name of the table.
        make: Makes the tensor on the CPU.
        device: The device.
    """
    found = _tables.get((key, device))
    if found is None:
        with torch.inference_mode(False):
            found = make().to(device)
        if type(found) is torch.Tensor:
            _tables[key, device] = found
    return found
