"""Unquantized tensors that are views of the mapped checkpoint files."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.filesystem import is_network
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.modules.flat_buffer import map_tensor, read_tensor

if TYPE_CHECKING:
    from hfq.loading.state import LoadState

__all__ = ["MappedTensors", "map_named", "settle_mapped"]


class MappedTensors:
    """The mapped tensors of one model, and the check of their files before each forward pass.

    A mapped file that is truncated ends the process with SIGBUS at the next access to its pages. The check
    turns this into an error, unless the file is truncated during a forward pass. It costs one fstat per file.

    Args:
        reader: Reads the checkpoint.
        files: The mapped files.
        tensors: The unquantized tensors that are mapped.
    """

    def __init__(
        self, reader: Reader | None = None, files: Iterable[str] = (), tensors: Iterable[torch.Tensor] = ()
    ) -> None:
        self._reader = reader
        self._files = sorted(set(files))
        self._addresses = WeakTensorKeyDictionary()
        for tensor in tensors:
            self._addresses[tensor] = tensor.data_ptr()

    def __deepcopy__(self, memo: dict) -> MappedTensors:
        return MappedTensors()  # the tensors of a copied model are in memory of their own

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Returns True if an unquantized tensor is still mapped, that is, was not replaced or moved."""
        return tensor in self._addresses and tensor.data_ptr() == self._addresses[tensor]

    def check(self, *_: Any) -> None:
        """Checks that no mapped file changed; a forward pre-hook.

        Raises:
            CheckpointError: The inode, size, or modification time of a file changed.
        """
        if self._reader is not None and not torch.compiler.is_compiling():
            self._reader.check_unchanged(self._files)


def settle_mapped(loading: LoadState, hidden: Collection[str], files: Iterable[str]) -> MappedTensors:
    """Copies mapped tensors into memory if the config asks for it; otherwise checks their files.

    An unquantized tensor on the CPU is mapped (`map_named`) unless transformers changed its dtype.

    Args:
        loading: The load.
        hidden: Names of the tensors that transformers does not load.
        files: Files of mapped quantized tensors.

    Returns:
        The tensors that stay mapped.
    """
    files, mapped = set(files), []
    for name, info in loading.match.unquantized.items():
        tensor = None if name in hidden else loading.model.get_parameter_or_buffer(name)
        if tensor is None or tensor.device.type != "cpu" or tensor.dtype != torch_dtype(info.dtype):
            continue
        if loading.config.cpu_memory in ("private", "shared"):
            tensor.data = tensor.data.clone()
        else:
            mapped.append(tensor)
            files.add(info.range.file)
    tensors = MappedTensors(loading.reader, files, mapped)
    if files:
        loading.model.register_forward_pre_hook(tensors.check)
    return tensors


def map_named(
    checkpoint: Checkpoint, reader: Reader, names: Iterable[str], is_copied: bool
) -> dict[str, torch.Tensor]:
    """Returns stored tensors by name, as views of their mapped files.

    Files on a network file system are read into memory. A view may be off the alignment of its dtype, as
    those of safetensors may be.

    Args:
        checkpoint: The checkpoint.
        reader: Reads the checkpoint.
        names: Names of the tensors.
        is_copied: True to read all tensors into memory.
    """
    is_copied = is_copied or any(map(is_network, checkpoint.headers))
    load = read_tensor if is_copied else map_tensor
    return {name: load(reader, checkpoint.tensors[name]) for name in sorted(names)}
