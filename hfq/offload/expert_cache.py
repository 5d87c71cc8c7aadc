"""Cache of routed experts, limited in bytes.

Experts are read when they are routed to. Those that a call needs are read together, and compute in parts.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hfq.checkpoint.memory_limit import available_memory
from hfq.errors import HfqError
from hfq.modules.offloaded_parameter import no_copy
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.expert_reader import Contents, Expert, ExpertMemory, place_nbytes
from hfq.offload.guards import in_unit
from hfq.offload.reader_threads import Pool

__all__ = ["ExpertCache", "count_places", "default_limits"]

logger = logging.getLogger("hfq")

Tensors = Mapping[QuantizedModule, Mapping[str, torch.Tensor]]

_TOGETHER = 8
"""Number of experts that are waited for, and computed, together."""

_PATIENCE = 0.05
"""Seconds until a call that waits for a place looks again, since an interrupted call tells nobody."""

_HOST_SHARE = 0.1
"""Default share of the available memory of the host."""

_DEVICE_SHARE = 0.9
"""Share of the free memory of an accelerator that is used by default."""


class ExpertCache:
    """Onloads routed experts, and keeps the most recently used ones.

    Routing is skewed, and repeats. Each device has one block of memory in equal places. A place gets another
    expert only if no thread computes with the former one.

    Args:
        experts: All offloaded experts.
        memories: The memory of each device that computes offloaded experts.
        pool: Threads that read several experts at a time.
        read_alone: Returns a layer's tensors in memory of their own, on its execution device.

    Attributes:
        hits: Number of lookups of a kept expert.
        misses: Number of lookups that read the expert.
    """

    def __init__(
        self,
        experts: Iterable[Expert],
        memories: Mapping[torch.device, ExpertMemory],
        pool: Pool,
        read_alone: Callable[[QuantizedModule], Mapping[str, torch.Tensor]],
    ) -> None:
        self.experts = tuple(experts)
        self._expert_of = {module: expert for expert in self.experts for module in expert.modules}
        self._places = {device: _Places(memory, pool) for device, memory in memories.items()}
        self._read_alone = read_alone
        self._freed = threading.Condition()
        self._here = threading.local()
        self.hits = self.misses = 0

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy("experts that are read when they are routed to")

    @property
    def budget(self) -> int:
        """The bytes of the memory of all devices, which are never exceeded."""
        return sum(self.nbytes_by_device().values())

    @property
    def nbytes(self) -> int:
        """Bytes of the places that hold an expert, or to which one is being read."""
        return sum(places.nbytes for places in self._places.values())

    def nbytes_by_device(self) -> dict[str, int]:
        """Returns the bytes of the memory of each device."""
        return {str(device): places.memory.memory.numel() for device, places in self._places.items()}

    def serve(self, module: QuantizedModule) -> None:
        """Makes a module fetch its tensors here for every forward pass."""
        module.fetch = lambda: self.fetch(module)
        module.is_offloaded = True

    def fetch(self, module: QuantizedModule) -> Mapping[str, torch.Tensor]:
        """Returns a module's tensors: those that this thread computes with, or copies."""
        onloaded = self._onloaded()
        if onloaded is not None:
            tensors = onloaded.get(module)
            return self._read_alone(module) if tensors is None else tensors
        found = dict[str, torch.Tensor]()

        def copy(*_: int) -> None:
            with torch.inference_mode(False):
                found.update({name: tensor.clone() for name, tensor in self.fetch(module).items()})

        self.within([[module]], copy)
        return found

    def within(self, routed: Sequence[Sequence[QuantizedModule]], use: Callable[[int, int], object]) -> None:
        """Onloads experts for this thread part by part, and calls `use(first, last)` for each part.

        Later experts are read while a part computes, as far as there are places.

        Args:
            routed: The offloaded layers of each expert, which may be none, in the order of their use.
            use: Computes with the experts [first, last) of `routed`.

        Raises:
            CheckpointError: An expert could not be read.
        """
        experts = [self._expert_of[layers[0]] if layers else None for layers in routed]
        outer = self._onloaded()
        lease = _Lease(is_nested=outer is not None)
        try:
            try:
                self._run(lease, experts, use)
            finally:
                lease.is_open = False
                self._here.tensors = outer
        finally:  # in case an interrupt came within the first one
            lease.is_open = False
            self._here.tensors = outer

    def reset(self) -> None:
        """Forgets all reads in progress; the child of a fork has no reader threads."""
        self._freed, self._here = threading.Condition(), threading.local()
        for places in self._places.values():
            places.reset()

    def _run(
        self, lease: _Lease, experts: Sequence[Expert | None], use: Callable[[int, int], object]
    ) -> None:
        order = {expert: index for index, expert in enumerate(experts) if expert is not None}
        held: list[_Held | None] = []
        first = 0
        with self._freed:
            for expert in order:
                self._places[expert.device].touch(expert)
        while first < len(experts):
            self._start(lease, experts, order, first, held)
            count = _size_of_part(held, len(experts) - first)
            part = [each for each in held[:count] if each is not None]
            try:
                self._here.tensors = self._onload(part)
                use(first, first + count)
            finally:
                self._release(lease, part)
            del held[:count]
            first += count

    def _onloaded(self) -> Tensors | None:
        """Returns the tensors that this thread computes with, or None outside of `within`."""
        return getattr(self._here, "tensors", None)

    def _start(
        self,
        lease: _Lease,
        experts: Sequence[Expert | None],
        order: Mapping[Expert, int],
        first: int,
        held: list[_Held | None],
    ) -> None:
        """Gives places to the next experts, at least to the first one, and starts their reads."""
        with self._freed:
            while (index := first + len(held)) < len(experts):
                expert, taken = experts[index], None
                if expert is not None:
                    places = self._places[expert.device]
                    taken = places.take(expert, lease, functools.partial(_is_later, order, index))
                    if taken is None and held:
                        return
                    if taken is None and not lease.is_nested and places.are_taken_by_others():
                        self._freed.wait(_PATIENCE)
                        continue
                    # without a place, `fetch` reads each layer
                    is_kept = taken is not None and taken.is_kept
                    self.hits += is_kept
                    self.misses += not is_kept
                held.append(taken)

    def _onload(self, part: Iterable[_Held]) -> Tensors:
        """Waits for the reads of experts, and returns the tensors of their layers."""
        found = dict[QuantizedModule, Mapping[str, torch.Tensor]]()
        for each in part:
            expert = each.contents.expert
            try:
                found.update(self._places[expert.device].memory.use(each.contents))
            except HfqError as error:
                raise in_unit(error, expert.name) from error
        return found

    def _release(self, lease: _Lease, part: Iterable[_Held]) -> None:
        """Frees the places of a part that computed."""
        with self._freed:
            for each in part:
                self._places[each.contents.expert.device].release(each.place, lease)
            self._freed.notify_all()


class _Lease:
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


class _Place:
    """A place for one expert.

    Attributes:
        number: The number of the place in its memory.
        contents: The expert that it holds, or that is being read; empty ones have no expert.
        leases: The calls that use the contents. They are weak references, so that a call that was
            interrupted ends its lease.
        computed: Marks of the computation with the contents, on an accelerator.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.contents: Contents | None = None
        self.leases: list[weakref.ref[_Lease]] = []
        self.computed: list[Any] = []

    def holders(self) -> list[_Lease]:
        """Returns the leases that have not ended."""
        found = [lease for ref in self.leases if (lease := ref()) is not None and lease.is_open]
        if not found:
            self.leases = []
        return found


@dataclass(frozen=True, slots=True)
class _Held:
    """A place that a call uses.

    Attributes:
        place: The place.
        contents: Its contents, which stay until the call frees the place.
        is_kept: True if it held the expert already.
    """

    place: _Place
    contents: Contents
    is_kept: bool


class _Places:
    """The places of one device, in the order of their last use.

    Only one thread at a time may call a method. A place never leaves the order, and its contents alone say
    what it holds, so that no place is lost by an interrupt.
    """

    def __init__(self, memory: ExpertMemory, pool: Pool) -> None:
        self.memory, self._pool = memory, pool
        self._order = OrderedDict.fromkeys(_Place(number) for number in range(memory.count))
        self._index: dict[Expert, _Place] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the places that are not empty."""
        return sum(place.contents is not None for place in self._order) * self.memory.place_nbytes

    def find(self, expert: Expert) -> _Place | None:
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

    def take(self, expert: Expert, lease: _Lease, is_needed: Callable[[Expert], bool]) -> _Held | None:
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
        held = _Held(place, contents or self._fill(place, expert), contents is not None)
        self._order.move_to_end(place)
        return held

    def release(self, place: _Place, lease: _Lease) -> None:
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
            place.leases, place.computed = [], []
            if place.contents is not None and not place.contents.ticket.is_done():
                place.contents = None

    def _free_place(self, is_needed: Callable[[Expert], bool]) -> _Place | None:
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

    def _fill(self, place: _Place, expert: Expert) -> Contents:
        former = place.contents
        if former is not None:
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
            self._pool.submit(contents.ticket)
        except BaseException:
            contents.ticket.is_cancelled = True
            raise
        return contents


def _is_later(order: Mapping[Expert, int], index: int, expert: Expert) -> bool:
    return order.get(expert, -1) >= index


def _size_of_part(held: Sequence[_Held | None], needed: int) -> int:
    """Returns the number of experts that compute next.

    Args:
        held: The places of the next experts.
        needed: The number of experts that have not computed.
    """
    if len(held) < needed:  # there is no place for more: half of them are read while the others compute
        return max(1, len(held) // 2)
    count = min(len(held), _TOGETHER)
    while count < len(held) and (each := held[count]) is not None and each.contents.ticket.is_done():
        count += 1
    return count


def count_places(limit: int, experts: Sequence[Expert], routed: int) -> int:
    """Returns the number of places for the experts of a device.

    Args:
        limit: The bytes of the cache.
        experts: The offloaded experts of the device.
        routed: The number of experts that a token is routed to, which have places in any case.
    """
    size = max(place_nbytes(experts), 1)
    count = min(len(experts), max(limit // size, routed))
    if 0 < limit < count * size:
        logger.warning(
            "hfq: the expert cache of %s B is smaller than the %d experts that a token is routed to; "
            "it takes %s B",
            f"{limit:,}",
            count,
            f"{count * size:,}",
        )
    return count


def default_limits(devices: Iterable[torch.device], context_nbytes: int) -> dict[torch.device | None, int]:
    """Returns the bytes of the cache on devices that compute offloaded experts.

    The host keeps a tenth of its available memory. An accelerator keeps what is free now, except for a share
    and for a context.

    Args:
        devices: The devices.
        context_nbytes: Bytes of the KV cache and the activations on an accelerator.
    """
    limits: dict[torch.device | None, int] = {}
    for device in set(devices):
        if device.type in ("cpu", "mps"):
            limits[device] = int((available_memory() or 0) * _HOST_SHARE)
        else:
            free, _ = torch.accelerator.get_memory_info(device)
            limits[device] = max(0, int(free * _DEVICE_SHARE) - context_nbytes)
    return limits
