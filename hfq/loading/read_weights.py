"""How packed rows reach their homes: the read plan of a load, carried out; and what a load says of itself at
the end.

A row on disk is left there, and only its small tensors are looked at. A row in CPU memory is mapped where it
can be used as it lies, else read into one arena for all. A row on an accelerator is read through a staging
buffer of bounded size. What is mapped and not in the page cache is brought in, so that a load that has
returned has its bytes in memory.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.utils import logging

from hfq.checkpoint import Reader
from hfq.checkpoint.execute_reads import cold_ranges, fill_page_cache, read_into_buffer
from hfq.checkpoint.filesystem import available_memory, is_network
from hfq.checkpoint.read_plan import ModuleRead, ReadBuffer, ReadPlan, plan_reads
from hfq.checkpoint.shared_memory import SharedMemory
from hfq.errors import PlacementError
from hfq.loading.context import load_context
from hfq.loading.ranks import is_deepspeed
from hfq.loading.state import LoadState
from hfq.loading.validation import check_bias
from hfq.modules.flat_buffer import FlatBuffer, is_mappable, map_tensors
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.host_memory import huge_buffer
from hfq.tensor_spec import ByteRange

__all__ = ["ReadReport", "load_quantized_weights", "log_summary", "plan_weight_reads", "progress_bar"]

logger = logging.get_logger("hfq")

_CHECKS = "checks"
_PRIVATE = "cpu"
_SHARED = "shared"
_THREADS, _NETWORK_THREADS = 4, 16
_SMALL = 64 << 20
_LOCAL_COUNTS = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)
"""Where launchers (torchrun, DeepSpeed, Open MPI, MVAPICH, Intel MPI) say how many processes they have
started on the node.
"""


@dataclass(frozen=True)
class ReadReport:
    """What bringing the rows home has taken.

    Attributes:
        seconds: The time, in s.
        mapped: The bytes that are used where they lie in the file.
        populated: Those of them that were brought into the page cache.
        read: The bytes that this process has read.
        shared: The bytes that rest in memory shared with other processes.
        threads: How many threads read.
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
            f"{self.read:,} bytes read, {self.mapped:,} mapped ({self.populated:,} brought in){shared}: "
            f"{self.seconds:.2f} s{rate}, {self.threads} threads"
        )


def load_quantized_weights(loading: LoadState, hidden: Collection[str]) -> tuple[ReadPlan, ReadReport]:
    """Brings every packed row home, and checks the values of its small tensors wherever it rests.

    Args:
        loading: A load whose homes are settled.
        hidden: The names of the tensors that transformers does not see.

    Returns:
        The plan that was carried out, and what it took.

    Raises:
        PlacementError: `cpu_memory="mmap"` asks for what cannot be.
        FormatError: A small tensor has impossible values.
        CheckpointError: A file changed or cannot be read.
    """
    started, reader = time.perf_counter(), loading.reader
    is_remote = any(map(is_network, loading.checkpoint.headers))
    plan, prefilled = plan_weight_reads(loading, hidden, is_remote), load_context().page_cache_reads
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
        fill_page_cache(cold, reader, threads, is_remote, progress)
    for read in plan.reads:
        if read.how == "mapped" and read.name in loading.quantized:
            loading.quantized[read.name].hold(map_tensors(reader, read.infos))
    counters, mapped = reader.counters, sum(source.nbytes for source in plan.mapped)
    seconds = time.perf_counter() - started
    return plan, ReadReport(
        seconds, mapped, counters.populated, counters.bytes_read, filler.shared_nbytes, threads
    )


def log_summary(loading: LoadState, seconds: float) -> None:
    """One line about the whole load, at level info."""
    logger.info(
        "hfq: loaded %s in %.2f s: %d packed modules (%s); %s; %s",
        loading.checkpoint.root,
        seconds,
        len(loading.quantized),
        loading.describe_formats(),
        loading.plan,
        loading.read_report,
    )


def plan_weight_reads(loading: LoadState, hidden: Collection[str], is_remote: bool = False) -> ReadPlan:
    """The read plan of a load whose homes are settled.

    Args:
        loading: The load.
        hidden: The names of the tensors that transformers does not see.
        is_remote: Whether the checkpoint lies on a network file system.

    Raises:
        PlacementError: `cpu_memory="mmap"` asks for what cannot be.
    """
    reads: list[ModuleRead] = []
    is_sharing = loading.config.cpu_memory == "shared" or (
        loading.config.cpu_memory == "auto" and _local_processes() > 1
    )
    copies = _SHARED if is_sharing else _PRIVATE
    why_read = (
        "on a network file system"
        if is_remote
        else "DeepSpeed casts tensors that lie one by one"
        if is_deepspeed()
        else ""
    )
    for name, module in loading.quantized.items():
        device = loading.devices[f"{name}.{next(iter(module.infos))}"]
        read = _planned(name, device, module, loading.config.cpu_memory, why_read, copies)
        reads.append(read)
        if read.how != "read":
            small = {
                local: info
                for local, info in module.infos.items()
                if local != module.weight_format.codes_name
            }
            reads.append(
                ModuleRead(name, device, "read", "its values are checked while loading", small, _CHECKS)
            )
    accelerators = sorted({read.device for read in reads} - {"cpu", "disk"})
    buffers = [
        ReadBuffer(_CHECKS, 0, "staging", gap=0),  # between small tensors lie codes, which are not to be read
        ReadBuffer(_PRIVATE, 0, "private"),
        ReadBuffer(_SHARED, 0, "shared"),
        *(ReadBuffer(device, 0, "staging") for device in accelerators),
    ]
    return plan_reads([*_dense_rows(loading, hidden), *reads], buffers)


def _planned(
    name: str, device: str, module: QuantizedModule, cpu_memory: str, why_read: str, copies: str
) -> ModuleRead:
    infos, is_aligned = module.infos, is_mappable(module.infos)
    if device == "disk":
        return ModuleRead(name, device, "disk", "read when it computes", infos)
    if device != "cpu":
        return ModuleRead(name, device, "read", f"moved to {device} from a staging buffer", infos, device)
    if cpu_memory == "mmap" and not is_aligned:
        raise PlacementError(
            "A packed row cannot be used where it lies in the file. Nothing was loaded.",
            tensor=name,
            file=next(iter(infos.values())).range.file,
            expected="tensors aligned to their own dtype",
            found=", ".join(f"{i.name} at byte {i.range.offset}" for i in infos.values()),
            fix='pass HfqConfig(cpu_memory="auto")',
        )
    if cpu_memory in ("private", "shared"):
        return ModuleRead(name, device, "read", f'cpu_memory="{cpu_memory}"', infos, copies)
    if cpu_memory == "auto" and not is_aligned:
        return ModuleRead(name, device, "read", "not aligned to its own dtype in the file", infos, copies)
    if cpu_memory == "auto" and why_read:
        return ModuleRead(name, device, "read", why_read, infos, copies)
    return ModuleRead(name, device, "mapped", "aligned, in the page cache for all processes", infos)


def _dense_rows(loading: LoadState, hidden: Collection[str]) -> Iterator[ModuleRead]:
    """The dense tensors, which hfq does not load: transformers maps those that do not rest on disk."""
    stored = {name: {name: info} for name, info in loading.match.unquantized.items()}
    for name, parts in loading.match.merged.items():
        stored[name] = {f"{name} from {part}": loading.checkpoint.tensors[part] for part in parts}
    for name, infos in stored.items():
        device = loading.devices.get(name, loading.main)
        if name in hidden:
            yield ModuleRead("", device, "disk", "read when it computes", infos)
        else:
            yield ModuleRead("", device, "mapped", "loaded by transformers, through a map", infos)


class _Filler:
    """Fills the arenas of a plan one after another, and gives each row to its module."""

    def __init__(
        self, loading: LoadState, plan: ReadPlan, threads: int, progress: Callable[[int], object]
    ) -> None:
        self._loading = loading
        self._plan = plan
        self._threads = threads
        self._progress = progress
        # numpy arrays are buffers
        self._staging = memoryview(huge_buffer(plan.staging).numpy())  # type: ignore[arg-type]
        self.shared_nbytes = 0

    def fill(self, buffer: ReadBuffer) -> None:
        """Reads an arena, and hands out its rows."""
        memory = self._shared(buffer) if buffer.kind == "shared" else self._own(buffer)
        for read in self._plan.reads_into(buffer.name):
            self._give(read, memory, stays=buffer.kind != "staging")

    def _own(self, buffer: ReadBuffer) -> memoryview:
        is_staging = buffer.kind == "staging"
        memory = self._staging if is_staging else memoryview(huge_buffer(buffer.nbytes).numpy())  # type: ignore[arg-type]
        self._read(buffer, memory)
        return memory

    def _shared(self, buffer: ReadBuffer) -> memoryview:
        key = _identity(self._plan, buffer, self._loading.reader)
        shared = (
            SharedMemory.open(key, buffer.nbytes, lambda memory: self._read(buffer, memory))
            if buffer.nbytes
            else None
        )
        if shared is None and buffer.nbytes and self._loading.config.cpu_memory == "shared":
            raise PlacementError(
                "The rows cannot be kept in shared memory. Nothing was loaded.",
                file="/dev/shm",
                found="no room, or no shared memory",
                expected=f"{buffer.nbytes} free bytes",
                fix='free shared memory, or pass HfqConfig(cpu_memory="auto")',
            )
        if shared is None:
            return self._own(buffer)
        if not shared.was_filled:  # another process has read it
            self._progress(sum(request.source.nbytes for request in self._plan.requests[buffer.name]))
        self.shared_nbytes += buffer.nbytes
        return memoryview(shared.memory)

    def _read(self, buffer: ReadBuffer, memory: memoryview) -> None:
        read_into_buffer(self._plan, buffer.name, memory, self._loading.reader, self._threads, self._progress)

    def _give(self, read: ModuleRead, memory: memoryview, stays: bool) -> None:
        module, (segments, nbytes) = self._loading.quantized[read.name], read.layout
        with torch.inference_mode(
            False
        ):  # each row is a storage of its own, so that a copy of one module copies its row alone
            buffer = (
                torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=read.offset)
                if nbytes
                else _nothing()
            )
            held = FlatBuffer(buffer, segments)
            tensors = held.tensors()
            small = {
                local: tensor for local, tensor in tensors.items() if local != module.weight_format.codes_name
            }
            module.weight_format = module.weight_format.resolve(read.name, small)
            check_bias(read.name, small.get("bias"), self._loading.match.quantized[read.name].target.has_bias)
            if stays:
                module.hold_buffer(held)
            elif read.device not in ("cpu", "disk"):
                module.hold_buffer(FlatBuffer(buffer.to(read.device, copy=True), segments))


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _worth_bringing_in(plan: ReadPlan, reader: Reader) -> list[ByteRange]:
    """What is mapped and not in memory; nothing where it would not fit beside the arenas."""
    cold, available = cold_ranges(plan.mapped, reader), available_memory()
    wanted = sum(source.nbytes for source in cold) + sum(
        buffer.nbytes for buffer in plan.buffers.values() if buffer.kind != "staging"
    )
    return cold if available is not None and wanted + plan.staging <= available else []


def _identity(plan: ReadPlan, buffer: ReadBuffer, reader: Reader) -> str:
    """A digest of everything that an arena's bytes depend on."""
    requests = plan.requests[buffer.name]
    files = sorted({request.source.file for request in requests})
    identities = [(os.path.realpath(file), *reader.identity(file)) for file in files]
    places = [
        (files.index(request.source.file), request.source.offset, request.targets) for request in requests
    ]
    return hashlib.sha256(
        repr((buffer.nbytes, identities, places)).encode(errors="surrogateescape")
    ).hexdigest()[:32]


def _local_processes() -> int:
    """How many processes a launcher has started on this node, as far as it says so."""
    counts = (os.environ.get(name, "") for name in _LOCAL_COUNTS)
    return max((int(count) for count in counts if count.isdecimal()), default=1)


@contextmanager
def progress_bar(nbytes: int, doing: str = "reading") -> Iterator[Callable[[int], object]]:
    """A bar in bytes, shown as transformers' switch says, for reads that take a while."""
    if nbytes < _SMALL:
        yield lambda _: None
        return
    with logging.tqdm(total=nbytes, unit="B", unit_scale=True, desc=f"hfq: {doing}") as bar:
        yield bar.update
