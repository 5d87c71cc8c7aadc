"""Source range and destination of every tensor, planned from file headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from hfq.tensor_spec import (
    DEVICE_ALIGNMENT,
    SEGMENT_ALIGNMENT,
    ByteRange,
    Segment,
    TensorInfo,
    segment_layout,
)

__all__ = ["BUFFER_ALIGNMENT", "ReadBuffer", "ReadPlan", "Request", "ModuleRead", "coalesce", "plan_reads"]

BUFFER_ALIGNMENT = DEVICE_ALIGNMENT
"""Alignment in bytes of each flat buffer in a read buffer."""

Layout = tuple[dict[str, Segment], int]
"""Segments of a flat buffer by checkpoint name, and its bytes."""

_GAP = 64 << 10
_MOST_BYTES = 16 << 20
_MOST_TARGETS = 512


@dataclass(frozen=True, slots=True)
class ReadBuffer:
    """Memory that flat buffers are read into.

    Attributes:
        name: Its name in the plan.
        nbytes: Its size.
        kind: `private` and `shared` (by the processes of a node) buffers stay; a `staging` buffer is reused.
        is_pinned: True if accelerators copy from the buffer.
        gap: The most bytes between two tensors in a file that one request reads together.
    """

    name: str
    nbytes: int
    kind: Literal["private", "shared", "staging"]
    gap: int = _GAP
    is_pinned: bool = False


@dataclass(slots=True)
class ModuleRead:
    """The tensors of one module, and their destination during the load.

    Attributes:
        name: The module's name in the model.
        device: The device that stores them after the load.
        how: `read` into a buffer, `mapped` from the file, or left on `disk`.
        why: The reason, for people.
        infos: The stored tensors, by checkpoint name.
        buffer: For `read`: the name of the buffer, which `plan_reads` completes.
        offset: For `read`: the offset of the flat buffer in it, which `plan_reads` sets.
        alignment: Alignment in bytes of each tensor in the flat buffer.
    """

    name: str
    device: str
    how: Literal["read", "mapped", "disk"]
    why: str
    infos: Mapping[str, TensorInfo]
    buffer: str = ""
    offset: int = 0
    alignment: int = SEGMENT_ALIGNMENT
    _layout: Layout | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def layout(self) -> Layout:
        """The segments of the tensors in the flat buffer, and its bytes.

        Modules with tensors of the same dtypes and shapes share one object.
        """
        if self._layout is None:
            tensors = tuple([(local, info.dtype, info.shape) for local, info in self.infos.items()])
            self._layout = _lay_out(tensors, self.alignment)
        return self._layout

    @property
    def position(self) -> tuple[str, int]:
        """File and offset of the first tensor on disk."""
        return min([(info.range.file, info.range.offset) for info in self.infos.values()], default=("", 0))


@dataclass(frozen=True, slots=True)
class Request:
    """One read of the contiguous bytes of `source` into `targets`.

    Each target is (offset in the buffer, or None for a gap, bytes).
    """

    source: ByteRange
    targets: tuple[tuple[int | None, int], ...]


@dataclass(frozen=True)
class ReadPlan:
    """The reads of a load, and the destinations of all tensors.

    Attributes:
        reads: One entry for each quantized module and each mapped unquantized tensor. A module that is not
            read
            and whose small tensors are checked during the load has two entries.
        buffers: The read buffers by name, in the order in which they are filled.
    """

    reads: tuple[ModuleRead, ...]
    buffers: Mapping[str, ReadBuffer] = field(default_factory=dict)

    @cached_property
    def requests(self) -> dict[str, tuple[Request, ...]]:
        """The reads that fill each buffer, in the order of the files."""
        return {
            name: tuple(_requests(self.reads_into(name), buffer.gap)) for name, buffer in self.buffers.items()
        }

    @property
    def bytes_needed(self) -> int:
        """The bytes of all tensors that are read."""
        return sum(info.nbytes for read in self.reads if read.how == "read" for info in read.infos.values())

    @property
    def bytes_read(self) -> int:
        """The bytes of all requests, including gaps between tensors."""
        return sum(request.source.nbytes for requests in self.requests.values() for request in requests)

    @property
    def staging(self) -> int:
        """The most bytes of memory that are allocated only during the load."""
        return max((buffer.nbytes for buffer in self.buffers.values() if buffer.kind == "staging"), default=0)

    @cached_property
    def mapped(self) -> list[ByteRange]:
        """The mapped ranges, in the order of the files; neighbors are merged."""
        return coalesce(
            (info.range for read in self.reads if read.how == "mapped" for info in read.infos.values()), _GAP
        )

    @property
    def mapped_files(self) -> set[str]:
        """The files from which modules are mapped."""
        reads = (read for read in self.reads if read.how == "mapped" and read.name)
        return {info.range.file for read in reads for info in read.infos.values()}

    @cached_property
    def _reads_by_buffer(self) -> dict[str, list[ModuleRead]]:
        found: dict[str, list[ModuleRead]] = {name: [] for name in self.buffers}
        for read in self.reads:
            if read.how == "read":
                found[read.buffer].append(read)
        return found

    def reads_into(self, buffer: str) -> list[ModuleRead]:
        """Returns the entries that are read into a buffer."""
        return self._reads_by_buffer[buffer]

    @cached_property
    def bytes_by_file(self) -> dict[str, int]:
        """The bytes read from each file."""
        found: Counter[str] = Counter()
        for requests in self.requests.values():
            for request in requests:
                found[request.source.file] += request.source.nbytes
        return dict(found)

    def to_dict(self) -> dict:
        """Returns the plan as JSON-ready data."""
        return {
            "bytes_needed": self.bytes_needed,
            "bytes_read": self.bytes_read,
            "staging": self.staging,
            "buffers": [
                asdict(buffer) | {"requests": len(self.requests[name])}
                for name, buffer in self.buffers.items()
            ],
            "tensors": [
                {
                    "name": name,
                    "file": info.range.file,
                    "offset": info.range.offset,
                    "nbytes": info.nbytes,
                    "device": read.device,
                    "how": read.how,
                    "why": read.why,
                    "buffer": read.buffer,
                    "buffer_offset": offset,
                }
                for name, info, read, offset in self._tensors()
            ],
        }

    def explain(self) -> str:
        """Returns the plan as a table with one line per tensor."""
        lines = [
            f"{self.bytes_needed:,} bytes needed, {self.bytes_read:,} read in "
            f"{sum(map(len, self.requests.values()))} requests; "
            f"{sum(source.nbytes for source in self.mapped):,} mapped; staging at most {self.staging:,}"
        ]
        lines += [
            f"  buffer {buffer.name}: {buffer.nbytes:,} bytes, {buffer.kind}, "
            f"{len(self.requests[buffer.name])} requests"
            for buffer in self.buffers.values()
        ]
        cells = [("tensor", "file and bytes", "device", "destination", "why")]
        for name, info, read, offset in self._tensors():
            file = info.range.file.replace("\\", "/").rpartition("/")[2]
            place = f"{read.buffer} + {offset:,}" if read.how == "read" else read.how
            cells.append(
                (name, f"{file} {info.range.offset:,} + {info.nbytes:,}", read.device, place, read.why)
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        return "\n".join(lines)

    def _tensors(self) -> Iterator[tuple[str, TensorInfo, ModuleRead, int]]:
        for read in self.reads:
            for local, info in read.infos.items():
                offset = read.offset + read.layout[0][local].offset if read.how == "read" else 0
                yield f"{read.name}.{local}" if read.name else local, info, read, offset


def plan_reads(
    reads: Iterable[ModuleRead], buffers: Sequence[ReadBuffer], staging: int = 128 << 20
) -> ReadPlan:
    """Assigns offsets in the buffers to all modules that are read, in the order of the files.

    Args:
        reads: The modules. `buffer` of each module that is read names one of `buffers`; `offset` is set here.
        buffers: The buffers in the order in which they are filled; `nbytes` is set here. A staging buffer is
            split into batches named `<name> 0`, `<name> 1`, …. In a batch, modules of one layout adjoin.
        staging: The most bytes of a batch, unless one module is larger.
    """
    kept, by_buffer = list[ModuleRead](), dict[str, list[ModuleRead]]()
    for read in reads:
        (by_buffer.setdefault(read.buffer, []) if read.how == "read" else kept).append(read)
    sized = dict[str, ReadBuffer]()
    for buffer in buffers:
        limit = staging if buffer.kind == "staging" else None
        batches: list[list[ModuleRead]] = []
        end = 0
        for read in sorted(by_buffer.get(buffer.name, ()), key=lambda read: read.position):
            nbytes = _aligned(read.layout[1])
            if not batches or (limit is not None and end and end + nbytes > limit):
                batches.append([])
                end = 0
            batches[-1].append(read)
            end += nbytes
        for index, batch in enumerate(batches):
            name, end = buffer.name if limit is None else f"{buffer.name} {index}", 0
            for read in batch if limit is None else _by_layout(batch):
                read.buffer, read.offset = name, end
                end += _aligned(read.layout[1])
                kept.append(read)
            sized[name] = replace(buffer, name=name, nbytes=end)
    return ReadPlan(tuple(kept), sized)


def _by_layout(batch: Iterable[ModuleRead]) -> Iterator[ModuleRead]:
    """Yields the modules of a batch; those of one layout adjoin."""
    groups: dict[int, list[ModuleRead]] = {}
    for read in batch:
        groups.setdefault(id(read.layout), []).append(read)
    for reads in groups.values():
        yield from reads


@lru_cache(maxsize=1024)
def _lay_out(tensors: tuple[tuple[str, str, tuple[int, ...]], ...], alignment: int) -> Layout:
    return segment_layout(tensors, alignment)


def coalesce(ranges: Iterable[ByteRange], gap: int) -> list[ByteRange]:
    """Returns the ranges in the order of the files; ranges at most `gap` bytes apart are merged."""
    found: list[ByteRange] = []
    file, start, end = "", 0, 0
    for source in sorted(ranges):
        if source.file == file and source.offset - end <= gap and end > start:
            end = max(end, source.offset + source.nbytes)
        elif source.nbytes:
            if end > start:
                found.append(ByteRange(file, start, end - start))
            file, start, end = source.file, source.offset, source.offset + source.nbytes
    return [*found, ByteRange(file, start, end - start)] if end > start else found


def _requests(reads: Iterable[ModuleRead], gap: int) -> Iterator[Request]:
    wanted = sorted(
        (info.range.file, info.range.offset, info.nbytes, read.offset + segment.offset)
        for read in reads
        for info, segment in zip(read.infos.values(), read.layout[0].values(), strict=True)
        if info.nbytes
    )
    file = ""
    start = 0
    end = 0
    targets: list[tuple[int | None, int]] = []
    for found, offset, nbytes, target in wanted:
        if targets and (found != file or not end <= offset <= end + gap):
            yield Request(ByteRange(file, start, end - start), tuple(targets))
            targets = []
        if not targets:
            file = found
            start = offset
            end = offset
        if offset > end:
            targets.append((None, offset - end))
            end = offset
        while nbytes:  # split where a request is full
            if len(targets) >= _MOST_TARGETS or end - start >= _MOST_BYTES:
                yield Request(ByteRange(file, start, end - start), tuple(targets))
                targets, start = [], end
            part = min(nbytes, _MOST_BYTES - (end - start))
            targets.append((target, part))
            target = target + part
            nbytes = nbytes - part
            end = end + part
    if targets:
        yield Request(ByteRange(file, start, end - start), tuple(targets))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
