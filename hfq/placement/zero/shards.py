"""How the rows of a model are cut into ZeRO-3 shards, and which bytes of which files each rank reads: pure
data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hfq.errors import PlacementError
from hfq.tensor_spec import ByteRange, Segment, TensorInfo

__all__ = ["ShardRead", "ZeroPlan", "FlatParameter", "check_same_plan", "flat_parameter"]


@dataclass(frozen=True, slots=True)
class ShardRead:
    """One read of one rank: the bytes of `source` go to byte `offset` of its shard."""

    source: ByteRange
    offset: int


@dataclass(frozen=True)
class FlatParameter:
    """One parameter that ZeRO-3 cuts into equal shards, one for each rank; the last is padded.

    Attributes:
        name: The parameter's name in the model.
        nbytes: Its bytes as stored: a whole packed row with the gaps between its segments, or one dense
            tensor.
        itemsize: Bytes of one element: of the dtype that ZeRO runs in for a packed row, of the stored dtype
            for a dense tensor.
        parts: (offset in the row, where those bytes lie), in the order of the row.
        is_quantized: Whether its elements are packed bytes.
    """

    name: str
    nbytes: int
    itemsize: int
    parts: tuple[tuple[int, ByteRange], ...]
    is_quantized: bool = False

    @property
    def numel(self) -> int:
        """The elements of the whole row."""
        return self.nbytes // self.itemsize

    def shard_numel(self, world: int) -> int:
        """The elements of each rank's shard, padding included."""
        return -(-self.numel // world)

    def shard_nbytes(self, world: int) -> int:
        """The stored bytes of each rank's shard, padding included."""
        return self.shard_numel(world) * self.itemsize

    def bounds(self, rank: int, world: int) -> tuple[int, int]:
        """The bytes of the row from and to which a rank's shard reaches, without padding."""
        size = self.shard_nbytes(world)
        return min(rank * size, self.nbytes), min((rank + 1) * size, self.nbytes)

    def reads(self, rank: int, world: int) -> tuple[ShardRead, ...]:
        """What a rank reads of the files: its own bytes and no others."""
        start, stop = self.bounds(rank, world)
        found = []
        for offset, source in self.parts:
            first, last = max(start, offset), min(stop, offset + source.nbytes)
            if first < last:
                cut = ByteRange(source.file, source.offset + first - offset, last - first)
                found.append(ShardRead(cut, first - start))
        return tuple(found)


def flat_parameter(
    name: str, infos: Mapping[str, TensorInfo], layout: tuple[Mapping[str, Segment], int], itemsize: int
) -> FlatParameter:
    """The row of a packed module.

    Args:
        name: The parameter's name in the model.
        infos: Where the module's tensors are stored, by local name.
        layout: The segments of the row and its bytes, as `segment_layout` gives them.
        itemsize: Bytes of one element of the dtype that ZeRO runs in; divides 16.
    """
    segments, nbytes = layout
    parts = tuple(
        (segment.offset, infos[local].range) for local, segment in segments.items() if segment.nbytes
    )
    return FlatParameter(name, nbytes, itemsize, parts, is_quantized=True)


@dataclass(frozen=True)
class ZeroPlan:
    """All rows of a model, as they are cut for the ranks of one run.

    Attributes:
        parameters: In the order of the model's parameters.
        rank: This rank.
        world: How many ranks there are.
        shard_device: Where shards rest: `device`, `cpu`, or `nvme`.
        settings: What else all ranks must agree on: {what it is: its value}.
    """

    parameters: tuple[FlatParameter, ...]
    rank: int
    world: int
    shard_device: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def quantized_nbytes(self) -> int:
        """The bytes of all packed rows."""
        return sum(flat.nbytes for flat in self.parameters if flat.is_quantized)

    @property
    def quantized_shard_nbytes(self) -> int:
        """The bytes of packed rows that each rank keeps: every row divided by the ranks, and rounded up to an
        element.
        """
        return sum(flat.shard_nbytes(self.world) for flat in self.parameters if flat.is_quantized)

    def read_nbytes(self, is_quantized: bool) -> int:
        """The stored bytes of all packed rows, or of all dense ones, that are this rank's."""
        parameters = (flat for flat in self.parameters if flat.is_quantized == is_quantized)
        return sum(read.source.nbytes for flat in parameters for read in flat.reads(self.rank, self.world))

    def digests(self) -> dict[str, str]:
        """{what it is: a digest of it} of everything that ranks must agree on; the same in every process and
        on every node.
        """
        files = sorted(
            {source.file.replace("\\", "/") for flat in self.parameters for _, source in flat.parts}
        )
        names = {file: file.rpartition("/")[2] for file in files}
        found = {what: _digest(value) for what, value in self.settings.items()}
        found["number of ranks"] = _digest(self.world)
        found["device of the shards"] = _digest(self.shard_device)
        found["names of the parameters"] = _digest([flat.name for flat in self.parameters])
        found["sizes of the parameters"] = _digest(
            [(flat.nbytes, flat.itemsize, flat.is_quantized) for flat in self.parameters]
        )
        places = [
            [
                (offset, names[source.file.replace("\\", "/")], source.offset, source.nbytes)
                for offset, source in flat.parts
            ]
            for flat in self.parameters
        ]
        found["places of the tensors in the checkpoint's files"] = _digest(places)
        return found


def check_same_plan(digests: Iterable[Mapping[str, str]]) -> None:
    """Compares what the ranks have planned, before any of them takes part in another collective.

    Args:
        digests: `ZeroPlan.digests` of every rank, in the order of the ranks.

    Raises:
        PlacementError: Names the first rank that differs from rank 0, and in what.
    """
    first, *others = digests
    for rank, found in enumerate(others, start=1):
        differing = [what for what in {**first, **found} if first.get(what) != found.get(what)]
        if differing:
            raise PlacementError(
                "The ranks of this run do not mean the same model. Nothing was loaded.",
                rank=rank,
                expected="what rank 0 has",
                found=f"a difference in: {', '.join(differing)}",
                fix="give all ranks the same files, config, options and package versions",
            )


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogateescape")).hexdigest()[:32]
