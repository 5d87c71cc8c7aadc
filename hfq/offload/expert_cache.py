"""Routed experts that rest elsewhere: read once they are routed to, and kept as long as a budget of bytes
lasts.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from hfq.checkpoint.memory_limit import available_memory
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.guards import no_copy
from hfq.offload.reader_threads import Pool, Ticket

__all__ = ["ExpertCache", "cache_nbytes"]

Row = Mapping[str, torch.Tensor]

_SHARE = 0.1
"""Of the memory that is available, what experts may take where nobody says."""


class ExpertCache:
    """The least recently used experts leave first: which experts are routed to is skewed, and repeats.

    Args:
        read: Brings a module's row to its device.
        pool: Threads that read the experts of a layer together.
        nbytes: The most bytes that are kept; 0 keeps none.

    Attributes:
        hits: How often an expert was there.
        misses: How often it had to be read.
    """

    def __init__(self, read: Callable[[QuantizedModule], Row], pool: Pool, nbytes: int) -> None:
        self._read = read
        self._pool = pool
        self.budget = nbytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[QuantizedModule, Row] = OrderedDict()
        self._reading: dict[QuantizedModule, Ticket] = {}
        self.nbytes = self.hits = self.misses = 0

    def __deepcopy__(self, memo: dict) -> ExpertCache:
        raise no_copy("experts that are read when they are routed to")

    def serve(self, module: QuantizedModule, device: torch.device) -> None:
        """Has a module fetch its row here for every forward, and compute on this device."""
        module.fetch = functools.partial(self.fetch, module)
        module.is_offloaded = True
        module.onload_device = device

    def prefetch(self, modules: Iterable[QuantizedModule]) -> None:
        """Begins to read the modules that are not there, as many as the budget holds, in the order of their
        use.
        """
        left = self.budget
        for module in modules:
            left -= _nbytes(module)
            if left < 0:
                return
            with self._lock:
                if module in self._kept:
                    self._kept.move_to_end(module)
                    continue
                ticket = self._reading.get(module)
                if ticket is None or (
                    ticket.is_done() and ticket.error is not None
                ):  # what failed is tried again
                    ticket = Ticket([functools.partial(self._onload, module)])
                    self._reading[module] = self._pool.submit(ticket)

    def fetch(self, module: QuantizedModule) -> Row:
        """A module's tensors on their device."""
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
        """Forgets what is being read: in the child of a fork nobody reads any more."""
        self._lock = threading.Lock()
        self._reading.clear()

    def _onload(self, module: QuantizedModule) -> None:
        self._keep(module, self._read(module))

    def _keep(self, module: QuantizedModule, row: Row) -> None:
        size = _nbytes(module)
        if size > self.budget:
            return
        with self._lock:
            if module not in self._kept:
                self.nbytes += size
            self._kept[module] = row
            self._kept.move_to_end(module)
            while self.nbytes > self.budget:
                other, _ = self._kept.popitem(last=False)
                self.nbytes -= _nbytes(other)


def _nbytes(module: QuantizedModule) -> int:
    return sum(info.nbytes for info in module.infos.values())


def cache_nbytes(asked: int | None, modules: Sequence[QuantizedModule]) -> int:
    """The most bytes to keep of these modules: what was asked for, else a tenth of the available memory."""
    if asked is not None or not modules:
        return asked or 0
    return int((available_memory() or 0) * _SHARE)
