"""Places for routed experts in the memory of one device, and the calls that use them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from hfq.offload.experts.expert_reader import Contents, Expert, ExpertMemory
from hfq.offload.experts.lookahead import GuessCounts
from hfq.offload.reader_threads import Pool

__all__ = ["Held", "Lease", "Place", "Places"]


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
        is_guess: True if no call has asked for the contents, which were read ahead.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.contents: Contents | None = None
        self.leases: list[weakref.ref[Lease]] = []
        self.computed: list[Any] = []
        self.is_guess = False

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
        is_kept: True if it held the expert already.
    """

    place: Place
    contents: Contents
    is_kept: bool


class Places:
    """The places of one device, in the order of their last use.

    Only one thread at a time may call a method. A place never leaves the order, and its contents alone say
    what it holds, so that no place is lost by an interrupt.

    Args:
        memory: The memory of the places.
        pool: Threads that read.
        guesses: Counts the reads ahead.
    """

    def __init__(self, memory: ExpertMemory, pool: Pool, guesses: GuessCounts) -> None:
        self.memory, self._pool, self._guesses = memory, pool, guesses
        self._order = OrderedDict.fromkeys(Place(number) for number in range(memory.count))
        self._index: dict[Expert, Place] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the places that are not empty."""
        return sum(place.contents is not None for place in self._order) * self.memory.place_nbytes

    def find(self, expert: Expert) -> Place | None:
        """Returns the place that holds an expert, or to which it is being read."""
        place = self._index.get(expert)
        contents = None if place is None else place.contents
        if contents is None or contents.expert is not expert or self.memory.has_failed(contents):
            return None
        return place

    def touch(self, expert: Expert) -> None:
        """Notes the use of an expert, if it has a place."""
        place = self.find(expert)
        if place is not None:
            self._order.move_to_end(place)

    def take(self, expert: Expert, lease: Lease, is_needed: Callable[[Expert], bool]) -> Held | None:
        """Returns a place of an expert; its read starts if it had none.

        Args:
            expert: The expert.
            lease: The call that uses it.
            is_needed: Returns True for experts that the same call needs later.

        Returns:
            None if calls use all places.
        """
        place = self.find(expert)
        contents = None if place is None else place.contents
        place = place or self._free_place(is_needed)
        if place is None:
            return None
        place.leases.append(weakref.ref(lease))
        if contents is not None and place.is_guess:
            place.is_guess = False
            self._guesses.used += 1
            if not contents.ticket.is_done():
                self._pool.submit(contents.ticket)  # waits behind no other guess
        held = Held(place, contents or self._fill(place, expert), contents is not None)
        self._order.move_to_end(place)
        return held

    def take_ahead(self, expert: Expert, others: Collection[Expert]) -> Contents | None:
        """Reads an expert that may be needed; returns None if it is there, or can have no place.

        Args:
            expert: The expert.
            others: Experts that were guessed with it, and stay.
        """
        place = self.find(expert)
        if place is not None:
            self._order.move_to_end(place)
            return None
        for place in self._order:
            former = None if place.contents is None else place.contents.expert
            if former not in others and not place.holders() and place.is_settled():
                self._guesses.made += 1
                contents = self._fill(place, expert, is_guess=True)
                self._order.move_to_end(place)
                return contents
        return None

    def expire(self, contents: Contents) -> None:
        """Drops the read of a guess that no call asked for; its place is the next one used."""
        place = self._index.get(contents.expert)
        if place is not None and place.is_guess and place.contents is contents:
            self._drop_guess(place, contents)
            self._order.move_to_end(place, last=False)

    def release(self, place: Place, lease: Lease) -> None:
        """Ends a lease of a place after its computation was submitted."""
        place.computed = self.memory.mark_use(place.computed)
        place.leases = [ref for ref in place.leases if ref() is not None and ref() is not lease]

    def are_taken_by_others(self) -> bool:
        """Returns True if calls of other threads use places."""
        own = threading.get_ident()
        return any(lease.thread != own for place in self._order for lease in place.holders())

    def reset(self) -> None:
        """Forgets leases and reads in progress."""
        for place in self._order:
            place.leases, place.computed, place.is_guess = [], [], False
            if place.contents is not None and not place.contents.ticket.is_done():
                place.contents = None

    def _free_place(self, is_needed: Callable[[Expert], bool]) -> Place | None:
        """Returns the least recently used place without a lease.

        It is the most recently used one if the same call needs all of them later.
        """
        found = None
        for place in self._order:
            if not place.holders():
                if place.contents is None or not is_needed(place.contents.expert):
                    return place
                found = place
        return found

    def _drop_guess(self, place: Place, contents: Contents) -> None:
        place.is_guess = False
        if not contents.ticket.withdraw():
            self._guesses.wasted_nbytes += contents.expert.layout.needed_nbytes

    def _fill(self, place: Place, expert: Expert, is_guess: bool = False) -> Contents:
        former = place.contents
        if former is not None:
            if place.is_guess:
                self._drop_guess(place, former)
            former.ticket.cancel()  # waits for reads that a failed call left
            place.contents = None
            if self._index.get(former.expert) is place:
                del self._index[former.expert]
        self.memory.free_after(place.computed)
        place.computed = []
        contents = self.memory.fill(place.number, expert)
        try:
            self._index[expert] = place
            place.contents = contents  # before any thread writes there
            place.is_guess = is_guess
            self._pool.submit(contents.ticket, is_guess)
        except BaseException:
            contents.ticket.is_cancelled = True
            raise
        return contents
