"""Tensors of a loaded model that are views of its mapped checkpoint files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hfq.checkpoint import Reader

__all__ = ["MappedTensors"]


class MappedTensors:
    """The mapped tensors of one model, and the check of their files before each forward pass.

    A mapped file that is truncated ends the process with SIGBUS at the next access to its pages. The check
    turns this into an error, unless the file is truncated during a forward pass. It costs one fstat per file.

    Args:
        reader: Reads the checkpoint.
        tensors: Pairs of a mapped tensor and its file.
    """

    def __init__(
        self, reader: Reader | None = None, tensors: Iterable[tuple[torch.Tensor, str]] = ()
    ) -> None:
        tensors = list(tensors)
        self._reader = reader
        self._files = sorted({file for _, file in tensors})
        self._addresses = WeakTensorKeyDictionary()
        for tensor, _ in tensors:
            self._addresses[tensor] = tensor.data_ptr()

    def __deepcopy__(self, memo: dict) -> MappedTensors:
        return MappedTensors()  # the tensors of a copied model are in memory of their own

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor is still mapped, that is, was not replaced or moved."""
        return tensor in self._addresses and tensor.data_ptr() == self._addresses[tensor]

    def check(self, *_: Any) -> None:
        """Checks that no mapped file changed; a forward pre-hook.

        Raises:
            CheckpointError: The inode, size, or modification time of a file changed.
        """
        if self._reader is not None and not torch.compiler.is_compiling():
            self._reader.check_unchanged(self._files)
