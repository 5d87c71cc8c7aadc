"""The streamer: loads one block of the model before its forward and drops it after.

This is the plain one: synchronous, one block at a time, packed rows into one buffer that all blocks share. Its seat is
`Streamer(blocks, reader, device)`; what takes that seat may prefetch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hfq.checkpoint import Reader
from hfq.errors import PlacementError, SetupError
from hfq.modules.packed import PackedModule
from hfq.modules.row import ArenaRow, arena_layout, read_tensor
from hfq.spec import TensorInfo

__all__ = ["Block", "DenseParameter", "Streamer"]


@dataclass(frozen=True)
class DenseParameter:
    """A parameter that is not packed and rests in the checkpoint: read, and cast to its own dtype, for each forward."""

    module: nn.Module
    local: str
    info: TensorInfo


@dataclass(frozen=True)
class Block:
    """A module whose forward needs these offloaded parts, and no other module's forward in between."""

    name: str
    module: nn.Module
    packed: tuple[PackedModule, ...]
    dense: tuple[DenseParameter, ...]


class Streamer:
    """Wraps the forward of every block, so that its offloaded parts are on `device` during it and nowhere after it.

    The wrapper is put around `module.forward`, as accelerate's hooks are, because torch's own hooks are skipped when a forward
    is interrupted from the keyboard.

    Args:
        blocks: The blocks, none within another.
        reader: Reads the checkpoint.
        device: Where the blocks compute.
        on_demand: Packed modules that are fetched when they compute and belong to no block, as routed experts.
    """

    def __init__(self, blocks: Sequence[Block], reader: Reader, device: str, on_demand: Sequence[PackedModule] = ()) -> None:
        self.blocks, self._reader, self._device = tuple(blocks), reader, torch.device(device)
        self._lock = threading.RLock()
        sizes = [sum(arena_layout(linear.infos)[1] for linear in block.packed) for block in blocks]
        with torch.inference_mode(False):
            self._buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8)
        for block in blocks:
            for part in (block, *_owners(block)):
                self._wrap(part)
            for linear in block.packed:
                linear.fetch = lambda linear=linear: self._fetch(linear)
        for module in on_demand:
            module.fetch, module.is_away = lambda module=module: self._fetch(module), True

    def __deepcopy__(self, memo: dict) -> Streamer:
        raise SetupError(
            "A model with offloaded parts cannot be copied.", expected="a model that rests where it computes",
            found=f"{len(self.blocks)} streamed blocks", fix="load it a second time instead",
        )  # fmt: skip

    def _wrap(self, block: Block) -> None:
        forward = block.module.forward

        @functools.wraps(forward)
        def streamed(*args, **kwargs):
            _refuse_meta(block, args)
            with self._onloaded(block):
                return forward(*args, **kwargs)

        block.module.forward = streamed

    @contextlib.contextmanager
    def _onloaded(self, block: Block) -> Iterator[None]:
        """Lends a block its parts; waits for another thread's block, since all share one buffer."""
        resting: list[tuple[DenseParameter, nn.Parameter]] = []
        with self._lock:
            try:
                self._onload(block, resting)
                yield
            finally:
                for slot, parameter in resting:
                    slot.module._parameters[slot.local] = parameter
                for linear in block.packed:
                    linear.offload()

    def _onload(self, block: Block, resting: list[tuple[DenseParameter, nn.Parameter]]) -> None:
        offset = 0
        for linear in block.packed:
            nbytes = arena_layout(linear.infos)[1]
            linear.onload(self._fetch(linear, self._buffer[offset : offset + nbytes]))
            offset += nbytes
        for slot in block.dense:
            parameter = slot.module._parameters[slot.local]
            if parameter is not None and parameter.is_meta:
                value = read_tensor(self._reader, slot.info).to(self._device, parameter.dtype)
                resting.append((slot, parameter))
                slot.module._parameters[slot.local] = nn.Parameter(value, requires_grad=False)

    def _fetch(self, linear: PackedModule, buffer: torch.Tensor | None = None) -> Mapping[str, torch.Tensor]:
        """A module's tensors on the device: from the checkpoint for one that rests on disk, else from where it rests."""
        tensors = linear.resting_tensors()
        if any(tensor.is_meta for tensor in tensors.values()):
            row = ArenaRow.read(self._reader, linear.infos, buffer)
            if self._device.type == "cpu":
                return row.tensors()
            return ArenaRow(row.buffer.to(self._device), row.segments).tensors()
        return {local: tensor.to(self._device) for local, tensor in tensors.items()}


def _refuse_meta(block: Block, inputs: Sequence[object]) -> None:
    """Refuses an input on meta, from which torch computes garbage: model code moved it to where a weight rests (Llama 4 does)."""
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in inputs):
        raise PlacementError(
            f"{block.name} was given an input on meta: the model's code moves it to where the weight rests, which is on disk.",
            expected="an input with values", found="a tensor on meta",
            fix=f'give this module a home in memory: {{"{block.name}": "cpu"}}',
        )  # fmt: skip


def _owners(block: Block) -> list[Block]:
    """The modules within a block that own its dense parameters, as blocks of their own.

    They matter where a block's forward runs without its wrapper, as when transformers recomputes it for gradient checkpointing
    (`GradientCheckpointingLayer.forward_with_checkpointing`, 5.23): each part is then read when its own module is called.
    """
    owners: dict[nn.Module, list[DenseParameter]] = {}
    for slot in block.dense:
        if slot.module is not block.module:
            owners.setdefault(slot.module, []).append(slot)
    return [
        Block(f"{block.name}, part {index}", owner, (), tuple(slots)) for index, (owner, slots) in enumerate(owners.items())
    ]
