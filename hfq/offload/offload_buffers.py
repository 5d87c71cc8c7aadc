"""Offload buffers: memory that onloaded units occupy, on the host and on an accelerator."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from hfq.offload.buffer_allocator import BufferAllocator
from hfq.offload.byte_source import CHUNK_NBYTES, Source
from hfq.offload.clock import Clock, HostClock
from hfq.offload.copy_stream import CopyStream
from hfq.offload.host_memory import huge_buffer
from hfq.offload.pinned_weights import PinnedWeights
from hfq.offload.reader_threads import Pool, Ticket
from hfq.offload.recorder import Recorder
from hfq.offload.unit_layout import PAGE, UnitLayout
from hfq.placement.budget import buffer_nbytes
from hfq.tensor_spec import ByteRange

__all__ = [
    "AcceleratorBuffers",
    "HostBuffers",
    "Move",
    "OffloadBuffers",
    "chunks_with_copies",
    "copy_within",
    "fill_on_host",
    "memory_of",
]

Move = tuple[int, int, int]
"""A copy of (offset in staging memory, offset in the buffer, bytes)."""


class OffloadBuffers(ABC):
    """Base of both kinds: an allocator, its memory, and the tickets of placed units.

    Args:
        layouts: The layout of each unit.
        units: The units that use the buffers.
        source: Reads the checkpoint.
        pool: The reader threads.
        make: Allocates a number of bytes on the execution device.
        read_ahead_nbytes: The most bytes read ahead beyond the next unit.

    Attributes:
        recorder: Records copies to an accelerator, while a recording is active.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        units: Collection[int],
        source: Source,
        pool: Pool,
        make: Callable[[int], torch.Tensor],
        read_ahead_nbytes: int,
    ) -> None:
        self.layouts = layouts
        self.units = units
        self.source = source
        self.pool = pool
        self._make = make
        self.allocator = BufferAllocator(
            buffer_nbytes([layouts[unit].nbytes for unit in units], read_ahead_nbytes)
        )
        self.buffer = make(self.allocator.nbytes)
        self._tickets: dict[int, Ticket] = {}
        self.recorder: Recorder | None = None

    def clock(self) -> Clock:
        """Returns a clock of the execution device."""
        return HostClock()

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(self.nbytes_by_device().values())

    def nbytes_by_device(self) -> dict[str, int]:
        """Returns the bytes of the buffers on each device."""
        return {str(self.buffer.device): self.buffer.numel()}

    def start(self, unit: int, kept: Collection[int]) -> bool:
        """Starts to fill a buffer for a unit, unless it has one.

        Returns:
            False if `kept` leaves no room.
        """
        if self._is_started(unit):
            return True
        nbytes = self.layouts[unit].nbytes
        found = self.allocator.find(unit, nbytes, kept)
        if found is None:
            return False
        for other in {*found[1], unit}:  # one step at a time, since an interrupt may come at any step
            self.drop(other)
        self.allocator.give(unit, found[0], nbytes)
        ticket = self._tickets[unit] = self._fill(
            unit, self._region(unit)
        )  # registered before any thread writes there
        try:
            self.pool.submit(ticket)
        except BaseException:
            ticket.is_cancelled = True
            raise
        return True

    def start_ahead(self, unit: int, kept: Collection[int]) -> bool:
        """Starts to fill a buffer for a unit that is not needed yet.

        Returns:
            False if `kept` leaves no room, or if the read would allocate more memory.
        """
        return self.start(unit, kept)

    def take(self, unit: int) -> torch.Tensor:
        """Waits for a unit's buffer, and returns it: uint8 [the layout's nbytes].

        Raises:
            CheckpointError: It could not be read.
        """
        ticket = self._tickets[unit]
        try:
            ticket.wait()
        except BaseException:
            if ticket.is_done:
                self.drop(unit)
            raise
        return self._region(unit)

    def check_out(self, unit: int) -> torch.Tensor:
        """Returns a unit in separate memory, if the offload buffer has no room for it."""
        buffer = self._make(self.layouts[unit].nbytes)
        ticket = self.pool.submit(self._fill(unit, buffer))
        try:
            ticket.wait()
        except BaseException:
            ticket.cancel()
            raise
        return buffer

    @abstractmethod
    def give_back(self, unit: int) -> None:
        """Marks a unit's forward pass as done, so that another unit may use its buffer."""

    def drop(self, unit: int) -> None:
        """Forgets the contents of a unit's buffer."""
        if unit in self._tickets:
            self._tickets[unit].cancel()
            self._lost(unit)
            del self._tickets[unit]
        self.allocator.forget(unit)

    def record(self) -> None:
        """Takes the checksum of every chunk of every unit."""
        scratch = memory_of(huge_buffer(CHUNK_NBYTES))
        for unit in self.units:
            self.source.record(
                [wanted for run in self.layouts[unit].runs for wanted, _ in run.chunks(CHUNK_NBYTES)], scratch
            )

    def ticket_of(self, unit: int) -> Ticket | None:
        """Returns the ticket of a unit that has a buffer."""
        return self._tickets.get(unit)

    def reset(self) -> None:
        """Forgets everything without waiting; the child of a fork has no reader threads."""
        self._tickets.clear()
        self.allocator.clear()

    def _is_started(self, unit: int) -> bool:
        ticket = self._tickets.get(unit)  # a failed read-ahead is repeated
        return ticket is not None and not ticket.is_cancelled and ticket.error is None

    def _region(self, unit: int) -> torch.Tensor:
        offset = self.allocator.place_of(unit) or 0
        return self.buffer[offset : offset + self.layouts[unit].nbytes]

    @abstractmethod
    def _lost(self, unit: int) -> None:
        """Called before a unit's buffer goes to another unit, when no thread fills it any more."""

    @abstractmethod
    def _fill(self, unit: int, buffer: torch.Tensor) -> Ticket:
        """Returns the jobs that fill a buffer."""


class HostBuffers(OffloadBuffers):
    """Offload buffers of units that compute on the host.

    Their memory is allocated when the first units are read.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        units: Collection[int],
        source: Source,
        pool: Pool,
        read_ahead_nbytes: int = 0,
    ) -> None:
        super().__init__(layouts, units, source, pool, huge_buffer, read_ahead_nbytes)

    def give_back(self, unit: int) -> None:
        """Does nothing: the computation on the host is already done."""

    def _lost(self, unit: int) -> None:
        """Does nothing: no other thread has written to the buffer."""

    def _fill(self, unit: int, buffer: torch.Tensor) -> Ticket:
        return fill_on_host(self.source, self.layouts[unit], buffer)


class AcceleratorBuffers(OffloadBuffers):
    """Offload buffers of units that are copied to an accelerator from pinned host memory.

    What is on disk is read to staging memory, and each chunk is copied as soon as it is read. What is stored
    in pinned memory is copied from there. The host waits for reads, but not for copies: the computation on
    the device waits for them.

    Args:
        layouts: The layout of each unit on the device.
        units: The units that use the buffers.
        source: Reads the checkpoint.
        pool: The reader threads.
        copy_stream: Copies to the accelerator.
        pinned: The weights that are stored in pinned memory; None if there are none.
        read_ahead_nbytes: The most bytes read ahead beyond the next unit, on the device and on the host.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        units: Collection[int],
        source: Source,
        pool: Pool,
        copy_stream: CopyStream,
        pinned: PinnedWeights | None = None,
        read_ahead_nbytes: int = 0,
    ) -> None:
        super().__init__(layouts, units, source, pool, copy_stream.empty, read_ahead_nbytes)
        self._copy_stream = copy_stream
        read = [layouts[unit].read_nbytes for unit in units if layouts[unit].runs]
        self._host = BufferAllocator(buffer_nbytes(read, read_ahead_nbytes))
        self._staging = copy_stream.staging(self._host.nbytes)
        self._pinned = {unit: [] if pinned is None else pinned.copies(layouts[unit]) for unit in units}
        self._chunks = {unit: chunks_with_copies(layouts[unit]) for unit in units}
        self._copied: dict[int, object] = {}
        self._copying: list[tuple[int, int, object]] = []
        """Bytes [start, stop) of the staging memory that units left, and a mark of their last copy.

        Another unit may take a part of these bytes, and the next unit the rest.
        """
        self._computed: dict[int, list[object]] = {}  # one mark of each stream that computed with the unit

    def nbytes_by_device(self) -> dict[str, int]:
        return {"cpu": self._staging.numel(), str(self.buffer.device): self.buffer.numel()}

    def clock(self) -> Clock:
        return self._copy_stream.clock()

    def start_ahead(self, unit: int, kept: Collection[int]) -> bool:
        can_read = (
            self._is_started(unit) or not self.layouts[unit].runs or self._find_staging(unit) is not None
        )
        return can_read and self.start(unit, kept)

    def take(self, unit: int) -> torch.Tensor:
        buffer = super().take(unit)
        self._copy_stream.compute_after(self._copied[unit])
        return buffer

    def check_out(self, unit: int) -> torch.Tensor:
        buffer = super().check_out(unit)
        self._copy_stream.compute_after(self._copied[unit])
        return buffer

    def give_back(self, unit: int) -> None:
        pending = [mark for mark in self._computed.get(unit, ()) if not self._copy_stream.is_past(mark)]
        self._computed[unit] = [*pending, self._copy_stream.mark_compute()]

    def reset(self) -> None:
        super().reset()
        self._host.clear()
        self._copying.clear()

    def _is_started(self, unit: int) -> bool:
        has_failed = unit in self._copied and self._copy_stream.has_failed(self._copied[unit])
        return super()._is_started(unit) and not has_failed

    def _lost(self, unit: int) -> None:
        self._copied[unit] = (
            self._copy_stream.mark()
        )  # also after the copies of a ticket that was cancelled half-way
        for mark in self._computed.pop(unit, ()):
            if not self._copy_stream.is_past(mark):
                self._copy_stream.copy_after(mark)

    def _fill(self, unit: int, buffer: torch.Tensor) -> Ticket:
        def finish() -> None:
            for place, memory in self._pinned[unit]:
                self._copy(unit, buffer[place : place + memory.numel()], memory)
            self._copied[unit] = self._copy_stream.mark()

        if not self.layouts[unit].runs:
            return Ticket([], finish)
        staging, copied = self._staging_for(unit)
        memory = memory_of(staging)
        jobs = [
            self._moving(unit, chunk, offset, moves, staging, memory, buffer, copied)
            for chunk, offset, moves in self._chunks[unit]
        ]
        return Ticket(jobs, finish)

    def _moving(
        self,
        unit: int,
        wanted: ByteRange,
        offset: int,
        moves: Sequence[Move],
        staging: torch.Tensor,
        memory: memoryview,
        buffer: torch.Tensor,
        copied: Sequence[object],
    ) -> Callable[[], None]:
        def job() -> None:
            for mark in copied:
                self._copy_stream.finish(mark)
            self.source.read(wanted, memory[offset:])
            for source, target, nbytes in moves:
                self._copy(unit, buffer[target : target + nbytes], staging[source : source + nbytes])

        return job

    def _copy(self, unit: int, target: torch.Tensor, source: torch.Tensor) -> None:
        recorder = self.recorder
        with contextlib.nullcontext() if recorder is None else recorder.copying(unit, target.numel()):
            self._copy_stream.copy(target, source)

    def _staging_for(self, unit: int) -> tuple[torch.Tensor, list[object]]:
        """Returns host memory to read to, and marks of the copies from it that may still run."""
        found, nbytes = self._find_staging(unit), self.layouts[unit].read_nbytes
        if found is None:
            return self._copy_stream.host_buffer(nbytes), []
        for other in (unit, *found[1]):
            place = self._host.range_of(other)
            if place is not None:
                self._copying.append((*place, self._last_copy_of(other)))
                self._host.forget(other)
        self._copying = [each for each in self._copying if not self._copy_stream.is_past(each[2])]
        self._host.give(unit, found[0], nbytes)
        first, last = found[0], found[0] + nbytes
        pending = [mark for start, stop, mark in self._copying if start < last and first < stop]
        return self._staging[first:last], pending

    def _last_copy_of(self, unit: int) -> object:
        ticket = self._tickets.get(unit)
        has_failed = ticket is not None and ticket.error is not None  # some of its copies have no mark
        is_known = unit in self._copied and not has_failed
        return self._copied[unit] if is_known else self._copy_stream.mark()

    def _find_staging(self, unit: int) -> tuple[int, list[int]] | None:
        reading = [other for other, ticket in self._tickets.items() if not ticket.is_done and other != unit]
        return self._host.find(unit, self.layouts[unit].read_nbytes, reading)


def chunks_with_copies(layout: UnitLayout) -> list[tuple[ByteRange, int, list[Move]]]:
    """Returns each chunk of a unit, its offset in staging memory, and the copies of its bytes."""
    found = []
    for run in layout.runs:
        for wanted, offset in run.chunks(CHUNK_NBYTES):
            moves = []
            for source, target, nbytes in layout.copies:
                first, last = max(source, offset), min(source + nbytes, offset + wanted.nbytes)
                if first < last:
                    moves.append((first, target + first - source, last - first))
            found.append((wanted, offset, moves))
    return found


def memory_of(buffer: torch.Tensor) -> memoryview:
    """Returns the bytes of a buffer on the host."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy arrays have the buffer protocol


def fill_on_host(source: Source, layout: UnitLayout, buffer: torch.Tensor) -> Ticket:
    """Returns the reads that fill a buffer on the host: uint8 [the layout's nbytes]."""
    memory = memory_of(buffer)

    def job(wanted: ByteRange, offset: int) -> Callable[[], None]:
        return lambda: source.read(wanted, memory[offset : offset + -(-wanted.nbytes // PAGE) * PAGE])

    chunks = (chunk for run in layout.runs for chunk in run.chunks(CHUNK_NBYTES))
    return Ticket([job(*chunk) for chunk in chunks], lambda: copy_within(buffer, layout.copies))


def copy_within(buffer: torch.Tensor, copies: Iterable[Move]) -> None:
    """Copies bytes of a buffer to other bytes of it, as a layout on the host says."""
    for start, target, nbytes in copies:
        buffer[target : target + nbytes] = buffer[start : start + nbytes]
