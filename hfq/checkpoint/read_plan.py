"""The read plan: every stored tensor's bytes, where they go while loading, and why. Pure data; nothing is
read to make it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal

from hfq.tensor_spec import ByteRange, Segment, TensorInfo, row_layout

__all__ = ["ARENA_ALIGNMENT", "Arena", "ReadPlan", "Request", "ModuleRead", "coalesce", "plan_reads"]

ARENA_ALIGNMENT = 256
"""Each row of an arena starts at a multiple of so many bytes."""

_GAP = 64 << 10
_MOST_BYTES = 16 << 20
_MOST_TARGETS = 512


@dataclass(frozen=True, slots=True)
class Arena:
    """One stretch of memory that rows are read into.

    Attributes:
        name: Its name in the plan.
        nbytes: Its size.
        kind: `private` and `shared` (by the processes of a node) ones stay; a `staging` one is used again for
            the next.
        gap: Rows whose bytes in the file are no further apart than this are read by one request.
    """

    name: str
    nbytes: int
    kind: Literal["private", "shared", "staging"]
    gap: int = _GAP


@dataclass(frozen=True)
class ModuleRead:
    """The tensors of one module, and what is done with them while loading.

    Attributes:
        name: The module's name in the model.
        home: Where it rests once loaded.
        how: `read` into an arena; `mapped`, used where it lies in the file; or left on `disk`.
        why: The reason, for people.
        infos: Its stored tensors by local name.
        arena: For `read`: the arena's name.
        offset: For `read`: where the row starts in the arena.
    """

    name: str
    home: str
    how: Literal["read", "mapped", "disk"]
    why: str
    infos: Mapping[str, TensorInfo]
    arena: str = ""
    offset: int = 0

    @cached_property
    def layout(self) -> tuple[dict[str, Segment], int]:
        """Where each tensor lies in the row, and the row's bytes."""
        return row_layout((local, info.dtype, info.shape) for local, info in self.infos.items())

    @property
    def position(self) -> tuple[str, int]:
        """Where the row begins on disk."""
        return min(((info.range.file, info.range.offset) for info in self.infos.values()), default=("", 0))


@dataclass(frozen=True, slots=True)
class Request:
    """One read: the bytes of `source`, in a row, to `targets`, each (offset in the arena or None for a gap,
    bytes).
    """

    source: ByteRange
    targets: tuple[tuple[int | None, int], ...]


@dataclass(frozen=True)
class ReadPlan:
    """What a load does with every tensor's bytes.

    Attributes:
        rows: Each packed row, and each dense tensor that is mapped. A row that is not read and whose small
            tensors are looked at while loading stands here twice.
        arenas: By name, in the order in which they are filled.
    """

    rows: tuple[ModuleRead, ...]
    arenas: Mapping[str, Arena] = field(default_factory=dict)

    @cached_property
    def requests(self) -> dict[str, tuple[Request, ...]]:
        """The reads that fill each arena, in the order of the files."""
        return {name: tuple(_requests(self.rows_of(name), arena.gap)) for name, arena in self.arenas.items()}

    @property
    def bytes_needed(self) -> int:
        """The bytes of all tensors that are read."""
        return sum(info.nbytes for row in self.rows if row.how == "read" for info in row.infos.values())

    @property
    def bytes_read(self) -> int:
        """The bytes of all requests: what is needed, and the gaps that are read along."""
        return sum(request.source.nbytes for requests in self.requests.values() for request in requests)

    @property
    def staging(self) -> int:
        """The most bytes of memory that are taken only while loading."""
        return max((arena.nbytes for arena in self.arenas.values() if arena.kind == "staging"), default=0)

    @property
    def mapped(self) -> list[ByteRange]:
        """The ranges that are used where they lie, in the order of the files, neighbours as one."""
        return coalesce(
            (info.range for row in self.rows if row.how == "mapped" for info in row.infos.values()), _GAP
        )

    @cached_property
    def _rows_by_arena(self) -> dict[str, list[ModuleRead]]:
        found: dict[str, list[ModuleRead]] = {name: [] for name in self.arenas}
        for row in self.rows:
            if row.how == "read":
                found[row.arena].append(row)
        return found

    def rows_of(self, arena: str) -> list[ModuleRead]:
        """The rows that are read into an arena."""
        return self._rows_by_arena[arena]

    @cached_property
    def bytes_by_file(self) -> dict[str, int]:
        """How many bytes of each file are read."""
        found: Counter[str] = Counter()
        for requests in self.requests.values():
            for request in requests:
                found[request.source.file] += request.source.nbytes
        return dict(found)

    def to_dict(self) -> dict:
        """The plan as JSON-ready data."""
        return {
            "bytes_needed": self.bytes_needed,
            "bytes_read": self.bytes_read,
            "staging": self.staging,
            "arenas": [
                asdict(arena) | {"requests": len(self.requests[name])} for name, arena in self.arenas.items()
            ],
            "tensors": [
                {
                    "name": name,
                    "file": info.range.file,
                    "offset": info.range.offset,
                    "nbytes": info.nbytes,
                    "home": row.home,
                    "how": row.how,
                    "why": row.why,
                    "arena": row.arena,
                    "arena_offset": offset,
                }
                for name, info, row, offset in self._tensors()
            ],
        }

    def explain(self) -> str:
        """The plan as a table for people, one line for each tensor."""
        lines = [
            f"{self.bytes_needed:,} bytes needed, {self.bytes_read:,} read in "
            f"{sum(map(len, self.requests.values()))} requests; "
            f"{sum(source.nbytes for source in self.mapped):,} mapped; staging at most {self.staging:,}"
        ]
        lines += [
            f"  arena {arena.name}: {arena.nbytes:,} bytes, {arena.kind}, {len(self.requests[arena.name])} "
            f"requests"
            for arena in self.arenas.values()
        ]
        cells = [("tensor", "file and bytes", "home", "goes to", "why")]
        for name, info, row, offset in self._tensors():
            file = info.range.file.replace("\\", "/").rpartition("/")[2]
            place = f"{row.arena} + {offset:,}" if row.how == "read" else row.how
            cells.append((name, f"{file} {info.range.offset:,} + {info.nbytes:,}", row.home, place, row.why))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        return "\n".join(lines)

    def _tensors(self) -> Iterator[tuple[str, TensorInfo, ModuleRead, int]]:
        for row in self.rows:
            for local, info in row.infos.items():
                offset = row.offset + row.layout[0][local].offset if row.how == "read" else 0
                yield f"{row.name}.{local}" if row.name else local, info, row, offset


def plan_reads(rows: Iterable[ModuleRead], arenas: Sequence[Arena], staging: int = 256 << 20) -> ReadPlan:
    """Lays the rows that are read into their arenas, in the order of the files.

    Args:
        rows: The rows; `arena` names one of `arenas` in each that is read, and `offset` is set here.
        arenas: The arenas in the order in which they are filled; `nbytes` is set here. A staging one becomes
            as many batches as it takes, named `<name> 0`, `<name> 1`, ….
        staging: The most bytes of a batch, if its rows are not larger themselves.
    """
    rows = list(rows)
    placed = list[ModuleRead]()
    sized = dict[str, Arena]()
    for arena in arenas:
        limit = staging if arena.kind == "staging" else None
        batches: list[list[tuple[int, ModuleRead]]] = []
        end = 0
        for row in sorted(
            (row for row in rows if row.how == "read" and row.arena == arena.name),
            key=lambda row: row.position,
        ):
            nbytes = _aligned(row.layout[1])
            if not batches or (limit is not None and end and end + nbytes > limit):
                batches.append([])
                end = 0
            batches[-1].append((end, row))
            end += nbytes
        for index, batch in enumerate(batches):
            name = arena.name if limit is None else f"{arena.name} {index}"
            placed += [replace(row, arena=name, offset=offset) for offset, row in batch]
            offset, last = batch[-1]
            sized[name] = replace(arena, name=name, nbytes=offset + _aligned(last.layout[1]))
    return ReadPlan((*(row for row in rows if row.how != "read"), *placed), sized)


def coalesce(ranges: Iterable[ByteRange], gap: int) -> list[ByteRange]:
    """The ranges in the order of the files, those that overlap or are at most `gap` bytes apart as one."""
    found: list[ByteRange] = []
    for source in sorted(ranges, key=lambda source: (source.file, source.offset)):
        end = source.offset + source.nbytes
        last = found[-1] if found else None
        if (
            last is not None
            and last.file == source.file
            and source.offset - (last.offset + last.nbytes) <= gap
        ):
            found[-1] = ByteRange(last.file, last.offset, max(end, last.offset + last.nbytes) - last.offset)
        elif source.nbytes:
            found.append(source)
    return found


def _requests(rows: Iterable[ModuleRead], gap: int) -> Iterator[Request]:
    wanted = sorted(
        (info.range.file, info.range.offset, info.nbytes, row.offset + row.layout[0][local].offset)
        for row in rows
        for local, info in row.infos.items()
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
        while nbytes:  # cut where a request is full
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
    return -(-nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
