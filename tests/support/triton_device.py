"""The device of tests of the Triton kernels: a GPU if there is one, else the CPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from hfq.formats import Format
from hfq.kernels.cuda.layers.descriptions import reason_against
from tests.support.kernel_layers import CASES

__all__ = ["DEVICE", "made", "random_rows", "skip_without_codec"]

WITHOUT_CODEC = {"qmoe", *(f"blocks of {name}" for name in ("Q5_0", "Q5_1"))}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def made(name: str) -> tuple[Format, dict[str, torch.Tensor]]:
    """Returns a case's format, and its tensors on the device."""
    weight_format, tensors = CASES[name].make()
    return weight_format, {local: tensor.to(DEVICE) for local, tensor in tensors.items()}


def skip_without_codec(weight_format: Format) -> None:
    """Skips a test of a layer that has no Triton kernels, and that is named above."""
    reason = reason_against(weight_format)
    if reason is not None:
        assert reason.removeprefix("it does not read ") in WITHOUT_CODEC
        pytest.skip(f"{reason}; it computes by panels")


def random_rows(count: int, in_features: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Returns rows of normal numbers, the same on each device."""
    return torch.randn(count, in_features, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
