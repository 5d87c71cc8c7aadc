"""Layout of a unit's tensors in one buffer, and the reads that fill it, as plain data."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfq.checkpoint.direct_io import DIRECT_ALIGNMENT
from hfq.checkpoint.read_plan import coalesce
from hfq.tensor_spec import DEVICE_ALIGNMENT, DTYPE_BITS, ByteRange, TensorInfo

__all__ = [
    "GAP_NBYTES",
    "PAGE",
    "Run",
    "UnitLayout",
    "lay_out",
    "lay_out_on_device",
    "layout_nbytes",
]

PAGE = DIRECT_ALIGNMENT
GAP_NBYTES = 64 << 10
"""Most bytes between two neighbors in a file that are read together, including the gap."""

_COPY_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of one file that are read together to one offset of the buffer.

    Attributes:
        source: The bytes that are needed.
        offset: Offset in the buffer of the first page, a multiple of 4096 as in the file.
    """

    source: ByteRange
    offset: int

    @property
    def lead(self) -> int:
        """The bytes between the start of the first page and the first needed byte."""
        return self.source.offset % PAGE

    @property
    def nbytes(self) -> int:
        """The bytes of the whole pages."""
        return -(-(self.lead + self.source.nbytes) // PAGE) * PAGE

    def chunks(self, size: int) -> Iterable[tuple[ByteRange, int]]:
        """Returns (page-aligned range of the file, its offset in the buffer) in pieces of `size`.

        The last piece ends with the last needed byte.
        """
        start, end = self.source.offset - self.lead, self.source.offset + self.source.nbytes
        for first in range(start, end, size):
            yield ByteRange(self.source.file, first, min(size, end - first)), self.offset + first - start


@dataclass(frozen=True)
class UnitLayout:
    """Layout of a buffer that holds the tensors of a unit.

    Attributes:
        runs: The reads, in the order of the files. On the host they fill the start of the buffer; for an
            accelerator they fill staging memory.
        places: The offset of each tensor in the buffer.
        copies: (from, to, nbytes) after the reads. On the host, within the buffer, for tensors that are not
            aligned to their element size; for an accelerator, from staging memory to the buffer.
        nbytes: The size of the buffer, a multiple of 4096.
    """

    runs: tuple[Run, ...]
    places: Mapping[TensorInfo, int]
    copies: tuple[tuple[int, int, int], ...]
    nbytes: int

    @functools.cached_property
    def needed_nbytes(self) -> int:
        """The bytes read from the files, including the gaps between tensors."""
        return sum(run.source.nbytes for run in self.runs)

    @property
    def read_nbytes(self) -> int:
        """The bytes of memory that the reads fill, a multiple of 4096."""
        return sum(run.nbytes for run in self.runs)


def lay_out(infos: Iterable[TensorInfo], gap_nbytes: int = GAP_NBYTES) -> UnitLayout:
    """Lays out the tensors of a unit that computes on the host, in their order in the file.

    Args:
        infos: The stored tensors; a tensor that is given twice has one place.
        gap_nbytes: The most bytes between two tensors that are read together.
    """
    infos = tuple(infos)
    runs, read = _read_together(infos, gap_nbytes)
    places, end, copies = _empty(infos), sum(run.nbytes for run in runs), []
    for info, place in read.items():
        if place % (DTYPE_BITS[info.dtype] // 8 or 1):
            copies.append((place, end, info.nbytes))
            place, end = end, _up(end + info.nbytes, _COPY_ALIGNMENT)
        places[info] = place
    return UnitLayout(runs, places, tuple(copies), _up(end, PAGE))


def lay_out_on_device(
    infos: Iterable[TensorInfo], pinned: Iterable[TensorInfo] = (), gap_nbytes: int = GAP_NBYTES
) -> UnitLayout:
    """Lays out the tensors of a unit that computes on an accelerator.

    Each tensor starts at a multiple of 256 bytes.

    Args:
        infos: The stored tensors; a tensor that is given twice has one place.
        pinned: Those that are in pinned host memory, in the order of their addresses. They come first, and
            are not read.
        gap_nbytes: The most bytes between two tensors that are read together.
    """
    infos, kept = tuple(infos), [info for info in pinned if info.nbytes]
    runs, read = _read_together(set(infos).difference(kept), gap_nbytes)
    places, end, copies = _empty(infos), 0, list[tuple[int, int, int]]()
    for info in [*kept, *read]:
        places[info], end = end, _up(end + info.nbytes, DEVICE_ALIGNMENT)
    for info, source in read.items():
        target = places[info]
        last = copies[-1] if copies else None
        if last is not None and source - last[0] == target - last[1]:
            copies[-1] = (last[0], last[1], target + info.nbytes - last[1])
        else:
            copies.append((source, target, info.nbytes))
    return UnitLayout(runs, places, tuple(copies), _up(end, PAGE))


def layout_nbytes(infos: Iterable[TensorInfo], is_on_host: bool, gap_nbytes: int = GAP_NBYTES) -> int:
    """Returns the bytes of `lay_out` or of `lay_out_on_device`, which take longer."""
    infos = [info for info in infos if info.nbytes]
    if not is_on_host:
        return _up(sum(_up(info.nbytes, DEVICE_ALIGNMENT) for info in set(infos)), PAGE)
    runs = coalesce([info.range for info in infos], gap_nbytes)
    unaligned = {info for info in infos if info.range.offset % (DTYPE_BITS[info.dtype] // 8 or 1)}
    copied = sum(_up(info.nbytes, _COPY_ALIGNMENT) for info in unaligned)
    return _up(sum(Run(run, 0).nbytes for run in runs) + copied, PAGE)


def _read_together(
    infos: Iterable[TensorInfo], gap_nbytes: int
) -> tuple[tuple[Run, ...], dict[TensorInfo, int]]:
    """Returns the reads in the order of the files, and each tensor's offset in their memory."""
    ordered = sorted(
        {info for info in infos if info.nbytes}, key=lambda info: (info.range.file, info.range.offset)
    )
    runs: list[Run] = []
    for source in coalesce((info.range for info in ordered), gap_nbytes):
        runs.append(Run(source, runs[-1].offset + runs[-1].nbytes if runs else 0))
    places, index = dict[TensorInfo, int](), 0
    for info in ordered:
        while not _holds(runs[index].source, info.range):
            index += 1
        run = runs[index]
        places[info] = run.offset + run.lead + info.range.offset - run.source.offset
    return tuple(runs), places


def _empty(infos: Iterable[TensorInfo]) -> dict[TensorInfo, int]:
    return dict.fromkeys((info for info in infos if not info.nbytes), 0)


def _up(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _holds(run: ByteRange, part: ByteRange) -> bool:
    return (
        run.file == part.file
        and run.offset <= part.offset
        and part.offset + part.nbytes <= run.offset + run.nbytes
    )
