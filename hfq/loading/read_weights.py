"""Reading of quantized weights by a read plan, and the summary of a load.

Weights on disk stay there; only their small tensors are read and checked. Weights on the CPU are mapped if
they are aligned, and otherwise read into one buffer. Those from which an accelerator copies are read into
pinned memory. Weights on an accelerator pass through a staging buffer of limited size. Mapped weights that
are not in the page cache are read into it, so that they are in memory when the load returns.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from transformers.utils import logging

from hfq.checkpoint import Reader
from hfq.checkpoint.execute_reads import cold_ranges, fill_page_cache, read_into_buffer
from hfq.checkpoint.filesystem import is_network
from hfq.checkpoint.memory_limit import available_memory
from hfq.checkpoint.read_plan import ModuleRead, ReadBuffer, ReadPlan, plan_reads
from hfq.checkpoint.shared_memory import SharedMemory
from hfq.errors import PlacementError
from hfq.formats import Format
from hfq.loading.context import load_context
from hfq.loading.ranks import is_deepspeed
from hfq.loading.state import LoadState
from hfq.loading.validation import check_bias, check_host_memory
from hfq.modules.flat_buffer import FlatBuffer, is_mappable, map_tensors, stack_tensors
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.host_memory import huge_buffer
from hfq.offload.pinned_memory import can_pin_in_place, pin_in_place, pinned_memory
from hfq.offload.pinned_weights import PinnedWeights
from hfq.offload.upload import Upload
from hfq.tensor_spec import DEVICE_ALIGNMENT, ByteRange, TensorInfo

__all__ = ["ReadReport", "load_quantized_weights", "log_summary", "plan_weight_reads", "progress_bar"]

logger = logging.get_logger("hfq")

_CHECKS = "checks"
_PRIVATE = "cpu"
_SHARED = "shared"
_PINNED = "pinned"
_FITTING = 'Pass device_map="auto", which leaves on disk what does not fit.'
_THREADS, _NETWORK_THREADS = 4, 16
_SMALL = 64 << 20
_STACKED_NBYTES = 16 << 20
"""Most bytes of equal modules that are checked together, so that temporary values are small."""
_LOCAL_COUNTS = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)
"""Variables in which torchrun, DeepSpeed, Open MPI, MVAPICH, and Intel MPI count the processes of a node."""


@dataclass(frozen=True)
class ReadReport:
    """Bytes and seconds that reading the quantized weights took.

    Attributes:
        seconds: Time in seconds.
        mapped: Bytes that stay mapped from the files.
        populated: Mapped bytes that were read into the page cache.
        read: Bytes that this process has read.
        shared: Bytes in memory that is shared with other processes.
        threads: Number of reader threads.
    """

    seconds: float
    mapped: int
    populated: int
    read: int
    shared: int
    threads: int

    def __str__(self) -> str:
        moved = self.populated + self.read
        rate = f" at {moved / self.seconds / 1e9:.2f} GB/s" if self.seconds > 0 else ""
        shared = f", {self.shared:,} bytes in shared memory" if self.shared else ""
        return (
            f"{self.read:,} bytes read, {self.mapped:,} mapped "
            f"({self.populated:,} into the page cache){shared}: "
            f"{self.seconds:.2f} s{rate}, {self.threads} threads"
        )


def load_quantized_weights(
    loading: LoadState, hidden: Collection[str]
) -> tuple[ReadPlan, ReadReport, PinnedWeights | None]:
    """Reads every quantized module to its device, and checks the values of its small tensors.

    Args:
        loading: A load that has chosen its devices.
        hidden: Names of the tensors that transformers does not see.

    Returns:
        The read plan, the report of its execution, and the weights in pinned memory, if there are any.

    Raises:
        PlacementError: `cpu_memory="mmap"` or `"shared"` is not possible.
        FormatError: A small tensor has impossible values.
        CheckpointError: A file changed or cannot be read.
    """
    started, reader = time.perf_counter(), loading.reader
    is_remote = any(map(is_network, loading.checkpoint.headers))
    plan, prefilled = plan_weight_reads(loading, hidden), load_context().page_cache_reads
    if prefilled is not None:
        with progress_bar(sum(source.nbytes for source in plan.mapped)) as progress:
            prefilled.wait(progress)
        reader.count(populated=prefilled.populated)
    cold = [] if prefilled is not None and prefilled.is_complete else _worth_bringing_in(plan, reader)
    threads = _NETWORK_THREADS if is_remote else _THREADS
    with progress_bar(plan.bytes_read + sum(source.nbytes for source in cold)) as progress:
        filler = _Filler(loading, plan, threads, progress)
        for buffer in plan.buffers.values():
            filler.fill(buffer)
        filler.upload.finish()
        fill_page_cache(cold, reader, threads, is_remote, progress)
    for read in plan.reads:
        if read.how == "mapped" and read.name in loading.quantized:
            loading.quantized[read.name].hold(map_tensors(reader, read.infos))
    counters, mapped = reader.counters, sum(source.nbytes for source in plan.mapped)
    seconds = time.perf_counter() - started
    report = ReadReport(
        seconds, mapped, counters.populated, counters.bytes_read, filler.shared_nbytes, threads
    )
    return plan, report, filler.pinned


def log_summary(loading: LoadState, seconds: float) -> None:
    """Logs one line about the whole load, at level info."""
    if not logger.isEnabledFor(logging.INFO):
        return  # making the plan takes time
    logger.info(
        "hfq: loaded %s in %.2f s: %d quantized modules (%s); %s; %s",
        loading.checkpoint.root,
        seconds,
        len(loading.quantized),
        loading.describe_formats(),
        loading.plan,
        loading.read_report,
    )


def plan_weight_reads(loading: LoadState, hidden: Collection[str]) -> ReadPlan:
    """Returns the read plan of a load that has chosen its devices.

    Args:
        loading: The load.
        hidden: Names of the tensors that transformers does not see.

    Raises:
        PlacementError: `cpu_memory="mmap"` is not possible.
    """
    is_remote = any(map(is_network, loading.checkpoint.headers))
    reads: list[ModuleRead] = []
    is_sharing = loading.config.cpu_memory == "shared" or (
        loading.config.cpu_memory == "auto" and _local_processes() > 1
    )
    copies = _SHARED if is_sharing else _PRIVATE
    why_read = (
        "on a network file system"
        if is_remote
        else "DeepSpeed casts tensors separately"
        if is_deepspeed()
        else ""
    )
    for name, module in loading.quantized.items():
        device, why_pinned = loading.devices[name], _why_pinned(loading, name)
        if why_pinned:
            read = _pinned(name, why_pinned, module.infos)
        else:
            read = _planned(name, device, module, loading.config.cpu_memory, why_read, copies)
        reads.append(read)
        if read.how != "read":
            small = {
                local: info
                for local, info in module.infos.items()
                if local != module.weight_format.codes_name
            }
            reads.append(ModuleRead(name, device, "read", "values are checked while loading", small, _CHECKS))
    accelerators = sorted({read.device for read in reads} - {"cpu", "disk"})
    buffers = [
        ReadBuffer(_CHECKS, 0, "staging", gap=0),  # gap=0, since the bytes between small tensors are codes
        ReadBuffer(_PRIVATE, 0, "private"),
        ReadBuffer(_SHARED, 0, "shared"),
        ReadBuffer(_PINNED, 0, _pinned_kind(loading, is_sharing), is_pinned=True),
        *(ReadBuffer(device, 0, "staging") for device in accelerators),
    ]
    return plan_reads([*_dense_rows(loading, hidden), *reads], buffers)


def _planned(
    name: str, device: str, module: QuantizedModule, cpu_memory: str, why_read: str, copies: str
) -> ModuleRead:
    infos, is_aligned = module.infos, is_mappable(module.infos)
    if device == "disk":
        return ModuleRead(name, device, "disk", "read when the module computes", infos)
    if device != "cpu":
        why = f"copied to {device} from a staging buffer"
        return ModuleRead(name, device, "read", why, infos, device, alignment=DEVICE_ALIGNMENT)
    if cpu_memory == "mmap" and not is_aligned:
        raise PlacementError(
            "A quantized module cannot be mapped from its file. Nothing was loaded.",
            tensor=name,
            file=next(iter(infos.values())).range.file,
            expected="tensors aligned to their own dtype",
            found=", ".join(f"{i.name} at byte {i.range.offset}" for i in infos.values()),
            fix='Pass HfqConfig(cpu_memory="auto").',
        )
    if cpu_memory in ("private", "shared"):
        return ModuleRead(name, device, "read", f'cpu_memory="{cpu_memory}"', infos, copies)
    if cpu_memory == "auto" and not is_aligned:
        return ModuleRead(name, device, "read", "not aligned to its own dtype in the file", infos, copies)
    if cpu_memory == "auto" and why_read:
        return ModuleRead(name, device, "read", why_read, infos, copies)
    return ModuleRead(name, device, "mapped", "aligned, shared through the page cache", infos)


def _why_pinned(loading: LoadState, name: str) -> str:
    """Returns why a tensor is read to pinned memory, or an empty text if it is not."""
    executes = loading.executes.get(name, loading.main)
    is_pinned = loading.devices.get(name) == "cpu" != executes and loading.config.cpu_memory != "mmap"
    return f"copied to {executes} from pinned memory" if is_pinned else ""


def _pinned_kind(loading: LoadState, is_sharing: bool) -> Literal["private", "shared"]:
    """Returns whether the processes of a node share the memory from which accelerators copy.

    Raises:
        PlacementError: `cpu_memory="shared"` is not possible with these accelerators.
    """
    devices = _accelerators(loading)
    if not is_sharing or can_pin_in_place(devices):
        return "shared" if is_sharing else "private"
    if loading.config.cpu_memory == "shared":
        raise PlacementError(
            "The weights cannot be in shared memory with this accelerator. Nothing was loaded.",
            expected="an accelerator that can pin existing memory, such as a CUDA device",
            found=", ".join(map(str, devices)),
            fix='Pass HfqConfig(cpu_memory="auto"): each process then keeps its own copy.',
        )
    return "private"


def _accelerators(loading: LoadState) -> list[torch.device]:
    return [torch.device(name) for name in sorted({*loading.executes.values()} - {"cpu"})]


def _pinned(name: str, why: str, infos: Mapping[str, TensorInfo]) -> ModuleRead:
    return ModuleRead(name, "cpu", "read", why, infos, _PINNED, alignment=DEVICE_ALIGNMENT)


def _dense_rows(loading: LoadState, hidden: Collection[str]) -> Iterator[ModuleRead]:
    """Yields the reads of unquantized tensors.

    transformers maps those that are neither on disk nor in pinned memory.
    """
    stored = {name: {name: info} for name, info in loading.match.unquantized.items()}
    for name, parts in loading.match.merged.items():
        stored[name] = {f"{name} from {part}": loading.checkpoint.tensors[part] for part in parts}
    for name, infos in stored.items():
        device, why_pinned = loading.devices.get(name, loading.main), _why_pinned(loading, name)
        if name in hidden and why_pinned:
            yield _pinned("", why_pinned, infos)
        elif name in hidden:
            yield ModuleRead("", device, "disk", "read when the module computes", infos)
        else:
            yield ModuleRead("", device, "mapped", "mapped by transformers", infos)


class _Filler:
    """Fills the buffers of a read plan in turn, and passes each flat buffer to its module."""

    def __init__(
        self, loading: LoadState, plan: ReadPlan, threads: int, progress: Callable[[int], object]
    ) -> None:
        self._loading = loading
        self._plan = plan
        self._threads = threads
        self._progress = progress
        self._targets = {
            name: plan.reads_into(name)[0].device
            for name, buffer in plan.buffers.items()
            if buffer.kind == "staging" and not name.startswith(_CHECKS)
        }
        self.upload = Upload(list(self._targets.values()), plan.staging)
        self.shared_nbytes = 0
        self.pinned: PinnedWeights | None = None

    def fill(self, buffer: ReadBuffer) -> None:
        """Reads a buffer, and passes its parts to the modules."""
        memory = self._shared(buffer) if buffer.kind == "shared" else self._own(buffer)
        reads = self._plan.reads_into(buffer.name)
        if buffer.is_pinned:
            self.pinned = PinnedWeights(torch.frombuffer(memory, dtype=torch.uint8))
            for read in reads:
                for local, info in read.infos.items():
                    self.pinned.add(info, read.offset + read.layout[0][local].offset)
        resolved = self._resolve_stacks(reads, memory)
        for read in sorted(reads, key=lambda read: read.position) if len(resolved) < len(reads) else reads:
            if read.name:
                self._give(read, memory, buffer, resolved.get(read.name))
        if buffer.name in self._targets:
            self.upload.end_batch(self._targets[buffer.name])

    def _own(self, buffer: ReadBuffer) -> memoryview:
        if buffer.name in self._targets:
            memory = _bytes(self.upload.begin_batch())
        elif buffer.is_pinned:
            memory = _bytes(pinned_memory(buffer.nbytes, _accelerators(self._loading), is_in_background=True))
        elif buffer.kind == "staging":
            memory = _bytes(self._checked[: buffer.nbytes])
        else:
            memory = _bytes(huge_buffer(buffer.nbytes))
        self._read(buffer, memory)
        return memory

    @functools.cached_property
    def _checked(self) -> torch.Tensor:
        """The memory of all batches that are only checked; its pages are allocated once."""
        return huge_buffer(self._plan.staging)

    def _shared(self, buffer: ReadBuffer) -> memoryview:
        key = _identity(self._plan, buffer, self._loading.reader)
        shared = (
            SharedMemory.open(
                key, buffer.nbytes, lambda memory: self._read(buffer, memory), is_private=not buffer.is_pinned
            )
            if buffer.nbytes
            else None
        )
        if shared is None and buffer.nbytes and self._loading.config.cpu_memory == "shared":
            raise PlacementError(
                "The weights do not fit in shared memory. Nothing was loaded.",
                file="/dev/shm",
                found="too little free space, no shared memory, or no free name",
                expected=f"{buffer.nbytes} free bytes",
                fix='Free shared memory, or pass HfqConfig(cpu_memory="auto").',
            )
        if shared is None:
            return self._own(buffer)
        if not shared.was_filled:  # another process read it
            self._progress(sum(request.source.nbytes for request in self._plan.requests[buffer.name]))
        self.shared_nbytes += buffer.nbytes
        if not buffer.is_pinned:
            return memoryview(shared.memory)
        memory = np.frombuffer(shared.memory, np.uint8)
        return _bytes(pin_in_place(memory, _accelerators(self._loading), is_in_background=True))

    def _read(self, buffer: ReadBuffer, memory: memoryview) -> None:
        read_into_buffer(self._plan, buffer.name, memory, self._loading.reader, self._threads, self._progress)

    def _resolve_stacks(self, reads: Sequence[ModuleRead], memory: memoryview) -> dict[str, Format]:
        """Checks the small tensors of equal modules together.

        Returns:
            The resolved format of each module. Modules that must be checked by themselves have no entry.
        """
        kinds: dict[tuple, list[ModuleRead]] = {}
        for read in reads:
            if read.name and read.layout[1]:
                module, found = self._loading.quantized[read.name], self._loading.match.quantized[read.name]
                kind = id(read.layout), id(module.weight_format), found.target.has_bias
                kinds.setdefault(kind, []).append(read)
        resolved: dict[str, Format] = {}
        for equal in kinds.values():
            step = max(_STACKED_NBYTES // equal[0].layout[1], 2)
            for start in range(0, len(equal), step):
                stack = equal[start : start + step]
                weight_format = self._resolve_stack(stack, memory) if len(stack) > 1 else None
                if weight_format is not None:
                    resolved |= dict.fromkeys((read.name for read in stack), weight_format)
        return resolved

    def _resolve_stack(self, reads: Sequence[ModuleRead], memory: memoryview) -> Format | None:
        """Returns the resolved format of equal modules, or None if it may differ."""
        weight_format, segments = self._loading.quantized[reads[0].name].weight_format, reads[0].layout[0]
        small = {local: place for local, place in segments.items() if local != weight_format.codes_name}
        with torch.inference_mode(False):
            tensors = stack_tensors(memory, [read.offset for read in reads], small)
            has_bias = self._loading.match.quantized[reads[0].name].target.has_bias
            if "bias" in tensors and not has_bias and bool(tensors["bias"].any()):
                return None
            return weight_format.resolve_stack(tensors)

    def _give(self, read: ModuleRead, memory: memoryview, into: ReadBuffer, resolved: Format | None) -> None:
        """Gives a module its resolved format and its flat buffer.

        Its small tensors are checked here if they were not checked with those of equal modules.
        """
        module, (segments, nbytes) = self._loading.quantized[read.name], read.layout
        is_kept = into.kind != "staging" or into.name in self._targets
        if resolved is not None and not is_kept:
            vars(module)["weight_format"] = resolved  # torch's assignment is slow
            return
        # each module has its own storage, so that a copy of one module copies only its bytes
        with torch.inference_mode(False):
            buffer = (
                torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=read.offset)
                if nbytes
                else _nothing()
            )
            held = FlatBuffer(buffer, segments)
            module.weight_format = resolved or self._resolve(read.name, held)
            if into.kind != "staging":
                module.hold_buffer(held)
            elif is_kept:
                module.hold_buffer(FlatBuffer(self.upload.copy(buffer, read.device), segments))

    def _resolve(self, name: str, held: FlatBuffer) -> Format:
        """Checks the small tensors of one module; returns its resolved format."""
        weight_format = self._loading.quantized[name].weight_format
        tensors = held.tensors()
        small = {local: tensor for local, tensor in tensors.items() if local != weight_format.codes_name}
        resolved = weight_format.resolve(name, small)
        check_bias(name, small.get("bias"), self._loading.match.quantized[name].target.has_bias)
        return resolved


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _bytes(memory: torch.Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy arrays have the buffer protocol


def _worth_bringing_in(plan: ReadPlan, reader: Reader) -> list[ByteRange]:
    """Returns the mapped ranges that are not in memory.

    Returns no range if they do not fit in memory together with the buffers.

    Raises:
        PlacementError: The buffers alone do not fit.
    """
    cold, available = cold_ranges(plan.mapped, reader), available_memory()
    copied = sum(buffer.nbytes for buffer in plan.buffers.values() if buffer.kind == "private")
    mapped = sum(source.nbytes for source in plan.mapped) if cold else 0  # else it is in memory already
    check_host_memory("the copied weights", copied, mapped, _FITTING)
    wanted = sum(source.nbytes for source in cold) + sum(
        buffer.nbytes for buffer in plan.buffers.values() if buffer.kind != "staging"
    )
    return cold if available is not None and wanted + plan.staging <= available else []


def _identity(plan: ReadPlan, buffer: ReadBuffer, reader: Reader) -> str:
    """Returns a digest of everything that the bytes of a buffer depend on."""
    requests = plan.requests[buffer.name]
    files = sorted({request.source.file for request in requests})
    identities = [
        (os.path.realpath(file), *reader.identity(file), os.fstat(reader.descriptor(file)).st_ctime_ns)
        for file in files
    ]
    places = [
        (files.index(request.source.file), request.source.offset, request.targets) for request in requests
    ]
    return hashlib.sha256(
        repr((buffer.nbytes, identities, places)).encode(errors="surrogateescape")
    ).hexdigest()[:32]


def _local_processes() -> int:
    """Returns the number of processes that a launcher started on this node; 1 if unknown."""
    counts = (os.environ.get(name, "") for name in _LOCAL_COUNTS)
    return max((int(count) for count in counts if count.isdecimal()), default=1)


@contextmanager
def progress_bar(nbytes: int, doing: str = "reading") -> Iterator[Callable[[int], object]]:
    """Yields a function that advances a progress bar in bytes, or does nothing for short reads.

    transformers' setting for progress bars decides if it is shown.
    """
    if nbytes < _SMALL:
        yield lambda _: None
        return
    with logging.tqdm(total=nbytes, unit="B", unit_scale=True, desc=f"hfq: {doing}") as bar:
        yield bar.update
