"""Cache of routed experts, limited in bytes; experts are read when they are routed to."""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch

from hfq.checkpoint.memory_limit import available_memory
from hfq.modules.offloaded_parameter import no_copy
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.reader_threads import Pool, Ticket
from hfq.offload.stored_layers import BroughtLayer
from hfq.placement.budget import default_cache_nbytes

__all__ = ["ExpertCache", "default_limits"]

_HOST_SHARE = 0.1
"""Default share of the available memory of the host."""

_DEVICE_SHARE = 0.9
"""Share of the free memory of an accelerator that is used by default."""


class ExpertCache:
    """Keeps the most recently used experts: routing is skewed, and repeats.

    Args:
        read: Returns a module's tensors on its execution device.
        pool: Threads that read the experts of a layer together.
        limits: The most bytes that are kept on each device; a device without an entry keeps none.

    Attributes:
        limits: As above.
        hits: Number of lookups of a kept expert.
        misses: Number of lookups that read the expert.
    """

    def __init__(
        self,
        read: Callable[[QuantizedModule], BroughtLayer],
        pool: Pool,
        limits: Mapping[torch.device | None, int],
    ) -> None:
        self._read = read
        self._pool = pool
        self.limits = limits
        self._lock = threading.Lock()
        self._kept: OrderedDict[QuantizedModule, BroughtLayer] = OrderedDict()
        self._reading: dict[QuantizedModule, Ticket] = {}
        self._coming: set[QuantizedModule] = set()  # their bytes are counted, and they are not there yet
        self._nbytes: Counter[torch.device | None] = Counter()
        self.hits = self.misses = 0

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy("experts that are read when they are routed to")

    @property
    def budget(self) -> int:
        """The most bytes that are kept on all devices."""
        return sum(self.limits.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the kept experts on all devices, and of those that are being read."""
        return self._nbytes.total()

    def nbytes_by_device(self) -> dict[str, int]:
        """Returns the bytes of the kept experts on each device."""
        return {str(device): nbytes for device, nbytes in self._nbytes.items()}

    def serve(self, module: QuantizedModule) -> None:
        """Makes a module fetch its tensors here for every forward pass."""
        module.fetch = lambda: self.fetch(module).use()
        module.is_offloaded = True

    def prefetch(self, modules: Iterable[QuantizedModule]) -> None:
        """Starts to read missing modules in the order of their use, up to the limit of bytes."""
        with self._lock:
            for module in (wanted := self._within(modules)):
                if module in self._kept:
                    self._kept.move_to_end(module)
        for module in wanted:
            with self._lock:
                ticket = self._reading.get(module)
                is_failed = ticket is not None and ticket.is_done() and ticket.error is not None
                if module in self._kept or (ticket is not None and not is_failed):
                    continue
                if not self._make_room(module):
                    return
                try:
                    ticket = Ticket([functools.partial(self._read_ahead, module)])
                    self._reading[module] = self._pool.submit(ticket)
                except BaseException:
                    self._give_up(module)
                    raise

    def fetch(self, module: QuantizedModule) -> BroughtLayer:
        """Returns a module's tensors on their device."""
        with self._lock:
            ticket = self._reading.pop(module, None)
        if ticket is not None:
            ticket.wait()
        with self._lock:
            if module in self._kept and not self._kept[module].has_failed():
                self._kept.move_to_end(module)
                self.misses += ticket is not None
                self.hits += ticket is None
                return self._kept[module]
            if module in self._kept:
                self._drop(module)
            self.misses += 1
            is_kept = self._make_room(module)
        return self._bring(module) if is_kept else self._read(module)

    def reset(self) -> None:
        """Forgets all reads in progress; the child of a fork has no reader threads."""
        self._lock = threading.Lock()
        self._reading.clear()
        for module in list(self._coming):
            self._give_up(module)

    def _within(self, modules: Iterable[QuantizedModule]) -> list[QuantizedModule]:
        """Returns the first modules that a device keeps together."""
        left, found = dict(self.limits), []
        for module in modules:
            device = module.onload_device
            left[device] = left.get(device, 0) - _nbytes(module)
            if left[device] < 0:
                break
            found.append(module)
        return found

    def _read_ahead(self, module: QuantizedModule) -> None:
        self._bring(module)

    def _bring(self, module: QuantizedModule) -> BroughtLayer:
        """Reads a module that has room, and keeps it."""
        try:
            row = self._read(module)
        except BaseException:
            with self._lock:
                self._give_up(module)
            raise
        with self._lock:
            self._coming.discard(module)
            self._kept[module] = row
        return row

    def _make_room(self, module: QuantizedModule) -> bool:
        """Drops the oldest modules before another one is read, so that the limit holds at any time.

        Returns:
            False if the module is larger than the limit, or other threads read too many.
        """
        size, device = _nbytes(module), module.onload_device
        limit = self.limits.get(device, 0)
        coming = sum(_nbytes(other) for other in self._coming if other.onload_device == device)
        if module in self._coming or coming + size > limit:
            return False
        while self._nbytes[device] + size > limit:
            self._drop(next(other for other in self._kept if other.onload_device == device))
        self._coming.add(module)
        self._nbytes[device] += size
        return True

    def _drop(self, module: QuantizedModule) -> None:
        del self._kept[module]
        self._nbytes[module.onload_device] -= _nbytes(module)

    def _give_up(self, module: QuantizedModule) -> None:
        self._coming.discard(module)
        self._nbytes[module.onload_device] -= _nbytes(module)


def _nbytes(module: QuantizedModule) -> int:
    return sum(info.nbytes for info in module.infos.values())


def default_limits(modules: Iterable[QuantizedModule], context_nbytes: int) -> dict[torch.device | None, int]:
    """Returns the bytes of the cache on each device that computes offloaded experts.

    The host keeps a tenth of its available memory. An accelerator keeps what is free now, except for a share
    and for a context.

    Args:
        modules: The offloaded experts.
        context_nbytes: Bytes of the KV cache and the activations on an accelerator.
    """
    experts: Counter[torch.device] = Counter()
    for module in modules:
        experts[module.compute_device] += _nbytes(module)
    limits: dict[torch.device | None, int] = {}
    for device, nbytes in experts.items():
        if device.type in ("cpu", "mps"):
            limits[device] = int((available_memory() or 0) * _HOST_SHARE)
        else:
            free, _ = torch.accelerator.get_memory_info(device)
            limits[device] = default_cache_nbytes(int(free * _DEVICE_SHARE), nbytes, context_nbytes)
    return limits
