"""The offloader: keeps only the computing unit and the next one on their device.

Reader threads fill one end of the offload buffer while the unit at the other end computes, also across the
end of a pass. So a forward pass takes the longer of reading and computing, not their sum.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from hfq.checkpoint import Reader
from hfq.errors import HfqError
from hfq.modules.flat_buffer import FlatBuffer, flat_layout, read_tensor
from hfq.modules.graph_capture import uncompiled
from hfq.modules.offloaded_parameter import no_copy
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.byte_source import Source
from hfq.offload.copy_stream import copy_stream_to
from hfq.offload.embedding_rows import EmbeddingTable, is_table, read_rows_on_demand
from hfq.offload.experts.expert_cache import ExpertCache, count_places
from hfq.offload.experts.expert_reader import (
    AcceleratorExperts,
    Expert,
    ExpertMemory,
    HostExperts,
    gather_experts,
)
from hfq.offload.experts.lookahead import Lookahead, attach_lookahead, token_ids
from hfq.offload.guards import check_inputs, check_moves, in_unit, own_outputs, send_to
from hfq.offload.lockstep import current_worker
from hfq.offload.offload_buffers import AcceleratorBuffers, HostBuffers, OffloadBuffers
from hfq.offload.pinned_weights import PinnedWeights
from hfq.offload.prefetch_order import PrefetchOrder
from hfq.offload.reader_threads import Pool
from hfq.offload.recorder import Recorder
from hfq.offload.stored_layers import BroughtLayer, bring_stored
from hfq.offload.unit import (
    Binding,
    OffloadUnit,
    UnquantizedParameter,
    is_on_disk,
    owners_within,
)
from hfq.offload.unit_layout import UnitLayout, lay_out, lay_out_on_device
from hfq.placement.budget import READ_AHEAD_NBYTES

__all__ = ["OffloadOptions", "Offloader"]


T = TypeVar("T")


@dataclass(frozen=True)
class OffloadOptions:
    """Options of an offloader.

    Attributes:
        mode: `"direct"`, `"buffered"`, or `"auto"`: see `Source`.
        verify: Reads that are checked: see `Source`.
        threads: Number of reader threads.
        expert_caches: The bytes of routed experts that are kept on each device.
        routed_experts: The number of experts that a token is routed to. They have memory also where the cache
            is smaller, so that they are read together; on the CPU, those of the next layer have memory too.
        read_ahead_nbytes: The most bytes read ahead beyond the next unit, if units are small.
        mapped_nbytes: The bytes of the model's mapped weights, which the page cache must keep.
    """

    mode: str = "auto"
    verify: str = "off"
    threads: int = 8
    expert_caches: Mapping[torch.device | None, int] = field(default_factory=dict)
    routed_experts: int = 2
    read_ahead_nbytes: int = READ_AHEAD_NBYTES
    mapped_nbytes: int = 0


class Offloader:
    """Wraps the forward of every unit, and onloads its weights only during it.

    The wrapper replaces `module.forward`, as accelerate's hooks do, because torch's own hooks are skipped
    when
    a forward pass is interrupted from the keyboard.

    Args:
        units: The units; none contains another.
        reader: Reads the checkpoint.
        device: The device of the model's inputs, and of `on_demand` modules without an `onload_device`.
        on_demand: Quantized modules that belong to no unit and are fetched when they compute, such as routed
            experts.
        options: Options of the reads.
        root: The whole model: its forward is one pass over the units.
        pinned: The weights that are stored in pinned memory; None if there are none.

    Attributes:
        layouts: The layout of each unit in its offload buffer.
        buffers: The offload buffers of each execution device.
        prefetch_order: The expected order of the units, with its misses.
        lock: Held by the thread that computes a unit.
        stall_seconds: Seconds for which forward passes waited for their unit.
        buffer_overflows: Number of times that a unit had no room in the offload buffer.
        passes: Number of completed forward passes of the whole model.
        recorder: Records spans while a recording is active (`recorder.recording`).
    """

    def __init__(
        self,
        units: Sequence[OffloadUnit],
        reader: Reader,
        device: str,
        on_demand: Sequence[QuantizedModule] = (),
        options: OffloadOptions = OffloadOptions(),
        root: nn.Module | None = None,
        pinned: PinnedWeights | None = None,
    ) -> None:
        self._reader, self._pinned = reader, pinned
        self.device = torch.device(device)
        self.options = options
        for module in on_demand:
            module.onload_to(module.onload_device or self.device)
        self.units = tuple(unit for unit in units if not is_table(unit))
        self.layouts = [self._lay_out(unit) for unit in self.units]
        self.pass_nbytes = sum(layout.needed_nbytes for layout in self.layouts)
        experts = gather_experts(on_demand, pinned)
        on_disk = [info for module in on_demand if is_on_disk(module) for info in module.infos.values()]
        read = {run.source.file for layout in self.layouts for run in layout.runs}
        names = sorted(read.union(info.range.file for info in on_disk))
        nbytes = self.pass_nbytes + sum(info.nbytes for info in on_disk)
        self.source = Source(reader, options.mode, nbytes, options.verify, names, options.mapped_nbytes)
        on_disk += [info for unit in units for info in unit.infos if pinned is None or info not in pinned]
        self._files = sorted({info.range.file for info in on_disk})
        self.pool = Pool(options.threads)
        used = {unit.device for unit in units} | {expert.device for expert in experts}
        self._copy_streams = {device: copy_stream_to(device) for device in used}
        self.buffers = {device: self._make_buffers(device) for device in {unit.device for unit in self.units}}
        self._bindings = [
            Binding(unit, layout, self.buffers[unit.device].buffer)
            for unit, layout in zip(self.units, self.layouts, strict=True)
        ]
        self.prefetch_order = PrefetchOrder(range(len(self.units)))
        self.lock = threading.RLock()
        self._in_use: tuple[int, ...] = ()
        self.stall_seconds = 0.0
        self.buffer_overflows = 0
        self.passes = 0
        self.recorder: Recorder | None = None
        self.experts = self._make_cache(experts)
        self._here = threading.local()
        self._first_lookahead: Lookahead | None = None
        self._finalizer = weakref.finalize(self, Pool.close, self.pool)
        _offloaders.add(self)
        self._record()
        self._wrap_all(units, on_demand, root)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy(f"{len(self.units)} offloaded units")

    def close(self) -> None:
        """Joins the reader threads and closes their files; a later forward pass is an error."""
        self._finalizer()
        self.source.files.close()

    def within(self, index: int, use: Callable[[torch.Tensor], T]) -> T:
        """Onloads a unit and passes its buffer to `use`; meanwhile the next unit is read.

        Other threads wait. An interrupt from the keyboard may come in any call. The state is restored by code
        that
        an interrupt cannot skip, or by the next forward pass of the unit.

        Raises:
            CheckpointError: The unit could not be read.
        """
        use = use if self.recorder is None else self.recorder.computing(index, use)
        with self.lock:
            outer = self._in_use
            try:
                buffer = self._acquire(index)
                try:
                    return use(buffer)
                finally:
                    self._release(index, outer)
            finally:
                self._in_use = outer

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of all offload buffers."""
        return sum(self.buffer_nbytes_by_device().values())

    def buffer_nbytes_by_device(self) -> dict[str, int]:
        """Returns the bytes of all offload buffers on each device."""
        found = Counter[str]()
        for buffers in self.buffers.values():
            found.update(buffers.nbytes_by_device())
        return dict(found)

    def _lay_out(self, unit: OffloadUnit) -> UnitLayout:
        if unit.device.type == "cpu":
            return lay_out(unit.infos)
        return lay_out_on_device(unit.infos, self._pinned.in_order(unit.infos) if self._pinned else ())

    def _make_buffers(self, device: torch.device) -> OffloadBuffers:
        own = [index for index, unit in enumerate(self.units) if unit.device == device]
        read_ahead = self.options.read_ahead_nbytes
        if device.type == "cpu":
            return HostBuffers(self.layouts, own, self.source, self.pool, read_ahead)
        copy_stream = self._copy_streams[device]
        return AcceleratorBuffers(
            self.layouts, own, self.source, self.pool, copy_stream, self._pinned, read_ahead
        )

    def _make_cache(self, experts: Sequence[Expert]) -> ExpertCache:
        memories: dict[torch.device, ExpertMemory] = {}
        for device in {expert.device for expert in experts}:
            own = [expert for expert in experts if expert.device == device]
            limit = self.options.expert_caches.get(device, 0)
            count = count_places(limit, own, self.options.routed_experts)
            stream = self._copy_streams[device]
            if device.type == "cpu":
                memories[device] = HostExperts(own, count, self.source, stream)
            else:
                memories[device] = AcceleratorExperts(own, count, self.source, stream)
        return ExpertCache(
            experts,
            memories,
            self.pool,
            lambda module: self._read(module).use(),
            self._may_guess,
            self.options.routed_experts,
        )

    def _may_guess(self) -> bool:
        """Returns True if experts may be read ahead: buffered reads copy on the cores that compute."""
        return self.source.mode == "direct" and self._finalizer.alive

    def _buffers_of(self, index: int) -> OffloadBuffers:
        return self.buffers[self.units[index].device]

    def _wrap_all(
        self, units: Sequence[OffloadUnit], on_demand: Sequence[QuantizedModule], root: nn.Module | None
    ) -> None:
        for index, unit in enumerate(self.units):
            self._wrap(index, unit)
            for owner, weights in owners_within(unit).items():
                self._wrap_owner(owner, weights, unit.device)
            for module in unit.quantized:
                module.fetch = lambda module=module: self._read(module).use()
        for unit in units:
            unit.set_onload_device()
            if is_table(unit):
                self._read_rows(unit)
        for module in on_demand:
            self.experts.serve(module)
        is_accelerated = any(device.type != "cpu" for device in self._copy_streams)
        if (
            root is not None
            and (self._files or is_accelerated)
            and root not in [unit.module for unit in units]
        ):
            self._first_lookahead = attach_lookahead(root, lambda: getattr(self._here, "input_ids", None))
            self._wrap_root(root)
            offloaded = {unit.device: unit.name for unit in self.units}
            offloaded |= {module.compute_device: module.name for module in on_demand}
            check_moves(root, offloaded)

    def _wrap(self, index: int, unit: OffloadUnit) -> None:
        forward, binding = unit.module.forward, self._bindings[index]

        @functools.wraps(forward)
        def streamed(*args: Any, **kwargs: Any) -> Any:
            check_inputs(unit.name, args)

            def compute(buffer: torch.Tensor) -> Any:
                return binding.during(buffer, lambda: own_outputs(forward(*args, **kwargs), buffer))

            return (current_worker(self) or self).within(index, compute)

        unit.module.forward = uncompiled(streamed, reason=_not_in_graphs(unit.name))

    def _wrap_owner(
        self, owner: nn.Module, weights: Sequence[UnquantizedParameter], device: torch.device
    ) -> None:
        forward = owner.forward

        @uncompiled
        @functools.wraps(forward)
        def read_when_offloaded(*args: Any, **kwargs: Any) -> Any:
            offloaded = []
            try:
                for weight in weights:
                    if weight.is_offloaded():
                        value = read_tensor(self._reader, weight.info).to(device, weight.dtype)
                        offloaded.append((weight, weight.give(value)))
                return forward(*args, **kwargs)
            finally:
                for weight, parameter in offloaded:
                    weight.module._parameters[weight.local] = parameter

        owner.forward = read_when_offloaded

    @uncompiled
    def begin_pass(self) -> None:
        """Checks that no file of offloaded weights changed, and chooses the mode of the next pass.

        The files of units, routed experts, and embedding tables are checked.

        Raises:
            CheckpointError: The inode, size, or modification time of a file changed.
        """
        self._reader.check_unchanged(self._files)
        self.source.choose()

    def _wrap_root(self, root: nn.Module) -> None:
        forward = root.forward

        @functools.wraps(forward)
        def one_pass(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = send_to(args, self.device), send_to(kwargs, self.device)
            self._here.input_ids = token_ids(args, kwargs)
            if current_worker(self) is not None:
                return forward(*args, **kwargs)
            self.begin_pass()
            self.prefetch_order.begin()
            if self._first_lookahead is not None:
                self.experts.look_ahead(functools.partial(self._first_lookahead.guess, None))
            is_complete = False
            try:
                outputs = forward(*args, **kwargs)
                is_complete = True
            finally:
                self._here.input_ids = None
                self.prefetch_order.end(is_complete)
                self.passes += is_complete
            return outputs

        root.forward = uncompiled(one_pass, is_recursive=False)

    def _read_rows(self, unit: OffloadUnit) -> None:
        weight = unit.unquantized[0]
        stored = self._pinned[weight.info] if self._pinned and weight.info in self._pinned else None
        copy_stream, files = self._copy_streams[unit.device], self.source.files
        read_rows_on_demand(weight, EmbeddingTable(unit.name, weight, copy_stream, files, self.pool, stored))
        forward = weight.module.forward

        @functools.wraps(forward)
        def looked_up(*args: Any, **kwargs: Any) -> Any:
            check_inputs(unit.name, args)
            return forward(*args, **kwargs)

        # its reader threads end with it, and the table needs them
        looked_up.offloader = self  # type: ignore[attr-defined]
        weight.module.forward = uncompiled(looked_up, reason=_not_in_graphs(unit.name))

    def _acquire(self, index: int) -> torch.Tensor:
        self.prefetch_order.visit(index)
        buffers = self._buffers_of(index)
        started = time.perf_counter()
        if index not in self._in_use:
            self._bindings[index].recover()
        try:
            if index in self._in_use or not buffers.start(index, self._in_use):
                self.buffer_overflows += 1
                buffer = buffers.check_out(index)
            else:
                self._prefetch([*self._in_use, index])
                buffer = buffers.take(index)
        except HfqError as error:
            raise in_unit(error, self.units[index].name) from error
        self._count_wait(index, started)
        self._in_use = (*self._in_use, index)
        return buffer

    def _count_wait(self, index: int, started: float) -> None:
        ended, recorder = time.perf_counter(), self.recorder
        self.stall_seconds += ended - started
        if recorder is not None:
            recorder.note("wait", index, started, ended)

    def _release(self, index: int, outer: tuple[int, ...]) -> None:
        self._in_use = outer
        self._buffers_of(index).give_back(index)
        self._prefetch(outer)

    def _prefetch(self, kept: Sequence[int]) -> None:
        """Starts to read the next units of each device, as far as there is room."""
        kept, full = list(kept), set[torch.device]()
        if not self._finalizer.alive:
            return
        for index in self.prefetch_order.expected(len(self.units)):
            device = self.units[index].device
            if device not in full and self.buffers[device].start_ahead(index, kept):
                kept.append(index)
            else:
                full.add(device)
                if len(full) == len(self.buffers):
                    return

    def _read(self, module: QuantizedModule) -> BroughtLayer:
        """Returns a module's tensors in new memory on its execution device."""
        device, started = module.onload_device or self.device, time.perf_counter()
        copy_stream = self._copy_streams[device]
        if not is_on_disk(module):
            return bring_stored(module, copy_stream, self._pinned)
        memory = copy_stream.host_buffer(flat_layout(module.infos)[1])
        row, recorder = FlatBuffer.read(self._reader, module.infos, memory), self.recorder
        if recorder is not None:
            recorder.note("read", module.name, started, time.perf_counter(), memory.numel())
        return BroughtLayer.bring(row, copy_stream)

    def _record(self) -> None:
        """Takes the checksums of all offloaded bytes, if reads are verified."""
        if self.source.is_verified:
            for buffers in self.buffers.values():
                buffers.record()

    def reset_after_fork(self) -> None:
        """Forgets the reader threads and their reads, which the child of a fork does not have."""
        self.lock = threading.RLock()
        self._in_use, self._here = (), threading.local()
        self.source.reset_after_fork()
        for buffers in self.buffers.values():
            buffers.reset()
        self.experts.reset()


def _not_in_graphs(name: str) -> str:
    """Returns why no graph of torch holds a unit."""
    return f"{name} is offloaded, and a graph holds no offloaded weights."


_offloaders: weakref.WeakSet[Offloader] = weakref.WeakSet()


def _reset_all() -> None:
    for offloader in list(_offloaders):
        offloader.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
