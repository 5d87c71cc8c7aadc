"""Unquantized tensors of GGUF files, some of which are stored differently.

The values of a few small tensors are functions of the model's: norms plus one, permuted biases. They are
converted once, into an unnamed file in memory, which is then read as any file of the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hfq.checkpoint.temporary_file import TemporaryFile
from hfq.formats.gguf.stored_values import model_values
from hfq.modules.flat_buffer import read_tensor
from hfq.tensor_spec import ByteRange, TensorInfo

if TYPE_CHECKING:
    from hfq.loading.state import LoadState

__all__ = ["convert_tensors"]

_ALIGNMENT = 64
_FILE = "/dev/shm/(converted from GGUF)"


def convert_tensors(loading: LoadState) -> None:
    """Converts the unquantized tensors that GGUF files store differently.

    Their places in the load become those of the converted values. Weights of layers stay as stored.

    Args:
        loading: A load that has matched its tensors.

    Raises:
        CheckpointError: A file cannot be read any more, or memory is full.
    """
    match = loading.match
    layers = [found.infos for found in match.quantized.values()]
    used = [*match.unquantized.values(), *(info for infos in layers for info in infos.values())]
    stored = {info.name: info for info in used if info.blocks is not None and info.blocks.is_converted}
    if not stored:
        return
    placed = _lay_out(stored)
    last = max(info.range.offset + info.nbytes for info in placed.values())
    file = TemporaryFile(loading.reader, _FILE, last)
    for name, info in stored.items():
        value = model_values(read_tensor(loading.reader, info), info.blocks)
        raw = value.contiguous().reshape(-1).view(torch.uint8)
        # numpy arrays have the buffer protocol
        file.write(placed[name].range.offset, memoryview(raw.numpy()))  # type: ignore[arg-type]
    file.finish()
    loading.checkpoint.tensors.update(placed)
    modules = [module.infos for module in loading.quantized.values()]
    for infos in (match.unquantized, *layers, *modules):
        infos.update({key: placed[info.name] for key, info in infos.items() if info.name in placed})


def _lay_out(stored: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the places of converted tensors in their file."""
    placed = dict[str, TensorInfo]()
    end = 0
    for name, info in stored.items():
        is_computed = info.blocks is not None and info.blocks.function is not None
        nbytes = 4 * info.numel if is_computed else info.nbytes
        dtype = "F32" if is_computed else info.dtype
        placed[name] = info._replace(dtype=dtype, range=ByteRange(_FILE, end, nbytes), blocks=None)
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return placed
