"""Reader threads that fill offload buffers while the model computes."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from hfq.errors import SetupError

__all__ = ["Part", "Pool", "Ticket", "JobGroups"]

Job = Callable[[], None]


class Ticket:
    """One buffer that is being filled; it fails with the first error of its jobs.

    Args:
        jobs: Functions that fill the buffer, each safe to run in parallel with the others.
        then: Function that runs once after the last job, in its thread.

    Attributes:
        is_done: True once no job runs and none will.
        is_cancelled: True if the jobs were dropped before all of them had run.
        error: The error of the first job that failed, or None.
        count: The number of jobs.
    """

    def __init__(self, jobs: Iterable[Job], then: Job | None = None) -> None:
        self._waiting = dict(enumerate(jobs))
        self._then = then
        self._running = 0
        self._lock = threading.Lock()
        self._closed = threading.Lock()  # held until the end; an event takes several calls
        self._closed.acquire()
        self.is_done = self.is_cancelled = False
        self.error: BaseException | None = None
        self.count = len(self._waiting)
        if not self._waiting:
            self._conclude()

    def wait(self) -> None:
        """Waits until the buffer is filled.

        Raises:
            HfqError: The error of the first job that failed.
        """
        self._await_end()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Drops the jobs that have not started, and waits for the others.

        It may be called again after an interrupt, and for a ticket whose jobs were only partly submitted.
        """
        self.is_cancelled = True
        self._drop()
        self._await_end()

    def withdraw(self) -> bool:
        """Drops all jobs if none has started; returns False otherwise."""
        with self._lock:
            if not self.count or len(self._waiting) < self.count:
                return False
            self.is_cancelled = True
            self._waiting.clear()
            self._end()
            return True

    def refuse(self, error: BaseException) -> None:
        """Fails, unless all jobs have started."""
        if self._waiting:
            self.error = self.error or error
        self._drop()

    def run_next(self) -> None:
        """Runs one job that has not started, in a thread of the pool; does nothing if there is none."""
        job = self.begin()
        if job is not None:
            self.run(job)

    def run(self, job: Job) -> None:
        """Runs a job that was begun."""
        error = None
        try:
            if not self.is_cancelled and self.error is None:
                job()
        except BaseException as raised:  # raised again in the thread that waits for the buffer
            error = raised
        self.end(error)

    def begin(self, number: int | None = None) -> Job | None:
        """Returns the job of this number, or the next one, which the caller runs and ends.

        Returns:
            None if it has begun, or was dropped.
        """
        with self._lock:
            if number is None:
                number = next(iter(self._waiting), -1)
            job = self._waiting.pop(number, None)
            self._running += job is not None
        return job

    def end(self, error: BaseException | None = None) -> None:
        """Ends a job that was begun.

        Args:
            error: The error of the job, or None.
        """
        self.error = self.error or error
        with self._lock:
            is_last = not self._waiting and self._running == 1
            self._running -= not is_last  # the last job counts as running until `then` is done, too
        if is_last:
            self._conclude()

    def _drop(self) -> None:
        with self._lock:
            self._waiting.clear()
            if self._running == 0:
                self._end()

    def _conclude(self) -> None:
        try:
            if self._then is not None and self.error is None and not self.is_cancelled:
                self._then()
        except BaseException as error:
            self.error = error
        self._then = None
        with self._lock:
            self._running = 0
            self._end()

    def _end(self) -> None:
        """Lets all threads go on that wait; the caller holds the lock."""
        if not self.is_done:
            self.is_done = True
            self._closed.release()

    def _await_end(self) -> None:
        while not self.is_done:
            with self._closed:
                pass


Part = tuple[Ticket, int]
"""A job of a ticket, with its number."""


class JobGroups:
    """Jobs of several tickets, in groups that one function may do at once.

    Args:
        groups: The jobs of each group.
        do: Does the jobs of these numbers of a group. If it returns False or fails, they run one by one, and
            each ticket gets the error of its own job.

    Attributes:
        count: The number of groups.
    """

    def __init__(self, groups: Sequence[Sequence[Part]], do: Callable[[int, Sequence[int]], bool]) -> None:
        self._groups, self._do = groups, do
        self._next = itertools.count()
        self.count = len(groups)

    def run_next(self) -> None:
        """Does the jobs of the next group that have not begun, in a thread of the pool."""
        group = next(self._next)
        begun = [
            (index, ticket, job)
            for index, (ticket, number) in enumerate(self._groups[group])
            if (job := ticket.begin(number)) is not None
        ]
        is_done = False
        with contextlib.suppress(Exception):  # each job then runs alone, and meets its own error
            is_done = len(begun) > 1 and self._do(group, [index for index, _, _ in begun])
        for _, ticket, job in begun:
            if is_done:
                ticket.end()
            else:
                ticket.run(job)

    def refuse(self, error: BaseException) -> None:
        """Fails the tickets, unless all of their jobs have started."""
        for group in self._groups:
            for ticket, _ in group:
                ticket.refuse(error)


class Pool:
    """Daemon threads that run jobs in the order of submission, from the first job until `close`.

    Jobs that may be useless run when no other job waits, and in half of the threads.

    Args:
        threads: The most threads.

    Attributes:
        threads: As above.
        busy_seconds: Seconds during which at least one job ran.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._reset()
        _pools.add(self)

    def submit(self, ticket: Ticket, is_guess: bool = False) -> Ticket:
        """Submits the jobs of a ticket to the threads; see `submit_all`."""
        self.submit_all([ticket], is_guess)
        return ticket

    def submit_all(self, tickets: Sequence[Ticket | JobGroups], is_guess: bool = False) -> None:
        """Submits the jobs of tickets to the threads.

        Args:
            tickets: The tickets. Those that were submitted as guesses may be submitted again, to wait no
                longer.
            is_guess: True if the jobs may be useless.

        Raises:
            SetupError: The pool is closed.
        """
        with self._lock:
            if self._is_closed:
                raise SetupError(
                    "The reader threads of this model were closed.",
                    expected="an open model",
                    found="a model that was closed",
                    fix="Load the model again.",
                )
            jobs = [ticket for ticket in tickets for _ in range(ticket.count)]
            self._queue.put(jobs, is_guess)
            while jobs and len(self._threads) < self.threads:
                thread = threading.Thread(
                    target=_work, args=(self._queue, self._clock), name="hfq-reader", daemon=True
                )
                self._threads.append(thread)
                try:
                    thread.start()
                except RuntimeError as error:
                    # the system allows no more threads, so the running ones do all the work
                    self._threads.remove(thread)
                    for ticket in [] if self._threads else tickets:
                        ticket.refuse(_no_thread(error))
                    break

    @property
    def busy_seconds(self) -> float:
        return self._clock.seconds

    def close(self) -> None:
        """Drops the jobs that have not started, and joins the threads."""
        with self._lock:
            self._is_closed = True
            threads = self._threads.copy()
            self._threads.clear()
        for ticket in self._queue.clear():
            ticket.refuse(_closed())
        for _ in threads:
            self._queue.end_thread()
        # not in a reader that drops the last reference: it may hold a lock that another one waits for
        if threading.current_thread() not in threads:
            for thread in threads:
                if thread.ident is not None:  # an interrupt may have come before it was started
                    thread.join()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._queue = _Queue(max(1, self.threads // 2))
        self._threads: list[threading.Thread] = []
        self._clock = _Clock()
        self._is_closed = False


class _Queue:
    """Tickets in the order of submission, with guesses behind all others.

    A thread waits only if there is no ticket, so that an interrupted `put` holds none back. No lock is held.

    Args:
        guesses: The most guesses that run at a time.
    """

    def __init__(self, guesses: int) -> None:
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._tickets = collections.deque[Ticket | JobGroups]()
        self._guesses = collections.deque[Ticket | JobGroups]()
        self._free = threading.Semaphore(guesses)

    def put(self, tickets: Iterable[Ticket | JobGroups], is_guess: bool) -> None:
        """Adds a ticket for each of its jobs."""
        waiting = self._guesses if is_guess else self._tickets
        for ticket in tickets:
            waiting.append(ticket)
            self._wakes.put(True)

    def get(self) -> tuple[Ticket | JobGroups, bool] | None:
        """Returns the next ticket and True for a guess, or None if the thread must end."""
        while True:
            with contextlib.suppress(IndexError):
                return self._tickets.popleft(), False
            while self._guesses and self._free.acquire(blocking=False):
                with contextlib.suppress(IndexError):
                    return self._guesses.popleft(), True
                self._free.release()
            if not self._wakes.get():
                return None

    def end_guess(self) -> None:
        """Notes that a guess ran."""
        self._free.release()

    def clear(self) -> list[Ticket | JobGroups]:
        """Returns all tickets, and forgets them."""
        found = []
        for tickets in (self._tickets, self._guesses):
            with contextlib.suppress(IndexError):
                while True:
                    found.append(tickets.popleft())
        return found

    def end_thread(self) -> None:
        """Makes one thread end."""
        self._wakes.put(False)


class _Clock:
    """Sums up the time during which at least one thread is busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = 0
        self._since = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._busy == 0:
                self._since = time.perf_counter()
            self._busy += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._busy -= 1
            if self._busy == 0:
                self.seconds += time.perf_counter() - self._since


def _work(jobs: _Queue, clock: _Clock) -> None:
    """Runs in a thread of the pool, and refers only to the pool's parts."""
    while (found := jobs.get()) is not None:
        ticket, is_guess = found
        try:
            with clock:
                ticket.run_next()
        finally:
            if is_guess:
                jobs.end_guess()
        del ticket, found


def _no_thread(error: RuntimeError) -> SetupError:
    return SetupError(
        "No reader thread could be started.",
        expected="one thread or more",
        found=error,
        fix="Raise the limit of threads (ulimit -u, or the container's), or end other processes.",
    )


def _closed() -> SetupError:
    return SetupError(
        "A part of the model was closed while it was read.",
        expected="a model in use",
        found="a model that was closed",
        fix="Load the model again.",
    )


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forget_threads() -> None:
    """Forgets the threads in the child of a fork, which starts its own with its first job."""
    for pool in list(_pools):
        pool._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
