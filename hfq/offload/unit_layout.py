"""Layout of a unit's tensors in one buffer, and the reads that fill it, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfq.checkpoint.direct_io import DIRECT_ALIGNMENT
from hfq.checkpoint.read_plan import coalesce
from hfq.tensor_spec import DTYPE_BITS, ByteRange, TensorInfo

__all__ = ["GAP_NBYTES", "PAGE", "UnitLayout", "Run", "lay_out"]

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
    """Layout of a buffer that holds the tensors of a unit in their order in the file.

    Attributes:
        runs: The reads, in the order of the files.
        places: The offset of each tensor in the buffer.
        copies: (from, to, nbytes) within the buffer, for tensors that are not aligned to their element size.
        nbytes: The size of the buffer, a multiple of 4096.
    """

    runs: tuple[Run, ...]
    places: Mapping[TensorInfo, int]
    copies: tuple[tuple[int, int, int], ...]
    nbytes: int

    @property
    def needed_nbytes(self) -> int:
        """The bytes read from the files, including the gaps between tensors."""
        return sum(run.source.nbytes for run in self.runs)


def lay_out(infos: Iterable[TensorInfo], gap_nbytes: int = GAP_NBYTES) -> UnitLayout:
    """Lays out the tensors of a unit.

    Args:
        infos: The stored tensors; a tensor that is given twice has one place.
        gap_nbytes: The most bytes between two tensors that are read together.
    """
    ordered = sorted(
        {info for info in infos if info.nbytes}, key=lambda info: (info.range.file, info.range.offset)
    )
    runs: list[Run] = []
    places: dict[TensorInfo, int] = dict.fromkeys((info for info in infos if not info.nbytes), 0)
    for source in coalesce((info.range for info in ordered), gap_nbytes):
        runs.append(Run(source, runs[-1].offset + runs[-1].nbytes if runs else 0))
    end = sum(run.nbytes for run in runs)
    copies = []
    index = 0
    for info in ordered:
        while not _holds(runs[index].source, info.range):
            index += 1
        run = runs[index]
        place = run.offset + run.lead + info.range.offset - run.source.offset
        if place % (DTYPE_BITS[info.dtype] // 8 or 1):
            copies.append((place, end, info.nbytes))
            place, end = end, -(-(end + info.nbytes) // _COPY_ALIGNMENT) * _COPY_ALIGNMENT
        places[info] = place
    return UnitLayout(tuple(runs), places, tuple(copies), -(-end // PAGE) * PAGE)


def _holds(run: ByteRange, part: ByteRange) -> bool:
    return (
        run.file == part.file
        and run.offset <= part.offset
        and part.offset + part.nbytes <= run.offset + run.nbytes
    )
