"""Lockstep: forward passes that share onloaded units; each computes as it would alone.

Each job runs in a thread of its own and stops before every offloaded unit. A unit is onloaded once, and all
jobs that wait for it compute with it, one after the other. Only one job runs at a time.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from hfq.offload.offloader import Offloader

__all__ = ["current_worker", "run_in_lockstep"]

T = TypeVar("T")

_here = threading.local()


def current_worker(offloader: Offloader) -> Worker | None:
    """Returns the job of this offloader that this thread runs, or None.

    A job may call other models, which share nothing.
    """
    worker = _any_worker()
    return worker if worker is not None and worker.offloader is offloader else None


def _any_worker() -> Worker | None:
    return getattr(_here, "worker", None)


def _forget_worker() -> None:
    """Forgets the job in the child of a fork, where no other jobs run."""
    vars(_here).clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_worker)


class _Cancelled(BaseException):
    """Unwinds a job whose result is not needed."""


class Worker:
    """One job: it runs until it needs a unit, or until it is done."""

    def __init__(self, offloader: Offloader, job: Callable[[], Any], index: int) -> None:
        self.offloader = offloader
        self._job = job
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._modes = _Modes()
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=self._context.run, args=(self._run,), name=f"hfq-lockstep-{index}", daemon=True
        )
        self._buffer: torch.Tensor | None = None
        self._is_cancelled = False
        self.waits_for: int | None = None
        self.depth = 0  # number of nested units
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Runs the job until it needs its first unit, or is done."""
        self._thread.start()
        self._back.acquire()

    def resume(self, buffer: torch.Tensor) -> None:
        """Passes the job its unit, and runs it until it needs another, or is done."""
        self._buffer, self.waits_for = buffer, None
        self._go.release()
        self._back.acquire()

    def cancel(self) -> None:
        """Unwinds the job, and joins its thread."""
        self._is_cancelled = True
        self._go.release()
        if self._thread.ident is not None:
            self._thread.join()

    def within(self, index: int, use: Callable[[torch.Tensor], T]) -> T:
        """Waits, in the job's own thread, for a unit, and passes `use` its buffer."""
        if not self._is_cancelled:
            self.waits_for = index
            self._back.release()
            self._go.acquire()
        if self._is_cancelled or self._buffer is None:
            raise _Cancelled
        buffer, self._buffer = self._buffer, None
        self.depth += 1
        try:
            with self._modes.within_stream(buffer.device):
                return use(buffer)
        finally:
            self.depth -= 1

    def _run(self) -> None:
        _here.worker = self
        try:
            with self._modes.entered():
                self.result = self._job()
        except BaseException as error:  # raised again in the thread that waits for the results
            self.error = error
        finally:
            self.is_done, self.waits_for = True, None
            self._back.release()


class _Modes:
    """torch's modes of the creating thread: gradients, inference, autocast, device, and streams."""

    def __init__(self) -> None:
        self._gradients, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        count = 0 if accelerator is None else torch.accelerator.device_count()
        self._streams = [torch.accelerator.current_stream(index) for index in range(count)]
        self._device = torch.accelerator.current_device_index() if count else None
        devices = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(devices)
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Gives these modes to a new thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            for index, stream in enumerate(self._streams):
                if torch.accelerator.current_stream(index) != stream:
                    torch.accelerator.set_stream(stream)  # and its device
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)
            for kind, dtype, is_enabled in self._autocast:
                if is_enabled:
                    stack.enter_context(torch.autocast(kind, dtype))
            yield

    @contextlib.contextmanager
    def within_stream(self, device: torch.device) -> Iterator[None]:
        """Orders this thread's stream after the creating thread's, which waits for copies, and back."""
        if device.type == "cpu":
            yield
            return
        own, other = torch.accelerator.current_stream(device), self._streams[device.index or 0]
        if own == other:
            yield
            return
        own.wait_stream(other)
        try:
            yield
        finally:
            other.wait_stream(own)


def run_in_lockstep(offloader: Offloader, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs jobs together; each unit is read once for all jobs that wait for it.

    Args:
        offloader: The offloader of the model that the jobs run.
        jobs: Functions that each run the model one or more times.

    Returns:
        The results, in the order of the jobs.

    Raises:
        Exception: The error of the first job that failed; the other jobs are unwound.
    """
    # a job shares its units already, and its other model would wait for this one
    if _any_worker() is not None:
        return [job() for job in jobs]
    workers = [Worker(offloader, job, index) for index, job in enumerate(jobs)]
    with offloader.lock:  # other threads' forward passes wait for their units
        offloader.begin_pass()
        try:
            for worker in workers:
                worker.start()
                _check(worker)
            while any(not worker.is_done for worker in workers):
                _serve(offloader, workers)
        finally:
            for worker in workers:
                worker.cancel()
    return [worker.result for worker in workers]


def _serve(offloader: Offloader, workers: Sequence[Worker]) -> None:
    """Onloads the next unit in the order of the model, and runs every job that waits for it."""
    wanted = {worker.waits_for for worker in workers if worker.waits_for is not None}
    expected = offloader.prefetch_order.expected(len(offloader.units))
    index = next((unit for unit in expected if unit in wanted), None)
    index = min(wanted) if index is None else index

    def let_all_through(buffer: torch.Tensor) -> None:
        for worker in [worker for worker in workers if worker.waits_for == index]:
            _let_through(offloader, worker, buffer)

    offloader.within(index, let_all_through)


def _let_through(offloader: Offloader, worker: Worker, buffer: torch.Tensor) -> None:
    """Runs a job through a unit and the units within it; the outer one keeps its buffer."""
    outside = worker.depth
    try:
        worker.resume(buffer)
        _check(worker)
        while worker.depth > outside and worker.waits_for is not None:
            offloader.within(worker.waits_for, functools.partial(_let_through, offloader, worker))
    except BaseException:
        worker.cancel()  # an interrupted job must leave its unit before another overwrites it
        raise


def _check(worker: Worker) -> None:
    if worker.error is not None:
        raise worker.error
