"""The streamer: loads one block of the model before its forward and drops it after.

This is the plain one: synchronous, one block at a time, packed rows into one buffer that all blocks share. Its seat is
`Streamer(blocks, reader, device)`; what takes that seat may prefetch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hfq.checkpoint import Reader
from hfq.modules.linear import PackedLinear
from hfq.modules.row import ArenaRow, arena_layout, read_tensor
from hfq.spec import TensorInfo

__all__ = ["Block", "DenseParameter", "Streamer"]


@dataclass(frozen=True)
class DenseParameter:
    """A parameter that is not packed and rests in the checkpoint: read and cast to `dtype` for each forward."""

    module: nn.Module
    local: str
    info: TensorInfo
    dtype: torch.dtype


@dataclass(frozen=True)
class Block:
    """A module whose forward needs these offloaded parts, and no other module's forward in between."""

    name: str
    module: nn.Module
    packed: tuple[PackedLinear, ...]
    dense: tuple[DenseParameter, ...]


class Streamer:
    """Hooks every block, so that its offloaded parts are on `device` during its forward and nowhere after it.

    Args:
        blocks: The blocks, none within another.
        reader: Reads the checkpoint.
        device: Where the blocks compute.
    """

    def __init__(self, blocks: Sequence[Block], reader: Reader, device: str) -> None:
        self.blocks, self._reader, self._device = tuple(blocks), reader, torch.device(device)
        self._lock = threading.RLock()
        self._held: dict[str, list[tuple[DenseParameter, nn.Parameter]]] = {}
        sizes = [sum(arena_layout(linear.infos)[1] for linear in block.packed) for block in blocks]
        with torch.inference_mode(False):
            self._buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8)
        for block in blocks:
            for part in (block, *_owners(block)):
                part.module.register_forward_pre_hook(lambda *_, part=part: self._onload(part))
                part.module.register_forward_hook(lambda *_, part=part: self._offload(part), always_call=True)
            for linear in block.packed:
                linear.fetch = lambda linear=linear: self._fetch(linear)

    def _onload(self, block: Block) -> None:
        self._lock.acquire()
        held = self._held[block.name] = []
        offset = 0
        for linear in block.packed:
            nbytes = arena_layout(linear.infos)[1]
            linear.onload(self._fetch(linear, self._buffer[offset : offset + nbytes]))
            offset += nbytes
        for slot in block.dense:
            resting = slot.module._parameters[slot.local]
            if resting is None or not resting.is_meta:
                continue
            value = read_tensor(self._reader, slot.info).to(self._device, slot.dtype)
            held.append((slot, resting))
            slot.module._parameters[slot.local] = nn.Parameter(value, requires_grad=False)

    def _offload(self, block: Block) -> None:
        held = self._held.pop(block.name, None)
        if held is None:
            return
        for slot, resting in held:
            slot.module._parameters[slot.local] = resting
        for linear in block.packed:
            linear.offload()
        self._lock.release()

    def _fetch(self, linear: PackedLinear, buffer: torch.Tensor | None = None) -> Mapping[str, torch.Tensor]:
        """A module's tensors on the device: from the checkpoint for one that rests on disk, else from where it rests."""
        tensors = linear.resting_tensors()
        if any(tensor.is_meta for tensor in tensors.values()):
            row = ArenaRow.read(self._reader, linear.infos, buffer)
            if self._device.type == "cpu":
                return row.tensors()
            return ArenaRow(row.buffer.to(self._device), row.segments).tensors()
        return {local: tensor.to(self._device) for local, tensor in tensors.items()}


def _owners(block: Block) -> list[Block]:
    """The modules within a block that own its dense parameters, as blocks of their own.

    They matter where a block's forward runs without its hooks, as when transformers recomputes it for gradient checkpointing
    (`GradientCheckpointingLayer.forward_with_checkpointing`, 5.23): each part is then read when its own module is called.
    """
    owners: dict[nn.Module, list[DenseParameter]] = {}
    for slot in block.dense:
        if slot.module is not block.module:
            owners.setdefault(slot.module, []).append(slot)
    return [
        Block(f"{block.name}, part {index}", owner, (), tuple(slots)) for index, (owner, slots) in enumerate(owners.items())
    ]
