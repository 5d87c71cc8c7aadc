"""Memory of routed experts on one device, in equal places, and the reads that fill them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hfq.errors import HfqError, PlacementError
from hfq.kernels.layer_tensors import LayerPlaces, LayerTensors, PlacedTensors
from hfq.modules.flat_buffer import FlatBuffer, flat_layout
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.byte_source import CHUNK_NBYTES, Source
from hfq.offload.copy_stream import CopyStream
from hfq.offload.guards import in_unit
from hfq.offload.host_memory import huge_buffer
from hfq.offload.offload_buffers import Move, chunks_with_copies, copy_within, memory_of
from hfq.offload.pinned_weights import PinnedWeights
from hfq.offload.reader_threads import JobGroups, Ticket
from hfq.offload.unit import is_on_disk
from hfq.offload.unit_layout import PAGE, UnitLayout, lay_out, lay_out_on_device, layout_nbytes
from hfq.tensor_spec import ByteRange, Segment, TensorInfo

__all__ = [
    "EXPERT_GAP_NBYTES",
    "AcceleratorExperts",
    "Contents",
    "Expert",
    "ExpertMemory",
    "HostExperts",
    "gather_experts",
    "place_nbytes",
]

Tensors = Mapping[QuantizedModule, Mapping[str, torch.Tensor]]
"""The tensors of each layer."""

EXPERT_GAP_NBYTES = PAGE
"""Most bytes between two tensors of an expert that are read together. Gaps take memory in every place."""


@dataclass(frozen=True, eq=False)
class Expert:
    """The offloaded layers of one expert, which are read together.

    Attributes:
        name: The name of the expert in the model.
        modules: Its layers.
        device: The execution device.
        pinned: The weights in pinned memory, on an accelerator alone; None if there are none.
    """

    name: str
    modules: tuple[QuantizedModule, ...]
    device: torch.device
    pinned: PinnedWeights | None = None

    @property
    def infos(self) -> list[TensorInfo]:
        """The stored tensors."""
        return [info for module in self.modules for info in module.infos.values()]

    @functools.cached_property
    def place_nbytes(self) -> int:
        """The bytes that the expert needs on its device, a multiple of 4096."""
        return layout_nbytes(self.infos, self.device.type == "cpu", EXPERT_GAP_NBYTES)

    @functools.cached_property
    def mapped(self) -> tuple[QuantizedModule, ...]:
        """The layers that an accelerator copies from CPU memory that is not pinned."""
        if self.device.type == "cpu":
            return ()
        return tuple(
            module
            for module in self.modules
            if not is_on_disk(module) and not all(map(self._is_pinned, module.infos.values()))
        )

    @functools.cached_property
    def layout(self) -> UnitLayout:
        """The reads, and the offset of each tensor in a place."""
        infos = self.infos
        if self.device.type == "cpu":
            return lay_out(infos, EXPERT_GAP_NBYTES)
        held = self.pinned.in_order(infos) if self.pinned is not None else []
        held += [info for module in self.mapped for info in module.infos.values() if info not in held]
        return lay_out_on_device(infos, held, EXPERT_GAP_NBYTES)

    @functools.cached_property
    def chunks(self) -> list[tuple[ByteRange, int, int]]:
        """The requests that fill a place on the host, with their start and end there."""
        return [
            (wanted, first, first - (-wanted.nbytes // PAGE) * PAGE)
            for run in self.layout.runs
            for wanted, first in run.chunks(CHUNK_NBYTES)
        ]

    @functools.cached_property
    def layer_places(self) -> list[tuple[QuantizedModule, LayerPlaces]]:
        """The offsets of each layer's tensors in a place."""
        return [(module, LayerPlaces(module.infos, self.layout.places)) for module in self.modules]

    def tensors(self, buffer: torch.Tensor) -> Tensors:
        """Returns views of a place that holds the expert."""
        if buffer.is_cpu:
            return {module: PlacedTensors(buffer, places) for module, places in self.layer_places}
        with torch.inference_mode(False):  # also used outside of inference mode
            return {
                module: LayerTensors(self._of_module(module, buffer).tensors()) for module in self.modules
            }

    def _is_pinned(self, info: TensorInfo) -> bool:
        return self.pinned is not None and info in self.pinned

    def _of_module(self, module: QuantizedModule, buffer: torch.Tensor) -> FlatBuffer:
        segments = {
            local: Segment(self.layout.places[info], info.nbytes, info.dtype, info.shape)
            for local, info in module.infos.items()
        }
        return FlatBuffer(buffer, segments)


def gather_experts(modules: Iterable[QuantizedModule], pinned: PinnedWeights | None = None) -> list[Expert]:
    """Returns the experts of offloaded layers, whose names begin with that of their expert.

    Args:
        modules: The layers.
        pinned: The weights in pinned memory; None if there are none.
    """
    layers: dict[tuple[str, torch.device], list[QuantizedModule]] = {}
    for module in modules:
        key = module.name.rpartition(".")[0], module.compute_device
        layers.setdefault(key, []).append(module)
    return [Expert(name, tuple(own), place, pinned) for (name, place), own in layers.items()]


class Contents:
    """An expert in a place, whose read may still run.

    Args:
        expert: The expert.
        number: The number of the place.
        buffer: The memory of the place: uint8.

    Attributes:
        expert: As above.
        number: As above.
        buffer: As above.
        ticket: The read, from `ExpertMemory.fill` on.
        copied: The point after the copies to an accelerator.
        tensors: The tensors of each layer, from the first `ExpertMemory.use` on; the same objects each time.
    """

    ticket: Ticket

    def __init__(self, expert: Expert, number: int, buffer: torch.Tensor) -> None:
        self.expert, self.number, self.buffer = expert, number, buffer
        self.copied: Any = None
        self.tensors: Tensors | None = None


class ExpertMemory(ABC):
    """One block of memory in equal places, each as large as the largest expert.

    Args:
        experts: The experts of the device.
        count: The number of places.
        source: Reads the checkpoint.
        copy_stream: Copies to the device.

    Attributes:
        count: As above.
        place_nbytes: The bytes of a place, a multiple of 4096.
        memory: All places: uint8 [count * place_nbytes].
        is_on_host: True if the host computes. Then a read is over when its ticket is done, and computation
            when its call returns.
    """

    is_on_host = False

    def __init__(
        self, experts: Sequence[Expert], count: int, source: Source, copy_stream: CopyStream
    ) -> None:
        self.place_nbytes, self.count = place_nbytes(experts), count
        self._source, self._copy_stream = source, copy_stream
        self.memory = self._make(count * self.place_nbytes)

        with torch.inference_mode(False):  # also used outside of inference mode
            self._views = list(self.memory.view(count, self.place_nbytes)) if count else []

    @abstractmethod
    def fill(self, number: int, expert: Expert) -> Contents:
        """Returns the contents of a place and their read, which the caller submits."""

    def use(self, contents: Iterable[Contents]) -> Tensors:
        """Waits for the reads of experts, and returns their tensors for this thread.

        Raises:
            CheckpointError: One could not be read.
        """
        found = dict[QuantizedModule, Mapping[str, torch.Tensor]]()
        for each in contents:
            ticket = each.ticket
            if not ticket.is_done or ticket.error is not None:
                try:
                    ticket.wait()
                except HfqError as error:
                    raise in_unit(error, each.expert.name) from error
            if not self.is_on_host:
                self._copy_stream.compute_after(each.copied)
            if each.tensors is None:
                each.tensors = each.expert.tensors(each.buffer)
            found.update(each.tensors)
        return found

    def join(self, filled: Sequence[Contents], threads: int) -> list[Ticket | JobGroups]:
        """Returns what is submitted so that these threads read several experts."""
        return [contents.ticket for contents in filled]

    def has_failed_copy(self, contents: Contents) -> bool:
        """Returns True if a copy of an expert to an accelerator is known to have failed."""
        return contents.ticket.is_done and self._copy_stream.has_failed(contents.copied)

    def mark_use(self, marks: Sequence[Any]) -> list[Any]:
        """Returns those marks that are not past, and one after all computation of this thread."""
        self._copy_stream.record_compute(self.memory)
        return self._pending([*marks, self._copy_stream.mark_compute()])

    def free_after(self, marks: Sequence[Any]) -> None:
        """Makes later copies wait for marks of the computation."""
        for mark in self._pending(marks):
            self._copy_stream.copy_after(mark)

    def _pending(self, marks: Sequence[Any]) -> list[Any]:
        return [mark for mark in marks if not self._copy_stream.is_past(mark)]

    @abstractmethod
    def _make(self, nbytes: int) -> torch.Tensor:
        """Allocates the memory."""


def place_nbytes(experts: Iterable[Expert]) -> int:
    """Returns the bytes of a place that holds any of these experts."""
    return max((expert.place_nbytes for expert in experts), default=0)


class HostExperts(ExpertMemory):
    """Memory of experts that compute on the host. Places that were never used take no memory."""

    is_on_host = True

    def __init__(
        self, experts: Sequence[Expert], count: int, source: Source, copy_stream: CopyStream
    ) -> None:
        super().__init__(experts, count, source, copy_stream)
        self._bytes = [memory_of(view) for view in self._views]

    def fill(self, number: int, expert: Expert) -> Contents:
        contents = Contents(expert, number, self._views[number])
        read = self._source.read
        memory = self._bytes[number]
        jobs: list[Callable[[], None]] = []
        partial = functools.partial
        for wanted, first, end in expert.chunks:
            jobs.append(partial(read, wanted, memory[first:end]))
        copies = expert.layout.copies
        contents.ticket = Ticket(jobs, partial(copy_within, contents.buffer, copies) if copies else None)
        return contents

    def join(self, filled: Sequence[Contents], threads: int) -> list[Ticket | JobGroups]:
        """Joins reads of neighbors in a file, if there are more experts than threads."""
        most = len(filled) // threads
        if most < 2 or self._source.mode != "direct" or self._source.is_verified:
            return super().join(filled, threads)
        chunks = [
            _Chunk(wanted, self._bytes[contents.number][first:end], contents.ticket, number, place)
            for place, contents in enumerate(filled)
            for number, (wanted, first, end) in enumerate(contents.expert.chunks)
        ]
        empty: list[Ticket | JobGroups] = [each.ticket for each in filled if not each.expert.chunks]
        groups = _neighbors(chunks, most)
        parts = [[(chunk.ticket, chunk.number) for chunk in group] for group in groups]
        return [*empty, JobGroups(parts, functools.partial(_read_groups, self._source, groups))]

    def _make(self, nbytes: int) -> torch.Tensor:
        return huge_buffer(nbytes, is_exact=True)


class _Chunk(NamedTuple):
    """A request of an expert, and its target in whole pages.

    Attributes:
        wanted: The bytes of the file.
        target: The memory that they fill.
        ticket: The read of the expert.
        number: The number of the request among those of the expert.
        order: The number of the expert among those that are read.
    """

    wanted: ByteRange
    target: memoryview
    ticket: Ticket
    number: int
    order: int


def _adjoin(before: _Chunk, after: _Chunk) -> bool:
    """Returns True if a chunk begins in the last page of another one, or right after it."""
    pages = before.wanted.offset + len(before.target)
    return before.wanted.file == after.wanted.file and after.wanted.offset in (pages - PAGE, pages)


def _neighbors(chunks: Iterable[_Chunk], most: int) -> list[list[_Chunk]]:
    """Returns groups of chunks that are one request, in the order of their experts.

    Args:
        chunks: The chunks.
        most: The most chunks of a group.
    """
    groups: list[list[_Chunk]] = []
    for chunk in sorted(
        chunks, key=lambda chunk: (chunk.wanted.file, chunk.wanted.offset, chunk.wanted.nbytes)
    ):
        last = groups[-1] if groups else []
        end = chunk.wanted.offset + len(chunk.target)
        if 0 < len(last) < most and _adjoin(last[-1], chunk) and end - last[0].wanted.offset <= CHUNK_NBYTES:
            last.append(chunk)
        else:
            groups.append([chunk])
    return sorted(groups, key=lambda group: min(chunk.order for chunk in group))


def _read_groups(
    source: Source, groups: Sequence[Sequence[_Chunk]], group: int, begun: Sequence[int]
) -> bool:
    """Reads chunks of a group in one request; returns False if it cannot."""
    chunks = [groups[group][index] for index in begun]
    if not all(map(_adjoin, chunks, chunks[1:])):
        return False
    return source.read_together([(chunk.wanted, chunk.target) for chunk in chunks])


class AcceleratorExperts(ExpertMemory):
    """Memory of experts on an accelerator, to which they are copied from pinned host memory.

    What is on disk is read to pinned memory, and each chunk is copied as soon as it is read.

    Args:
        experts: The experts of the device.
        count: The number of places.
        source: Reads the checkpoint.
        copy_stream: Copies to the device.
    """

    def _make(self, nbytes: int) -> torch.Tensor:
        try:
            return self._copy_stream.empty(nbytes)
        except torch.OutOfMemoryError as error:
            raise PlacementError(
                "The cache of routed experts does not fit on its device.",
                expected=f"{nbytes:,} free bytes",
                found=str(error).partition("\n")[0],
                fix="Pass a smaller HfqConfig(expert_cache_size=...).",
            ) from error

    def fill(self, number: int, expert: Expert) -> Contents:
        contents, copy = Contents(expert, number, self._views[number]), self._copy_stream.copy
        buffer = contents.buffer

        def finish() -> None:
            for place, memory in [] if expert.pinned is None else expert.pinned.copies(expert.layout):
                copy(buffer[place : place + memory.numel()], memory)
            contents.copied = self._copy_stream.mark()

        jobs = [self._copying(module, contents) for module in expert.mapped]
        jobs += [self._moving(*chunk, buffer) for chunk in chunks_with_copies(expert.layout)]
        contents.ticket = Ticket(jobs, finish)
        return contents

    def _moving(
        self, wanted: ByteRange, offset: int, moves: Sequence[Move], buffer: torch.Tensor
    ) -> Callable[[], None]:
        def job() -> None:
            staging = self._copy_stream.host_buffer(-(-wanted.nbytes // PAGE) * PAGE)
            self._source.read(wanted, memory_of(staging))
            for source, target, nbytes in moves:
                first = source - offset
                self._copy_stream.copy(buffer[target : target + nbytes], staging[first : first + nbytes])

        return job

    def _copying(self, module: QuantizedModule, contents: Contents) -> Callable[[], None]:
        def job() -> None:
            memory = self._copy_stream.host_buffer(flat_layout(module.infos)[1])
            packed = FlatBuffer.pack(module.stored_tensors(), module.infos, memory)
            for local, segment in packed.segments.items():
                place = contents.expert.layout.places[module.infos[local]]
                source = packed.buffer[segment.offset : segment.offset + segment.nbytes]
                self._copy_stream.copy(contents.buffer[place : place + segment.nbytes], source)

        return job
