"""Checks of the values of a module's small tensors.

Scales must be finite, and indices must be in range.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.errors import FormatError

__all__ = ["check_finite", "check_index", "check_positive", "with_common"]


def with_common(tensors: Mapping[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor] | None:
    """Returns stacked tensors of layers, with those of these names as the first layer has them.

    Returns None if a tensor of these names differs between the layers.
    """
    common = {name: tensors[name] for name in names if name in tensors}
    if not all(bool((tensor == tensor[:1]).all()) for tensor in common.values()):
        return None
    return {**tensors, **{name: tensor[0] for name, tensor in common.items()}}


def check_finite(module: str, name: str, scale: torch.Tensor) -> None:
    """Raises an error if a scale contains NaN or infinity.

    Raises:
        FormatError: Names the tensor and the first bad element.
    """
    if scale.is_floating_point() and scale.element_size() > 1 and scale.numel():
        least, largest = scale.aminmax()  # NaN if any value is, and much faster than `isfinite` of all
        if bool(least.isfinite() & largest.isfinite()):
            return
    bad = ~torch.isfinite(scale.to(torch.float32))
    if bad.any():
        position = bad.nonzero()[0].tolist() if scale.dim() else []
        raise FormatError(
            "A scale is not finite. Nothing was loaded.",
            tensor=f"{module}.{name}",
            expected="finite values",
            found=f"{scale[tuple(position)].item()} at {position}, {int(bad.sum())} in all",
            fix="Download the checkpoint again. If the error remains, report it to the checkpoint's author.",
        )


def check_positive(module: str, name: str, scale: torch.Tensor) -> None:
    """Raises an error if a scale that is used as a divisor is not positive.

    Raises:
        FormatError: Names the tensor.
    """
    if not (scale.to(torch.float32) > 0).all():
        raise FormatError(
            "A scale is not positive. Nothing was loaded.",
            tensor=f"{module}.{name}",
            expected="values above 0",
            found=scale.flatten()[:4].tolist(),
            fix="Download the checkpoint again. If the error remains, report it to the checkpoint's author.",
        )


def check_index(module: str, name: str, index: torch.Tensor, bound: int) -> None:
    """Raises an error if an index is outside [0, bound).

    Raises:
        FormatError: Names the tensor and the minimum and maximum index.
    """
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= bound:
        raise FormatError(
            "An index is out of range. Nothing was loaded.",
            tensor=f"{module}.{name}",
            expected=f"0 to {bound - 1}",
            found=f"{low} to {high}",
            fix="Download the checkpoint again. If the error remains, report it to the checkpoint's author.",
        )
