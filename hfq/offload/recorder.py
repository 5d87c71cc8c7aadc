"""Records reads, copies, waits, and computation while a recording is active."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hfq.errors import SetupError
from hfq.offload.byte_source import CHUNK_NBYTES
from hfq.offload.clock import Clock
from hfq.offload.copy_stream import clock_of
from hfq.offload.spans import Span
from hfq.tensor_spec import ByteRange

if TYPE_CHECKING:
    from hfq.offload.offloader import Offloader

__all__ = ["Recorder", "recording"]

T = TypeVar("T")


class Recorder:
    """Collects spans from the threads that read and the thread that computes.

    Args:
        clock: Stamps work that an accelerator does asynchronously.
        units: The names of the units, in the order of their numbers.
        chunks: The unit of each chunk of a file.
        unit_clocks: The clock of each unit's device; empty for `clock`.
    """

    def __init__(
        self,
        clock: Clock,
        units: Sequence[str] = (),
        chunks: Mapping[ByteRange, int] | None = None,
        unit_clocks: Sequence[Clock] = (),
    ) -> None:
        self._clock = clock
        self._unit_clocks = unit_clocks
        self._units = units
        self._chunks = chunks or {}
        self._began = time.perf_counter()
        self._notes: list[tuple[str, str, Any, Any, int, Clock]] = []
        self._copying = threading.Lock()

    def note(self, track: str, unit: int | str, start: float, end: float, nbytes: int = 0) -> None:
        """Records a span between two times of `time.perf_counter`; a unit may be a number."""
        name = unit if isinstance(unit, str) else self._units[unit]
        self._notes.append((track, name, start, end, nbytes, self._clock))

    def note_read(self, chunk: ByteRange, start: float, end: float) -> None:
        """Records the read of a chunk."""
        if chunk in self._chunks:
            self.note("read", self._chunks[chunk], start, end, chunk.nbytes)

    @contextlib.contextmanager
    def copying(self, unit: int, nbytes: int) -> Iterator[None]:
        """Records the copies that start in this context; copies of other threads wait until it ends."""
        with self._copying:
            clock = self._clock_of(unit)
            start = clock.stamp_copies()
            yield
            self._notes.append(("copy", self._units[unit], start, clock.stamp_copies(), nbytes, clock))

    def computing(
        self, unit: int | str, use: Callable[[torch.Tensor], T], track: str = "compute"
    ) -> Callable[[torch.Tensor], T]:
        """Returns `use`, recorded as the computation of a unit."""
        name, clock = unit if isinstance(unit, str) else self._units[unit], self._clock_of(unit)

        def noted(region: torch.Tensor) -> T:
            start = clock.stamp_compute()
            try:
                return use(region)
            finally:
                self._notes.append((track, name, start, clock.stamp_compute(), 0, clock))

        return noted

    def stamp(self) -> Any:
        """Returns a stamp of the time when all computation submitted so far is done."""
        return self._clock.stamp_compute()

    def note_computed(self, track: str, name: str, start: Any) -> None:
        """Records the computation that was submitted since a stamp."""
        self._notes.append((track, name, start, self._clock.stamp_compute(), 0, self._clock))

    def spans(self) -> list[Span]:
        """Returns all spans so far in the order of their starts; waits for an accelerator."""

        def seconds(stamp: Any, clock: Clock) -> float:
            return (stamp if isinstance(stamp, float) else clock.seconds(stamp)) - self._began

        found = [
            Span(track, name, seconds(start, clock), seconds(end, clock), nbytes)
            for track, name, start, end, nbytes, clock in self._notes
        ]
        return sorted(found, key=lambda span: span.start)

    def _clock_of(self, unit: int | str) -> Clock:
        return self._unit_clocks[unit] if self._unit_clocks and isinstance(unit, int) else self._clock


@contextlib.contextmanager
def recording(offloader: Offloader) -> Iterator[Recorder]:
    """Records the work of an offloader while this context is active.

    Raises:
        SetupError: A recording is already active.
    """
    if offloader.recorder is not None:
        raise SetupError(
            "A recording of this model is already active.",
            expected="one recording at a time",
            found="a second one",
            fix="End the first recording before the next one.",
        )
    chunks = {
        wanted: index
        for index, layout in enumerate(offloader.layouts)
        for run in layout.runs
        for wanted, _ in run.chunks(CHUNK_NBYTES)
    }
    clocks = {device: buffers.clock() for device, buffers in offloader.buffers.items()}
    recorder = Recorder(
        clocks.get(offloader.device) or clock_of(offloader.device),
        [unit.name for unit in offloader.units],
        chunks,
        [clocks[unit.device] for unit in offloader.units],
    )
    offloader.recorder = recorder
    for buffers in offloader.buffers.values():
        buffers.recorder = recorder
    offloader.source.on_read = recorder.note_read
    try:
        yield recorder
    finally:
        offloader.recorder = offloader.source.on_read = None
        for buffers in offloader.buffers.values():
            buffers.recorder = None
