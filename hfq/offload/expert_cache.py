"""Cache of routed experts, limited in bytes; experts are read when they are routed to."""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch

from hfq.checkpoint.memory_limit import available_memory
from hfq.modules.offloaded_parameter import no_copy
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.reader_threads import Pool, Ticket

__all__ = ["ExpertCache", "cache_nbytes"]

Row = Mapping[str, torch.Tensor]

_SHARE = 0.1
"""Default share of the available memory for the cache."""


class ExpertCache:
    """Keeps the most recently used experts: routing is skewed, and repeats.

    Args:
        read: Returns a module's tensors on its execution device.
        pool: Threads that read the experts of a layer together.
        nbytes: The most bytes that are kept on each device; 0 keeps none.

    Attributes:
        hits: Number of lookups of a kept expert.
        misses: Number of lookups that read the expert.
    """

    def __init__(self, read: Callable[[QuantizedModule], Row], pool: Pool, nbytes: int) -> None:
        self._read = read
        self._pool = pool
        self.budget = nbytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[QuantizedModule, Row] = OrderedDict()
        self._reading: dict[QuantizedModule, Ticket] = {}
        self._nbytes: Counter[torch.device | None] = Counter()
        self.hits = self.misses = 0

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy("experts that are read when they are routed to")

    @property
    def nbytes(self) -> int:
        """Bytes of the kept experts on all devices."""
        return self._nbytes.total()

    def nbytes_by_device(self) -> dict[str, int]:
        """Returns the bytes of the kept experts on each device."""
        return {str(device): nbytes for device, nbytes in self._nbytes.items()}

    def serve(self, module: QuantizedModule) -> None:
        """Makes a module fetch its tensors here for every forward pass."""
        module.fetch = lambda: _in_use(self.fetch(module))
        module.is_offloaded = True

    def prefetch(self, modules: Iterable[QuantizedModule]) -> None:
        """Starts to read missing modules in the order of their use, up to the limit of bytes."""
        left: dict[torch.device | None, int] = {}
        for module in modules:
            device = module.onload_device
            left[device] = left.get(device, self.budget) - _nbytes(module)
            if left[device] < 0:
                return
            with self._lock:
                if module in self._kept:
                    self._kept.move_to_end(module)
                    continue
                ticket = self._reading.get(module)
                if ticket is None or (
                    ticket.is_done() and ticket.error is not None
                ):  # a failed read is repeated
                    ticket = Ticket([functools.partial(self._onload, module)])
                    self._reading[module] = self._pool.submit(ticket)

    def fetch(self, module: QuantizedModule) -> Row:
        """Returns a module's tensors on their device."""
        with self._lock:
            ticket = self._reading.pop(module, None)
        if ticket is not None:
            ticket.wait()
        with self._lock:
            if module in self._kept:
                self._kept.move_to_end(module)
                self.misses += ticket is not None
                self.hits += ticket is None
                return self._kept[module]
            self.misses += 1
        row = self._read(module)
        self._keep(module, row)
        return row

    def reset(self) -> None:
        """Forgets all reads in progress; the child of a fork has no reader threads."""
        self._lock = threading.Lock()
        self._reading.clear()

    def _onload(self, module: QuantizedModule) -> None:
        self._keep(module, self._read(module))

    def _keep(self, module: QuantizedModule, row: Row) -> None:
        size, device = _nbytes(module), module.onload_device
        if size > self.budget:
            return
        with self._lock:
            if module not in self._kept:
                self._nbytes[device] += size
            self._kept[module] = row
            self._kept.move_to_end(module)
            while self._nbytes[device] > self.budget:
                oldest = next(other for other in self._kept if other.onload_device == device)
                del self._kept[oldest]
                self._nbytes[device] -= _nbytes(oldest)


def _in_use(row: Row) -> Row:
    """Tells torch that the current stream uses a row, even if it leaves the cache before that."""
    tensor = next(iter(row.values()))
    if tensor.device.type not in ("cpu", "mps"):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return row


def _nbytes(module: QuantizedModule) -> int:
    return sum(info.nbytes for info in module.infos.values())


def cache_nbytes(asked: int | None, modules: Sequence[QuantizedModule]) -> int:
    """Returns the limit of the cache: the given one, or a tenth of the available memory."""
    if asked is not None or not modules:
        return asked or 0
    return int((available_memory() or 0) * _SHARE)
