"""Reads that fill ZeRO-3 shards while a model is loaded.

Each rank reads the bytes of its own shards, or rank 0 reads everything and scatters it.

For each flat buffer, one rank checks the values of the small tensors (scales, indices). If one rank's shard
holds them all, that rank checks them there without a second read. All ranks then receive the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hfq.checkpoint.execute_reads import read_all
from hfq.formats import Format
from hfq.loading.ranks import attempt, exchange, raise_together
from hfq.loading.validation import check_bias
from hfq.modules.flat_buffer import FlatBuffer, flat_layout, read_tensor
from hfq.modules.quantized_module import QuantizedModule
from hfq.placement.zero.shards import FlatParameter, ShardRead
from hfq.tensor_spec import Segment

if TYPE_CHECKING:
    from hfq.loading.state import LoadState

__all__ = ["Shard", "ShardFiller"]

_BATCH = 256 << 20
_THREADS = 4


@dataclass
class Shard:
    """One shard to fill.

    Attributes:
        flat: The parameter that the shard is part of.
        tensor: This rank's shard.
        stored: The stored dtype of its bytes.
        module: The quantized module whose flat buffer it is part of, or None for an unquantized parameter.
        settle: Function that is called when the shard is filled.
    """

    flat: FlatParameter
    tensor: torch.Tensor
    stored: torch.dtype
    module: QuantizedModule | None
    settle: Callable[[], None]


class ShardFiller:
    """Fills shards in batches of bounded memory, and checks small quantized tensors.

    Args:
        loading: The load.
        rank: This rank.
        world: Number of ranks.
        is_dealt: True if rank 0 reads everything and scatters it.
        device: Device of the tensors that ranks send to each other.

    Attributes:
        packed_read: Bytes of quantized modules that this rank has read from files.
        dense_read: Bytes of unquantized tensors that it has read.
        checked_read: Bytes of small tensors that it has read separately to check them.
    """

    def __init__(
        self, loading: LoadState, rank: int, world: int, is_dealt: bool, device: torch.device
    ) -> None:
        self._loading = loading
        self._rank = rank
        self._world = world
        self._is_scattered = is_dealt
        self._device = device
        self._batch: list[tuple[Shard, torch.Tensor]] = []
        self._nbytes, self._checked = 0, 0
        self._error: Exception | None = None
        self._formats: dict[str, Format] = {}
        self.packed_read = self.dense_read = self.checked_read = 0

    def add(self, shard: Shard) -> None:
        """Fills a shard now or in a batch with the next shards."""
        nbytes = shard.flat.shard_nbytes(self._world)
        is_direct = (
            shard.tensor.device.type == "cpu"
            and shard.tensor.dtype == shard.stored
            and not self._is_scattered
        )
        memory = shard.tensor.view(torch.uint8) if is_direct else torch.empty(nbytes, dtype=torch.uint8)
        self._batch.append((shard, memory))
        self._nbytes += 0 if is_direct else nbytes
        if self._nbytes >= _BATCH:
            self.flush()

    def check_unread(self, module: QuantizedModule) -> None:
        """Checks the small tensors of a module whose shards stay on disk, on one rank in turn."""
        if self._next_checker() == self._rank and self._error is None:
            _, self._error = attempt(self._check, module, self._read_small(module))

    def read_whole(self, flat: FlatParameter, target: torch.Tensor, module: QuantizedModule | None) -> None:
        """Fills a whole parameter on this rank, and checks its small tensors."""
        memory = target.view(torch.uint8)
        reads = tuple(ShardRead(source, offset) for offset, source in flat.parts)
        if self._error is None:
            _, self._error = attempt(read_all, self._loading.reader, place_reads(reads, memory), _THREADS)
            self._count(flat, sum(read.source.nbytes for read in reads))
        if module is not None and self._error is None:
            _, self._error = attempt(self._check, module, _views(module, memory))

    def flush(self) -> None:
        """Fills the shards added so far.

        Errors are kept for `finish`, so that no rank stops while others wait for it.
        """
        batch = self._batch
        self._batch = []
        self._nbytes = 0
        if self._is_scattered:
            for shard, memory in batch:
                self._scatter(shard, memory)
        elif self._error is None:
            _, self._error = attempt(self._read, batch)
        for shard, memory in batch:
            if shard.module is not None and not self._is_scattered:
                self._check_filled(shard.module, shard.flat, memory)
            if memory.data_ptr() != shard.tensor.data_ptr():
                shard.tensor.copy_(memory.view(shard.stored))
            shard.settle()

    def finish(self) -> None:
        """Fills the remaining shards, and exchanges the results of the checks between ranks.

        Raises:
            HfqError: This rank or another could not read, or found impossible values.
        """
        self.flush()
        raise_together(self._error)
        for found in exchange(self._formats):
            for name, resolved in found.items():
                self._loading.quantized[name].weight_format = resolved

    def _read(self, batch: list[tuple[Shard, torch.Tensor]]) -> None:
        jobs = []
        for shard, memory in batch:
            reads = shard.flat.reads(self._rank, self._world)
            jobs += place_reads(reads, memory)
            self._count(shard.flat, sum(read.source.nbytes for read in reads))
        read_all(self._loading.reader, jobs, _THREADS)

    def _scatter(self, shard: Shard, memory: torch.Tensor) -> None:
        """Reads a whole parameter on rank 0, and sends every rank its shard."""
        flat, size = shard.flat, memory.numel()
        parts = None
        if self._rank == 0:
            whole = torch.zeros(size * self._world, dtype=torch.uint8)
            self.read_whole(flat, whole, shard.module)
            parts = list(whole.to(self._device).split(size)) if size else [whole] * self._world
        mine = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.scatter(mine, parts, src=0)
        memory.copy_(mine)

    def _check_filled(self, module: QuantizedModule, flat: FlatParameter, memory: torch.Tensor) -> None:
        """Checks small tensors on the rank that has them all, or else on one rank in turn."""
        small = {
            local: segment
            for local, segment in row_segments(module).items()
            if local != module.weight_format.codes_name
        }
        start = min((segment.offset for segment in small.values()), default=0)
        stop = max((segment.offset + segment.nbytes for segment in small.values()), default=0)
        holders = [rank for rank in range(self._world) if _holds(flat.bounds(rank, self._world), start, stop)]
        checker = holders[0] if holders else self._next_checker()
        if checker != self._rank or self._error is not None:
            return
        if not holders:
            _, self._error = attempt(self._check, module, self._read_small(module))
            return
        first = flat.bounds(self._rank, self._world)[0]
        cut = memory[start - first : stop - first].clone()  # views with a larger dtype must be aligned
        moved = {local: Segment(s.offset - start, s.nbytes, s.dtype, s.shape) for local, s in small.items()}
        _, self._error = attempt(self._check, module, FlatBuffer(cut, moved).tensors())

    def _next_checker(self) -> int:
        self._checked += 1
        return self._checked % self._world if not self._is_scattered else 0

    def _read_small(self, module: QuantizedModule) -> dict[str, torch.Tensor]:
        small = {
            local: info for local, info in module.infos.items() if local != module.weight_format.codes_name
        }
        self.checked_read += sum(info.nbytes for info in small.values())
        return {local: read_tensor(self._loading.reader, info) for local, info in small.items()}

    def _check(self, module: QuantizedModule, tensors: Mapping[str, torch.Tensor]) -> None:
        resolved = module.weight_format.resolve(module.name, tensors)
        check_bias(
            module.name, tensors.get("bias"), self._loading.match.quantized[module.name].target.has_bias
        )
        if resolved != module.weight_format:
            self._formats[module.name] = resolved

    def _count(self, flat: FlatParameter, nbytes: int) -> None:
        self.packed_read += nbytes if flat.is_quantized else 0
        self.dense_read += 0 if flat.is_quantized else nbytes


def row_segments(module: QuantizedModule) -> dict[str, Segment]:
    """Returns the segment of each tensor in a quantized module's flat buffer."""
    return flat_layout(module.infos)[0]


def place_reads(reads: tuple[ShardRead, ...], memory: torch.Tensor) -> list[tuple[Any, memoryview]]:
    """Returns pairs of source range and target memory, and zeroes the bytes that no read fills."""
    # NumPy arrays support the buffer protocol.
    end, flat = 0, memoryview(memory.numpy())  # type: ignore[arg-type]
    jobs = []
    for read in reads:
        memory[end : read.offset].zero_()
        end = read.offset + read.source.nbytes
        jobs.append((read.source, flat[read.offset : end]))
    memory[end:].zero_()
    return jobs


def _views(module: QuantizedModule, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    small = {
        local: s for local, s in row_segments(module).items() if local != module.weight_format.codes_name
    }
    return FlatBuffer(whole, small).tensors()


def _holds(bounds: tuple[int, int], start: int, stop: int) -> bool:
    return bounds[0] <= start and stop <= bounds[1]
