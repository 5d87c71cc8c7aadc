"""Places for routed experts in the memory of one device, and the calls that use them."""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hfq.offload.experts.eviction import EMPTY, HALF_LIFE, NEVER_USED, DecayedCounts, Value
from hfq.offload.experts.expert_reader import Contents, Expert, ExpertMemory
from hfq.offload.experts.lookahead import GuessCounts
from hfq.offload.reader_threads import JobGroups, Pool, Ticket

__all__ = ["Held", "Lease", "Place", "Places", "Taken"]

Entry = tuple[Value, int]
"""The value and the number of a place."""

Order = Mapping[Expert, int]
"""The number of each expert in the order of a call."""

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
        ref: A weak reference to the lease, which places keep.
    """

    __slots__ = ("__weakref__", "is_nested", "is_open", "ref", "thread")

    def __init__(self, is_nested: bool) -> None:
        self.is_open, self.thread, self.is_nested = True, threading.get_ident(), is_nested
        self.ref = weakref.ref(self)


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

    def holders(self) -> list[Lease]:
        """Returns the leases that have not ended."""
        found = [lease for ref in self.leases if (lease := ref()) is not None and lease.is_open]
        if not found:
            self.leases = []
        return found


Held = tuple[Place, Contents]
"""A place that a call uses, and its contents, which stay until the call frees the place."""


class Taken(NamedTuple):
    """Places that were given to a call.

    Attributes:
        held: The places, in the order of the experts; fewer than experts if calls use all others.
        kept: Number of those that held the expert already, or to which a guess had begun to read it.
        guessed: Number of those to which a guess had begun to read it, and no call had asked for it.
    """

    held: list[Held]
    kept: int
    guessed: int


class Places:
    """The places of one device.

    The expert with the fewest uses leaves first, of which old ones count less.

    Only one thread at a time may call a method. The contents of a place alone say what it holds, and the
    heap is made again if it has no free place, so that no place is lost by an interrupt. Methods take all
    experts of a call, since a call of Python for each of them takes longer than multiplying by small ones.

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

    def note(self, experts: Sequence[Expert]) -> None:
        """Counts the use of all experts of a call."""
        call, self._calls = self._calls, self._calls + 1
        self._uses.note_all(experts, call)
        values = self._uses.values
        for expert, place in zip(experts, self._find(experts), strict=True):
            if place is not None:
                place.value = values[expert]
                heapq.heappush(self._heap, (place.value, place.number))
        if len(self._heap) > _MOST_ENTRIES * len(self.places):
            self._heap = self._sorted()

    def take(self, experts: Sequence[Expert], lease: Lease, order: Order, first: int) -> Taken:
        """Gives places to experts, in their order, and starts the reads of those that had none.

        Args:
            experts: The experts.
            lease: The call that uses them.
            order: All experts of the call.
            first: The number of the first of `experts` in the order of the call.
        """
        held: list[Held] = []
        filled: list[Held] = []
        urgent: list[Ticket] = []
        aside: list[Entry] = []
        kept = guessed = 0
        try:
            for number, (expert, place) in enumerate(zip(experts, self._find(experts), strict=True), first):
                contents = None if place is None else place.contents
                if place is None or contents is None or contents.expert is not expert:
                    place = self._find_free(order, number, aside) or self._needed_last(order)
                    if place is None:
                        break
                    place.leases.append(lease.ref)
                    contents = self._fill(place, expert)
                    filled.append((place, contents))
                else:
                    place.leases.append(lease.ref)
                    kept += 1
                    if place.is_guess:
                        place.is_guess = False
                        guessed += 1
                        self._guesses.used += 1
                        if not contents.ticket.is_done:
                            urgent.append(contents.ticket)  # waits behind no other guess
                held.append((place, contents))
        finally:
            self._put_back(aside)
            self._submit(filled, urgent)
        return Taken(held, kept, guessed)

    def take_ahead(self, experts: Sequence[Expert], guessed: list[Contents]) -> None:
        """Reads experts that may be needed, as far as they are not there, and there are places.

        Args:
            experts: The experts.
            guessed: Receives the contents of those that are read.
        """
        order = dict.fromkeys(experts, 0)  # none of them leaves for another
        filled: list[Held] = []
        aside: list[Entry] = []
        try:
            for expert, found in zip(experts, self._find(experts), strict=True):
                if found is not None:
                    continue
                place = self._find_free(order, 0, aside, is_settled=True)
                if place is None:
                    break
                self._guesses.made += 1
                contents = self._fill(place, expert, is_guess=True)
                filled.append((place, contents))
                guessed.append(contents)
        finally:
            self._put_back(aside)
            self._submit(filled, is_guess=True)

    def expire(self, guessed: Iterable[Contents]) -> None:
        """Drops the reads of guesses that no call asked for."""
        for contents in guessed:
            place = self._index.get(contents.expert)
            if place is not None and place.is_guess and place.contents is contents:
                self._drop_guess(place, contents)

    def release(self, held: Iterable[Held], lease: Lease) -> None:
        """Ends a lease of places after their computation was submitted."""
        for place, _ in held:
            if not self.memory.is_on_host:
                place.computed = self.memory.mark_use(place.computed)
            if place.leases == [lease.ref]:
                place.leases = []
            else:
                place.leases = [ref for ref in place.leases if ref() is not None and ref is not lease.ref]

    def are_taken_by_others(self) -> bool:
        """Returns True if calls of other threads use places."""
        own = threading.get_ident()
        return any(lease.thread != own for place in self.places for lease in place.holders())

    def reset(self) -> None:
        """Forgets leases and reads in progress."""
        for place in self.places:
            place.leases, place.computed, place.is_guess = [], [], False
            if place.contents is not None and not place.contents.ticket.is_done:
                place.contents, place.value = None, EMPTY
        self._heap = self._sorted()

    def _find(self, experts: Iterable[Expert]) -> list[Place | None]:
        """Returns the place that holds each expert, or to which it is being read."""
        index, memory = self._index, self.memory
        found: list[Place | None] = []
        for expert in experts:
            place = index.get(expert)
            contents = None if place is None else place.contents
            if place is None or contents is None or contents.expert is not expert:
                found.append(None)
                continue
            ticket = contents.ticket
            has_failed = ticket.error is not None or ticket.is_cancelled
            if has_failed or (not memory.is_on_host and memory.has_failed_copy(contents)):
                self._set_value(place, EMPTY)
                place = None
            found.append(place)
        return found

    def _needed_last(self, order: Order) -> Place | None:
        """Returns the place without a lease that a call needs last, if it needs all of them."""

        def when(place: Place) -> int:
            return -1 if place.contents is None else order.get(place.contents.expert, -1)

        return max((place for place in self.places if not place.holders()), key=when, default=None)

    def _find_free(
        self, order: Order, first: int, aside: list[Entry], is_settled: bool = False
    ) -> Place | None:
        """Returns the free place with the least value that has no expert of the rest of a call.

        Args:
            order: The experts of the call.
            first: The number of the first expert of the rest.
            aside: Receives the entries of places that are not free during this call of a method.
            is_settled: True for a place to which nothing is being read.
        """
        places = self.places
        for is_whole in (False, True):
            heap = self._heap
            while heap:
                value, number = heap[0]
                place = places[number]
                if value != place.value:
                    heapq.heappop(heap)
                    continue
                contents = place.contents
                if not (place.leases and place.holders()) and (
                    contents is None
                    or (
                        order.get(contents.expert, -1) < first and (not is_settled or contents.ticket.is_done)
                    )
                ):
                    return place
                aside.append(heapq.heappop(heap))
            if not is_whole:
                self._heap = self._sorted()
                aside.clear()
        return None

    def _put_back(self, aside: list[Entry]) -> None:
        for entry in aside:
            heapq.heappush(self._heap, entry)

    def _set_value(self, place: Place, value: Value) -> None:
        if value != place.value:
            place.value = value
            heapq.heappush(self._heap, (value, place.number))
            if len(self._heap) > _MOST_ENTRIES * len(self.places):
                self._heap = self._sorted()

    def _sorted(self) -> list[Entry]:
        return sorted([(place.value, place.number) for place in self.places])

    def _drop_guess(self, place: Place, contents: Contents) -> None:
        place.is_guess = False
        if contents.ticket.withdraw():
            self._set_value(place, EMPTY)
        else:
            self._guesses.wasted_nbytes += contents.expert.layout.needed_nbytes

    def _fill(self, place: Place, expert: Expert, is_guess: bool = False) -> Contents:
        """Gives a place new contents, whose read the caller submits."""
        former = place.contents
        if former is not None:
            if place.is_guess:
                self._drop_guess(place, former)
            if not former.ticket.is_done:
                former.ticket.cancel()  # waits for reads that a failed call left
            place.contents, place.value = None, EMPTY
            if self._index.get(former.expert) is place:
                del self._index[former.expert]
        if place.computed:
            self.memory.free_after(place.computed)
            place.computed = []
        contents = self.memory.fill(place.number, expert)
        contents.ticket.is_cancelled = True  # until it is submitted
        self._index[expert] = place
        place.contents = contents  # before any thread writes there
        place.is_guess = is_guess
        self._set_value(place, self._uses.values.get(expert, NEVER_USED))
        return contents

    def _submit(self, filled: Sequence[Held], urgent: Sequence[Ticket] = (), is_guess: bool = False) -> None:
        """Submits the reads of filled places, behind those of guesses that turned out right."""
        if not filled and not urgent:
            return
        try:
            tickets: list[Ticket | JobGroups] = [*urgent]
            for _, contents in filled:
                tickets.append(contents.ticket)
                contents.ticket.is_cancelled = False
            if self.memory.is_on_host and len(filled) >= 2 * self._pool.threads:
                joined = self.memory.join([contents for _, contents in filled], self._pool.threads)
                tickets[len(urgent) :] = joined
            self._pool.submit_all(tickets, is_guess)
        except BaseException:
            for place, contents in filled:
                contents.ticket.is_cancelled = True
                self._set_value(place, EMPTY)
            raise
