"""ZeRO-3 shards of a model's flat buffers, and the byte ranges that each rank reads.

Pure data.
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
    """One parameter that ZeRO-3 cuts into equal shards, one per rank; the last is padded.

    Attributes:
        name: Parameter name in the model.
        nbytes: Stored bytes: a whole flat buffer with the gaps between its segments, or one unquantized
            tensor.
        itemsize: Bytes per element: of the dtype that ZeRO runs in for a flat buffer, of the stored dtype for
            an unquantized tensor.
        parts: (offset in the flat buffer, byte range in a file), in the order of the buffer.
        is_quantized: True if its elements are bytes of a quantized module.
    """

    name: str
    nbytes: int
    itemsize: int
    parts: tuple[tuple[int, ByteRange], ...]
    is_quantized: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.nbytes // self.itemsize

    def shard_numel(self, world: int) -> int:
        """Returns the elements of each rank's shard, padding included."""
        return -(-self.numel // world)

    def shard_nbytes(self, world: int) -> int:
        """Returns the stored bytes of each rank's shard, padding included."""
        return self.shard_numel(world) * self.itemsize

    def bounds(self, rank: int, world: int) -> tuple[int, int]:
        """Returns the first byte of a rank's shard, and the byte after its last, without padding."""
        size = self.shard_nbytes(world)
        return min(rank * size, self.nbytes), min((rank + 1) * size, self.nbytes)

    def reads(self, rank: int, world: int) -> tuple[ShardRead, ...]:
        """Returns the reads of a rank: only bytes of its own shard."""
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
    """Returns the flat parameter of a quantized module.

    Args:
        name: Parameter name in the model.
        infos: Stored tensors of the module, by local name.
        layout: Segments of the flat buffer and its bytes, from `segment_layout`.
        itemsize: Bytes per element of the dtype that ZeRO runs in; divides 16.
    """
    segments, nbytes = layout
    parts = tuple(
        (segment.offset, infos[local].range) for local, segment in segments.items() if segment.nbytes
    )
    return FlatParameter(name, nbytes, itemsize, parts, is_quantized=True)


@dataclass(frozen=True)
class ZeroPlan:
    """All flat parameters of a model, as cut for the ranks of one run.

    Attributes:
        parameters: In the order of the model's parameters.
        rank: This rank.
        world: Number of ranks.
        shard_device: Device of the shards: `device`, `cpu`, or `nvme`.
        settings: {label: value} of further settings that must be equal on all ranks.
    """

    parameters: tuple[FlatParameter, ...]
    rank: int
    world: int
    shard_device: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def quantized_nbytes(self) -> int:
        """Bytes of the flat buffers of all quantized modules."""
        return sum(flat.nbytes for flat in self.parameters if flat.is_quantized)

    @property
    def quantized_shard_nbytes(self) -> int:
        """Bytes of quantized weights that each rank keeps.

        Every flat buffer is divided by the ranks and rounded up to an element.
        """
        return sum(flat.shard_nbytes(self.world) for flat in self.parameters if flat.is_quantized)

    def read_nbytes(self, is_quantized: bool) -> int:
        """Returns the stored bytes of this rank: of quantized modules, or of unquantized tensors."""
        parameters = (flat for flat in self.parameters if flat.is_quantized == is_quantized)
        return sum(read.source.nbytes for flat in parameters for read in flat.reads(self.rank, self.world))

    def digests(self) -> dict[str, str]:
        """Returns {label: digest} of all settings that ranks must share.

        Equal settings have equal digests in every process and on every node.
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
    """Compares the plans of all ranks, before any rank enters another collective.

    Args:
        digests: `ZeroPlan.digests` of every rank, in rank order.

    Raises:
        PlacementError: Names the first rank that differs from rank 0, and the differences.
    """
    first, *others = digests
    for rank, found in enumerate(others, start=1):
        differing = [what for what in {**first, **found} if first.get(what) != found.get(what)]
        if differing:
            raise PlacementError(
                "The ranks of this run plan different models. Nothing was loaded.",
                rank=rank,
                expected="the plan of rank 0",
                found=f"a difference in: {', '.join(differing)}",
                fix="Give all ranks the same files, config, options, and package versions.",
            )


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogateescape")).hexdigest()[:32]
