"""Cache of routed experts, limited in bytes.

Experts are read when they are routed to. Those that a call needs are read together, and compute in parts.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch

from hfq.checkpoint.memory_limit import available_memory
from hfq.modules.offloaded_parameter import no_copy
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.experts.decoding_counts import DecodingCounts
from hfq.offload.experts.expert_reader import Contents, Expert, ExpertMemory, place_nbytes
from hfq.offload.experts.lookahead import GuessCounts
from hfq.offload.experts.places import Held, Lease, Places
from hfq.offload.reader_threads import Pool
from hfq.placement.budget import layers_onloaded

__all__ = ["ExpertCache", "cache_nbytes", "count_places", "default_limits"]

logger = logging.getLogger("hfq")

Tensors = Mapping[QuantizedModule, Mapping[str, torch.Tensor]]

Routed = Sequence[Sequence[QuantizedModule]]
Use = Callable[[int, int, Tensors], object]
Guess = Callable[[], Routed]

_TOGETHER = 8
"""Number of experts that are waited for, and computed, together."""

_PATIENCE = 0.05
"""Seconds until a call that waits for a place looks again, since an interrupted call tells nobody."""

_HOST_SHARE = 0.1
"""Default share of the available memory of the host."""

_DEVICE_SHARE = 0.9
"""Share of the free memory of an accelerator that is used by default."""


class ExpertCache:
    """Onloads routed experts, and keeps those that are used most, of which old uses count less.

    Routing is skewed, and changes with the topic. Each device has one block of memory in equal places. A
    place gets another expert only if no thread computes with the former one.

    Args:
        experts: All offloaded experts.
        memories: The memory of each device that computes offloaded experts.
        pool: Threads that read several experts at a time.
        read_alone: Returns a layer's tensors in memory of their own, on its execution device.
        may_guess: Returns True while experts may be read before a router has chosen them.
        routed: Number of experts that a token is routed to.

    Attributes:
        guesses: Counts of the reads ahead of the router.
        decoding: Counts of the calls for single tokens.
        hits: Number of lookups of an expert that was kept, or read ahead.
        misses: Number of lookups that read the expert.
    """

    def __init__(
        self,
        experts: Iterable[Expert],
        memories: Mapping[torch.device, ExpertMemory],
        pool: Pool,
        read_alone: Callable[[QuantizedModule], Mapping[str, torch.Tensor]],
        may_guess: Callable[[], bool] = lambda: False,
        routed: int = 2,
    ) -> None:
        self.experts = tuple(experts)
        self._expert_of = {module: expert for expert in self.experts for module in expert.modules}
        self.guesses = GuessCounts()
        period = len({expert.name.rpartition(".")[0] for expert in self.experts})
        self.decoding, self._routed = DecodingCounts(period), routed
        self._places = {
            device: Places(memory, pool, self.guesses, period) for device, memory in memories.items()
        }
        self._read_alone, self._may_guess = read_alone, may_guess
        self._reset_locks()
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

    @property
    def share(self) -> float:
        """Share of the experts that have a place."""
        return sum(places.memory.count for places in self._places.values()) / max(len(self.experts), 1)

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

        def copy(*_: object) -> None:
            with torch.inference_mode(False):
                found.update({name: tensor.clone() for name, tensor in self.fetch(module).items()})

        self.within([[module]], copy)
        return found

    def within(self, routed: Routed, use: Use, guess: Guess | None = None) -> None:
        """Onloads experts for this thread part by part, and calls `use` for each part.

        Later experts are read while a part computes, as far as there are places.

        Args:
            routed: The offloaded layers of each expert, which may be none, in the order of their use.
            use: Computes with the experts [first, last) of `routed`, and gets the tensors of those of their
                layers that have a place.
            guess: Returns the offloaded layers of experts that the next call may need. They are read while
                this call computes, behind all others, and expire with the next call of this thread.

        Raises:
            CheckpointError: An expert could not be read.
        """
        expert_of = self._expert_of
        experts = [expert_of[layers[0]] if layers else None for layers in routed]
        outer = self._onloaded()
        lease = Lease(is_nested=outer is not None)
        try:
            try:
                self._run(lease, experts, use, guess)
            finally:
                lease.is_open = False
                self._here.tensors = outer
        finally:  # in case an interrupt came within the first one
            lease.is_open = False
            self._here.tensors = outer

    def reset(self) -> None:
        """Forgets all reads in progress; the child of a fork has no reader threads."""
        self._reset_locks()
        self._here = threading.local()
        for places in self._places.values():
            places.reset()

    def look_ahead(self, guess: Guess) -> None:
        """Starts to read experts that the next call of this thread may need."""
        if not self._may_guess():
            return
        expert_of = self._expert_of
        experts = [expert_of[layers[0]] for layers in guess()]
        guessed: list[Contents] = []
        self._here.guessed = guessed
        with self._lock:
            for device, places in self._places.items():
                if device.type == "cpu":
                    places.take_ahead([expert for expert in experts if expert.device == device], guessed)

    def _expire(self) -> None:
        """Ends the guesses of this thread that its call does not need."""
        guessed: list[Contents] = getattr(self._here, "guessed", [])
        self._here.guessed = []
        with self._lock:
            for device, places in self._places.items() if guessed else ():
                if device.type == "cpu":
                    places.expire(guessed)

    def _reset_locks(self) -> None:
        self._lock = threading.RLock()  # itself, since a condition takes a call of Python to enter
        self._freed = threading.Condition(self._lock)
        self._waiting = 0

    def _run(
        self,
        lease: Lease,
        experts: Sequence[Expert | None],
        use: Use,
        guess: Guess | None,
    ) -> None:
        order = {expert: index for index, expert in enumerate(experts) if expert is not None}
        held: list[Held | None] = []
        first, has_looked = 0, False
        with self._lock:
            self.decoding.calls += len(experts) == self._routed
            for device, places in self._places.items():
                places.note([expert for expert in order if expert.device == device])
        while first < len(experts):
            self._start(lease, experts, order, first, held)
            if not lease.is_nested and not has_looked and first + len(held) == len(experts):
                has_looked = True
                self._expire()
                if guess is not None:
                    self.look_ahead(guess)
            count = _size_of_part(held, len(experts) - first)
            part = [each for each in held[:count] if each is not None]
            try:
                self._here.tensors = tensors = self._onload(part)
                use(first, first + count, tensors)
            finally:
                self._release(lease, part)
            del held[:count]
            first += count

    def _onloaded(self) -> Tensors | None:
        """Returns the tensors that this thread computes with, or None outside of `within`."""
        return getattr(self._here, "tensors", None)

    def _start(
        self,
        lease: Lease,
        experts: Sequence[Expert | None],
        order: Mapping[Expert, int],
        first: int,
        held: list[Held | None],
    ) -> None:
        """Gives places to the next experts, at least to the first one, and starts their reads."""
        is_token, all_taken = len(experts) == self._routed, False
        with self._lock:
            while (index := first + len(held)) < len(experts) and not all_taken:
                run = _of_one_device(experts, index)
                if not run:  # a resident expert
                    held.append(None)
                    continue
                places = self._places[run[0].device]
                taken = places.take(run, lease, order, index)
                all_taken = len(taken.held) < len(run)
                count = len(taken.held)
                if not count and not held:
                    all_taken = False
                    if not lease.is_nested and places.are_taken_by_others():
                        self._wait_for_place()
                        continue
                    held.append(None)  # without a place, `fetch` reads each layer
                    count = 1
                held += taken.held
                self.hits += taken.kept
                self.misses += count - taken.kept
                if is_token:
                    self.decoding.note(count, taken.kept - taken.guessed)

    def _wait_for_place(self) -> None:
        self._waiting += 1
        try:
            self._freed.wait(_PATIENCE)
        finally:
            self._waiting -= 1

    def _onload(self, part: Iterable[Held]) -> Tensors:
        """Waits for the reads of experts, and returns the tensors of their layers."""
        found = dict[QuantizedModule, Mapping[str, torch.Tensor]]()
        for device, places in self._places.items():
            found.update(places.memory.use([each for _, each in part if each.expert.device == device]))
        return found

    def _release(self, lease: Lease, part: Iterable[Held]) -> None:
        """Frees the places of a part that computed."""
        with self._lock:
            for device, places in self._places.items():
                places.release([each for each in part if each[1].expert.device == device], lease)
            if self._waiting:
                self._freed.notify_all()


def _of_one_device(experts: Sequence[Expert | None], first: int) -> list[Expert]:
    """Returns the experts from a number on that have the first one's device; none if it is None."""
    found: list[Expert] = []
    for expert in itertools.islice(experts, first, None):
        if expert is None or (found and expert.device != found[0].device):
            break
        found.append(expert)
    return found


def _size_of_part(held: Sequence[Held | None], needed: int) -> int:
    """Returns the number of experts that compute next.

    Args:
        held: The places of the next experts.
        needed: The number of experts that have not computed.
    """
    if len(held) < needed:  # there is no place for more: half of them are read while the others compute
        return max(1, len(held) // 2)
    count = min(len(held), _TOGETHER)
    while count < len(held) and (each := held[count]) is not None and each[1].ticket.is_done:
        count += 1
    return count


def count_places(limit: int, experts: Sequence[Expert], routed: int) -> int:
    """Returns the number of places for the experts of a device.

    The experts that a token is routed to have places also where the limit is less. Where experts are read
    ahead, those of the next layer have as many.

    Args:
        limit: The bytes of the cache.
        experts: The offloaded experts of the device.
        routed: The number of experts that a token is routed to.
    """
    count, size = _count(limit, experts, routed)
    if 0 < limit < count * size:
        is_read_ahead = bool(experts) and layers_onloaded(experts[0].device.type) > 1
        logger.warning(
            "hfq: the expert cache of %s B is smaller than the %d experts that a token is routed to%s; "
            "it takes %s B",
            f"{limit:,}",
            count,
            " in two layers, of which one computes while the next is read" if is_read_ahead else "",
            f"{count * size:,}",
        )
    return count


def cache_nbytes(limit: int, experts: Sequence[Expert], routed: int) -> int:
    """Returns the bytes that the cache of a device takes: those of the places of `count_places`."""
    count, size = _count(limit, experts, routed)
    return count * size


def _count(limit: int, experts: Sequence[Expert], routed: int) -> tuple[int, int]:
    """Returns the number of places, and the bytes of each."""
    size = place_nbytes(experts)
    layers = layers_onloaded(experts[0].device.type) if experts else 1
    return min(len(experts), max(limit // max(size, 1), layers * routed)), size


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
