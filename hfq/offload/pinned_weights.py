"""Weights in pinned host memory, the only copy of them, from which accelerators copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hfq.offload.pinned_memory import PIECE_NBYTES
from hfq.offload.unit_layout import UnitLayout
from hfq.tensor_spec import TensorInfo

__all__ = ["PinnedWeights"]


class PinnedWeights:
    """Stored tensors in one buffer of pinned host memory.

    Args:
        memory: uint8 [nbytes], pinned.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._offsets: dict[TensorInfo, int] = {}

    def add(self, info: TensorInfo, offset: int) -> None:
        """Notes that a stored tensor is at an offset of the buffer."""
        self._offsets[info] = offset

    def __contains__(self, info: TensorInfo) -> bool:
        return info in self._offsets

    def __getitem__(self, info: TensorInfo) -> torch.Tensor:
        """Returns the bytes of a stored tensor: uint8 [nbytes]."""
        offset = self._offsets[info]
        return self._memory[offset : offset + info.nbytes]

    def in_order(self, infos: Iterable[TensorInfo]) -> list[TensorInfo]:
        """Returns those of the tensors that are stored here, in the order of their addresses."""
        return sorted({info for info in infos if info in self._offsets}, key=self._offsets.__getitem__)

    def copies(self, layout: UnitLayout) -> list[tuple[int, torch.Tensor]]:
        """Returns the copies that bring a unit's tensors to its buffer: (offset there, bytes here).

        Neighbors are copied together, but no copy crosses the end of a piece of the pinned memory.
        """
        spans: list[list[int]] = []
        for info in self.in_order(info for info in layout.places if info.nbytes):
            first, place = self._offsets[info], layout.places[info]
            if spans and first - spans[-1][0] == place - spans[-1][2]:
                spans[-1][1] = first + info.nbytes
            else:
                spans.append([first, first + info.nbytes, place])
        return [
            (place + start - first, self._memory[start:end])
            for first, last, place in spans
            for start, end in _pieces(first, last)
        ]


def _pieces(first: int, last: int) -> Iterable[tuple[int, int]]:
    while first < last:
        end = min(last, (first // PIECE_NBYTES + 1) * PIECE_NBYTES)
        yield first, end
        first = end
