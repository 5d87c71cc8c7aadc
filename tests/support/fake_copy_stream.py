"""A simulated accelerator in host memory, whose copies and computation run later, in two threads."""

import queue
import random
import threading
import time

import torch

from hfq.offload.host_memory import huge_buffer

TIMEOUT = 20


class Stream:
    """Runs its tasks in order, each after a random time."""

    def __init__(self, seed: int) -> None:
        self._dice, self._work = random.Random(seed), queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def give(self, work) -> None:
        self._work.put(work)

    def mark(self) -> threading.Event:
        event = threading.Event()
        self.give(event.set)
        return event

    def wait_for(self, event: threading.Event) -> None:
        self.give(lambda: event.wait(TIMEOUT))

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(TIMEOUT)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._dice.random() * 1e-3)
            work()


class FakeClock:
    """Stamps that the threads of a `FakeLane` set when they reach them."""

    def __init__(self, copies: Stream, computation: Stream) -> None:
        self._copies, self._computation = copies, computation

    def stamp_copies(self) -> queue.Queue:
        return self._stamp(self._copies)

    def stamp_compute(self) -> queue.Queue:
        return self._stamp(self._computation)

    def seconds(self, stamp: queue.Queue) -> float:
        return stamp.get(timeout=TIMEOUT)

    def _stamp(self, stream: Stream) -> queue.Queue:
        stamp: queue.Queue = queue.Queue()
        stream.give(lambda: stamp.put(time.perf_counter()))
        return stamp


class FakeLane:
    """A `CopyStream` with a log of starts and ends: (operation, first address, end), in their order.

    Args:
        is_host_the_device: True if the device computes in the calling thread, as a model on the CPU does.
            Marks
            of copies are then waited for immediately.
    """

    def __init__(self, is_host_the_device: bool = False, seed: int = 0) -> None:
        self._is_host_the_device = is_host_the_device
        self._copies, self._computation = Stream(seed), Stream(seed + 1)
        self._lock = threading.Lock()
        self.log: list[tuple] = []

    def note(self, what: str, memory: torch.Tensor, serial: object = None) -> None:
        with self._lock:
            self.log.append((what, memory.data_ptr(), memory.data_ptr() + memory.numel(), serial))

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def staging(self, nbytes: int) -> torch.Tensor:
        return huge_buffer(nbytes, is_touched=True)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return huge_buffer(nbytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        serial = object()
        self.note("copy asked", source, serial)
        self.note("overwriting asked", target, serial)

        def run() -> None:
            self.note("copy begun", source, serial)
            self.note("overwriting", target, serial)
            target.copy_(source)
            self.note("copy done", source, serial)

        self._copies.give(run)

    def compute(self, region: torch.Tensor, work) -> None:
        """Submits computation on a buffer to the device."""
        serial = object()
        self.note("compute asked", region, serial)

        def run() -> None:
            work()
            self.note("compute done", region, serial)

        self._computation.give(run)

    def hold_computation(self, leave: threading.Event) -> None:
        """Stops the computation of the device until `leave` is set."""
        self._computation.wait_for(leave)

    def mark(self) -> threading.Event:
        return self._copies.mark()

    def mark_compute(self) -> threading.Event:
        return self._computation.mark()

    def copy_after(self, mark: threading.Event) -> None:
        self._copies.wait_for(mark)

    def compute_after(self, mark: threading.Event) -> None:
        if self._is_host_the_device:
            self.finish(mark)
        self._computation.wait_for(mark)

    def is_past(self, mark: threading.Event) -> bool:
        return mark.is_set()

    def has_failed(self, mark: threading.Event) -> bool:
        return False

    def finish(self, mark: threading.Event) -> None:
        if not mark.wait(TIMEOUT):
            raise TimeoutError("a mark of the copies is never reached")

    def clock(self) -> "FakeClock":
        return FakeClock(self._copies, self._computation)

    def close(self) -> None:
        """Lets both threads finish their tasks."""
        self._copies.close()
        self._computation.close()

    def violations(self) -> list[str]:
        """Returns the uses of memory in the log that came too early."""
        reading, copying, computing, found = [], {}, {}, []
        asked_before: dict[object, set] = {}
        for what, first, end, serial in self.log:
            if what == "read begun":
                reading.append((first, end))
                found += [
                    "read into staging that is still being copied"
                    for span in copying.values()
                    if _meet(span, (first, end))
                ]
            elif what == "read done":
                reading.remove((first, end))
            elif what == "copy asked":
                copying[serial] = first, end
            elif what == "copy begun":
                found += ["copied before it was read" for span in reading if _meet(span, (first, end))]
            elif what == "copy done":
                del copying[serial]
            elif what == "overwriting asked":
                asked_before[serial] = {key for key, span in computing.items() if _meet(span, (first, end))}
            elif what == "overwriting":
                found += [
                    "overwritten while it computes" for key in asked_before.pop(serial) if key in computing
                ]
            elif what == "compute asked":
                computing[serial] = first, end
            elif what == "compute done":
                del computing[serial]
        return found


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
