"""What was read, copied, waited for and computed, and when: recorded while somebody asks for it, and nothing
otherwise.
"""

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
        clock: Stamps what an accelerator does later than it was asked to.
        units: The names of the blocks, by their numbers.
        chunks: Which block each chunk of a file is read for.
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
        """Notes what took from one time of `time.perf_counter` to another; a block may be given by its
        number.
        """
        self._notes.append((track, unit if isinstance(unit, str) else self._units[unit], start, end, nbytes))

    def note_read(self, chunk: ByteRange, start: float, end: float) -> None:
        """Notes that a chunk was read."""
        if chunk in self._chunks:
            self.note("read", self._chunks[chunk], start, end, chunk.nbytes)

    @contextlib.contextmanager
    def copying(self, unit: int, nbytes: int) -> Iterator[None]:
        """Notes the copies that are begun within this; other threads' copies wait, so as not to be counted
        along.
        """
        with self._copying:
            start = self._clock.stamp_copies()
            yield
            self._notes.append(("copy", self._units[unit], start, self._clock.stamp_copies(), nbytes))

    def computing(
        self, unit: int | str, use: Callable[[torch.Tensor], T], track: str = "compute"
    ) -> Callable[[torch.Tensor], T]:
        """`use`, noted as what a block computes."""
        name = unit if isinstance(unit, str) else self._units[unit]

        def noted(region: torch.Tensor) -> T:
            start = self.stamp()
            try:
                return use(region)
            finally:
                self.note_computed(track, name, start)

        return noted

    def stamp(self) -> Any:
        """A stamp of when all that was given to the device so far is computed."""
        return self._clock.stamp_compute()

    def note_computed(self, track: str, name: str, start: Any) -> None:
        """Notes what was given to the device since a stamp."""
        self._notes.append((track, name, start, self._clock.stamp_compute(), 0))

    def spans(self) -> list[Span]:
        """What was noted so far, by its start; waits for an accelerator to be done with it."""

        def seconds(stamp: Any) -> float:
            return (stamp if isinstance(stamp, float) else self._clock.seconds(stamp)) - self._began

        found = [
            Span(track, name, seconds(start), seconds(end), nbytes)
            for track, name, start, end, nbytes in self._notes
        ]
        return sorted(found, key=lambda span: span.start)


@contextlib.contextmanager
def recording(offloader: Offloader) -> Iterator[Recorder]:
    """Records what a streamer does meanwhile.

    Raises:
        SetupError: It is being recorded already.
    """
    if offloader.recorder is not None:
        raise SetupError(
            "This model's streaming is being recorded already.",
            expected="one recording at a time",
            found="a second one",
            fix="end the first one, or record all of it as one",
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
