"""Tables of values that every device holds once."""

from __future__ import annotations

import torch

__all__ = ["constant"]

_tables: dict[tuple[tuple[float, ...], torch.device], torch.Tensor] = {}


def constant(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Returns values as float32 on a device, copied there by the first call and kept.

    The host waits for that copy, so that every stream may read the table. Nobody may write into it. It is
    created outside inference mode, so that autograd may save it. A FakeTensor belongs to the mode that
    created it and is not kept.
    """
    table = _tables.get((values, device))
    if table is None:
        with torch.inference_mode(False):
            table = torch.tensor(values, dtype=torch.float32, device=device)
        if type(table) is torch.Tensor:
            _tables[values, device] = table
    return table
