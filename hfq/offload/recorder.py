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
    """

    def __init__(
        self, clock: Clock, units: Sequence[str] = (), chunks: Mapping[ByteRange, int] | None = None
    ) -> None:
        self._clock = clock
        self._units = units
        self._chunks = chunks or {}
        self._began = time.perf_counter()
        self._notes: list[tuple[str, str, Any, Any, int]] = []
        self._copying = threading.Lock()

    def note(self, track: str, unit: int | str, start: float, end: float, nbytes: int = 0) -> None:
        """Records a span between two times of `time.perf_counter`; a unit may be a number."""
        self._notes.append((track, unit if isinstance(unit, str) else self._units[unit], start, end, nbytes))

    def note_read(self, chunk: ByteRange, start: float, end: float) -> None:
        """Records the read of a chunk."""
        if chunk in self._chunks:
            self.note("read", self._chunks[chunk], start, end, chunk.nbytes)

    @contextlib.contextmanager
    def copying(self, unit: int, nbytes: int) -> Iterator[None]:
        """Records the copies that start in this context; copies of other threads wait until it ends."""
        with self._copying:
            start = self._clock.stamp_copies()
            yield
            self._notes.append(("copy", self._units[unit], start, self._clock.stamp_copies(), nbytes))

    def computing(
        self, unit: int | str, use: Callable[[torch.Tensor], T], track: str = "compute"
    ) -> Callable[[torch.Tensor], T]:
        """Returns `use`, recorded as the computation of a unit."""
        name = unit if isinstance(unit, str) else self._units[unit]

        def noted(region: torch.Tensor) -> T:
            start = self.stamp()
            try:
                return use(region)
            finally:
                self.note_computed(track, name, start)

        return noted

    def stamp(self) -> Any:
        """Returns a stamp of the time when all computation submitted so far is done."""
        return self._clock.stamp_compute()

    def note_computed(self, track: str, name: str, start: Any) -> None:
        """Records the computation that was submitted since a stamp."""
        self._notes.append((track, name, start, self._clock.stamp_compute(), 0))

    def spans(self) -> list[Span]:
        """Returns all spans so far in the order of their starts; waits for an accelerator."""

        def seconds(stamp: Any) -> float:
            return (stamp if isinstance(stamp, float) else self._clock.seconds(stamp)) - self._began

        found = [
            Span(track, name, seconds(start), seconds(end), nbytes)
            for track, name, start, end, nbytes in self._notes
        ]
        return sorted(found, key=lambda span: span.start)


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
        for index, layout in enumerate(offloader.buffers.layouts)
        for run in layout.runs
        for wanted, _ in run.chunks(CHUNK_NBYTES)
    }
    recorder = Recorder(offloader.buffers.clock(), [unit.name for unit in offloader.units], chunks)
    offloader.recorder = offloader.buffers.recorder = recorder
    offloader.source.on_read = recorder.note_read
    try:
        yield recorder
    finally:
        offloader.recorder = offloader.buffers.recorder = offloader.source.on_read = None
