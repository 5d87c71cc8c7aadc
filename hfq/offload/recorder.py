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
from hfq.offload.unit_layout import UnitLayout
from hfq.tensor_spec import ByteRange

if TYPE_CHECKING:
    from hfq.offload.offloader import Offloader

__all__ = ["Recorder", "recording"]

T = TypeVar("T")


class Recorder:
    """Collects spans from the threads that read and the threads that compute.

    Args:
        device: The device of the model's inputs.
        units: The names of the units, in the order of their numbers.
        devices: The execution device of each unit; empty for `device`.
        chunks: The unit, or the name of the routed expert, of each chunk of a file.
        clocks: Clocks of some devices.
    """

    def __init__(
        self,
        device: torch.device,
        units: Sequence[str] = (),
        devices: Sequence[torch.device] = (),
        chunks: Mapping[ByteRange, int | str] | None = None,
        clocks: Mapping[torch.device, Clock] | None = None,
    ) -> None:
        self._device = device
        self._units, self._devices = units, devices
        self._chunks = chunks or {}
        self._clocks = dict(clocks or {})
        self._began = time.perf_counter()
        self._notes: list[tuple[str, str, Any, Any, int, torch.device | None]] = []
        self._copying = threading.Lock()

    def clock(self, device: torch.device) -> Clock:
        """Returns the clock of a device, which is made once."""
        if device not in self._clocks:
            self._clocks[device] = clock_of(device)
        return self._clocks[device]

    def note(self, track: str, unit: int | str, start: float, end: float, nbytes: int = 0) -> None:
        """Records a span of the host between two times of `time.perf_counter`.

        A unit may be a number.
        """
        name = unit if isinstance(unit, str) else self._units[unit]
        self._notes.append((track, name, start, end, nbytes, None))

    def note_read(self, chunk: ByteRange, start: float, end: float) -> None:
        """Records the read of a chunk."""
        if chunk in self._chunks:
            self.note("read", self._chunks[chunk], start, end, chunk.nbytes)

    @contextlib.contextmanager
    def copying(self, unit: int, nbytes: int) -> Iterator[None]:
        """Records the copies that start in this context; copies of other threads wait until it ends."""
        with self._copying:
            device = self._device_of(unit)
            clock = self.clock(device)
            start = clock.stamp_copies()
            yield
            self._notes.append(("copy", self._units[unit], start, clock.stamp_copies(), nbytes, device))

    def computing(
        self, unit: int | str, use: Callable[[torch.Tensor], T], track: str = "compute"
    ) -> Callable[[torch.Tensor], T]:
        """Returns `use`, recorded as the computation of a unit."""
        name, device = unit if isinstance(unit, str) else self._units[unit], self._device_of(unit)

        def noted(region: torch.Tensor) -> T:
            start = self.stamp(device)
            try:
                return use(region)
            finally:
                self.note_computed(track, name, start, device)

        return noted

    def stamp(self, device: torch.device | None = None) -> Any:
        """Returns a stamp of the time when all computation submitted to a device so far is done."""
        return self.clock(device or self._device).stamp_compute()

    def note_computed(self, track: str, name: str, start: Any, device: torch.device | None = None) -> None:
        """Records the computation that was submitted to a device since a stamp."""
        device = device or self._device
        self._notes.append((track, name, start, self.stamp(device), 0, device))

    def spans(self) -> list[Span]:
        """Returns all spans so far in the order of their starts; waits for the accelerators."""

        def seconds(stamp: Any, device: torch.device | None) -> float:
            return (stamp if device is None else self.clock(device).seconds(stamp)) - self._began

        found = [
            Span(track, name, seconds(start, device), seconds(end, device), nbytes, str(device or ""))
            for track, name, start, end, nbytes, device in self._notes
        ]
        return sorted(found, key=lambda span: span.start)

    def _device_of(self, unit: int | str) -> torch.device:
        return self._devices[unit] if self._devices and isinstance(unit, int) else self._device


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
        wanted: unit
        for unit, layout in _layouts(offloader)
        for run in layout.runs
        for wanted, _ in run.chunks(CHUNK_NBYTES)
    }
    recorder = Recorder(
        offloader.device,
        [unit.name for unit in offloader.units],
        [unit.device for unit in offloader.units],
        chunks,
        {device: buffers.clock() for device, buffers in offloader.buffers.items()},
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


def _layouts(offloader: Offloader) -> Iterator[tuple[int | str, UnitLayout]]:
    """Yields the number of each unit and the name of each routed expert, with their reads."""
    yield from enumerate(offloader.layouts)
    for expert in offloader.experts.experts:
        yield expert.name, expert.layout
