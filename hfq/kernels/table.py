"""Which kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hfq.errors import SetupError, nearest
from hfq.kernels import reference

__all__ = ["KERNELS", "Kernel", "choose_kernel"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A multiplication by packed weights and its gradient; see `hfq.kernels.reference` for the signatures."""

    name: str
    linear: Callable[..., torch.Tensor]
    linear_grad: Callable[..., torch.Tensor]


KERNELS = {"reference": Kernel("reference", reference.linear, reference.linear_grad)}


def choose_kernel(preference: str) -> Kernel:
    """The kernel of a preference: `"reference"`, or `"auto"` for the best there is (today the reference kernel).

    Raises:
        SetupError: There is no kernel of that name.
    """
    if preference == "auto":
        return KERNELS["reference"]
    if not isinstance(preference, str) or preference not in KERNELS:
        names = ["auto", *KERNELS]
        raise SetupError(
            f"There is no kernel {preference!r}{nearest(str(preference), names)}.", expected=" or ".join(map(repr, names)),
            found=repr(preference), fix='pass kernel="auto"',
        )  # fmt: skip
    return KERNELS[preference]
