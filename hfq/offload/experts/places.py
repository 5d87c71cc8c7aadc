"""Places for routed experts in the memory of one device, and the calls that use them."""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from hfq.offload.experts.eviction import EMPTY, HALF_LIFE, DecayedCounts, Value
from hfq.offload.experts.expert_reader import Contents, Expert, ExpertMemory
from hfq.offload.experts.lookahead import GuessCounts
from hfq.offload.reader_threads import Pool

__all__ = ["Held", "Lease", "Place", "Places"]

_MOST_ENTRIES = 4
"""Entries of the heap for each place; a place with a new value has a new one, and the old ones are stale."""


class Lease:
    """Right of one call to the places that it uses; it ends for all of them at once.

    Args:
        is_nested: True within another call of this thread. Then the call must not wait for a place.

    Attributes:
        is_open: False after its end.
        thread: The thread of the call.
        is_nested: As above.
    """

    __slots__ = ("__weakref__", "is_nested", "is_open", "thread")

    def __init__(self, is_nested: bool) -> None:
        self.is_open, self.thread, self.is_nested = True, threading.get_ident(), is_nested


class Place:
    """A place for one expert.

    Attributes:
        number: The number of the place in its memory.
        contents: The expert that it holds, or that is being read; empty ones have no expert.
        leases: The calls that use the contents. They are weak references, so that a call that was
            interrupted ends its lease.
        computed: Marks of the computation with the contents, on an accelerator.
        value: The value of the contents.
        is_guess: True if no call has asked for the contents, which were read ahead.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.contents: Contents | None = None
        self.leases: list[weakref.ref[Lease]] = []
        self.computed: list[Any] = []
        self.value: Value = EMPTY
        self.is_guess = False

    def holds(self, experts: Collection[Expert]) -> bool:
        """Returns True if the place has the contents of one of these experts."""
        return self.contents is not None and self.contents.expert in experts

    def is_settled(self) -> bool:
        """Returns True if nothing is being read to the place."""
        return self.contents is None or self.contents.ticket.is_done()

    def holders(self) -> list[Lease]:
        """Returns the leases that have not ended."""
        found = [lease for ref in self.leases if (lease := ref()) is not None and lease.is_open]
        if not found:
            self.leases = []
        return found


@dataclass(frozen=True, slots=True)
class Held:
    """A place that a call uses.

    Attributes:
        place: The place.
        contents: Its contents, which stay until the call frees the place.
        is_kept: True if it held the expert already, or a guess had begun to read it.
        is_guess: True if a guess had begun to read it, and no call had asked for it.
    """

    place: Place
    contents: Contents
    is_kept: bool
    is_guess: bool


class Places:
    """The places of one device.

    The expert with the fewest uses leaves first, of which old ones count less.

    Only one thread at a time may call a method. The contents of a place alone say what it holds, and the
    heap is made again if it has no free place, so that no place is lost by an interrupt.

    Args:
        memory: The memory of the places.
        pool: Threads that read.
        guesses: Counts the reads ahead.
        period: Number of calls of one pass.
    """

    def __init__(self, memory: ExpertMemory, pool: Pool, guesses: GuessCounts, period: int) -> None:
        self.memory, self._pool, self._guesses = memory, pool, guesses
        self.places = [Place(number) for number in range(memory.count)]
        self._uses, self._calls = DecayedCounts(HALF_LIFE, period), 0
        self._heap = self._sorted()
        self._index: dict[Expert, Place] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the places that are not empty."""
        return sum(place.contents is not None for place in self.places) * self.memory.place_nbytes

    def find(self, expert: Expert) -> Place | None:
        """Returns the place that holds an expert, or to which it is being read."""
        place = self._index.get(expert)
        contents = None if place is None else place.contents
        if place is None or contents is None or contents.expert is not expert:
            return None
        if self.memory.has_failed(contents):
            self._set_value(place, EMPTY)
            return None
        return place

    def note(self, experts: Iterable[Expert]) -> None:
        """Counts the use of all experts of a call."""
        call, self._calls = self._calls, self._calls + 1
        for expert in experts:
            value, place = self._uses.note(expert, call), self.find(expert)
            if place is not None:
                self._set_value(place, value)

    def take(self, expert: Expert, lease: Lease, needed_at: Callable[[Expert], int]) -> Held | None:
        """Returns a place of an expert; its read starts if it had none.

        Args:
            expert: The expert.
            lease: The call that uses it.
            needed_at: Returns when the same call needs an expert; a negative number if it does not later.

        Returns:
            None if calls use all places.
        """
        place = self.find(expert)
        contents = None if place is None else place.contents
        place = place or self._free_place(needed_at)
        if place is None:
            return None
        place.leases.append(weakref.ref(lease))
        is_guess = contents is not None and place.is_guess
        if contents is not None and is_guess:
            place.is_guess = False
            self._guesses.used += 1
            if not contents.ticket.is_done():
                self._pool.submit(contents.ticket)  # waits behind no other guess
        return Held(place, contents or self._fill(place, expert), contents is not None, is_guess)

    def take_ahead(self, expert: Expert, others: Collection[Expert]) -> Contents | None:
        """Reads an expert that may be needed; returns None if it is there, or can have no place.

        Args:
            expert: The expert.
            others: Experts that were guessed with it, and stay.
        """
        if self.find(expert) is not None:
            return None
        place = self._find_free(lambda place: place.is_settled() and not place.holds(others))
        if place is None:
            return None
        self._guesses.made += 1
        return self._fill(place, expert, is_guess=True)

    def expire(self, contents: Contents) -> None:
        """Drops the read of a guess that no call asked for."""
        place = self._index.get(contents.expert)
        if place is not None and place.is_guess and place.contents is contents:
            self._drop_guess(place, contents)

    def release(self, place: Place, lease: Lease) -> None:
        """Ends a lease of a place after its computation was submitted."""
        place.computed = self.memory.mark_use(place.computed)
        place.leases = [ref for ref in place.leases if ref() is not None and ref() is not lease]

    def are_taken_by_others(self) -> bool:
        """Returns True if calls of other threads use places."""
        own = threading.get_ident()
        return any(lease.thread != own for place in self.places for lease in place.holders())

    def reset(self) -> None:
        """Forgets leases and reads in progress."""
        for place in self.places:
            place.leases, place.computed, place.is_guess = [], [], False
            if place.contents is not None and not place.contents.ticket.is_done():
                place.contents, place.value = None, EMPTY
        self._heap = self._sorted()

    def _free_place(self, needed_at: Callable[[Expert], int]) -> Place | None:
        """Returns the place without a lease that has the least value.

        If the same call needs all of them later, it is the one that it needs last.
        """

        def when(place: Place) -> int:
            return -1 if place.contents is None else needed_at(place.contents.expert)

        found = self._find_free(lambda place: when(place) < 0)
        return found or max((place for place in self.places if not place.holders()), key=when, default=None)

    def _find_free(self, suits: Callable[[Place], bool]) -> Place | None:
        """Returns the place with the least value of those that have no lease and suit."""
        aside = []
        try:
            while self._heap:
                value, number = self._heap[0]
                place = self.places[number]
                if value == place.value and not place.holders() and suits(place):
                    return place
                entry = heapq.heappop(self._heap)
                aside += [entry] if value == place.value else []
        finally:
            for entry in aside:
                heapq.heappush(self._heap, entry)
        free = (place for place in self.places if not place.holders() and suits(place))
        return min(free, key=lambda place: place.value, default=None)

    def _set_value(self, place: Place, value: Value) -> None:
        if value != place.value:
            place.value = value
            heapq.heappush(self._heap, (value, place.number))
            if len(self._heap) > _MOST_ENTRIES * len(self.places):
                self._heap = self._sorted()

    def _sorted(self) -> list[tuple[Value, int]]:
        return sorted((place.value, place.number) for place in self.places)

    def _drop_guess(self, place: Place, contents: Contents) -> None:
        place.is_guess = False
        if contents.ticket.withdraw():
            self._set_value(place, EMPTY)
        else:
            self._guesses.wasted_nbytes += contents.expert.layout.needed_nbytes

    def _fill(self, place: Place, expert: Expert, is_guess: bool = False) -> Contents:
        former = place.contents
        if former is not None:
            if place.is_guess:
                self._drop_guess(place, former)
            former.ticket.cancel()  # waits for reads that a failed call left
            place.contents = None
            self._set_value(place, EMPTY)
            if self._index.get(former.expert) is place:
                del self._index[former.expert]
        self.memory.free_after(place.computed)
        place.computed = []
        contents = self.memory.fill(place.number, expert)
        try:
            self._index[expert] = place
            place.contents = contents  # before any thread writes there
            place.is_guess = is_guess
            self._set_value(place, self._uses.value(expert))
            self._pool.submit(contents.ticket, is_guess)
        except BaseException:
            contents.ticket.is_cancelled = True
            self._set_value(place, EMPTY)
            raise
        return contents
