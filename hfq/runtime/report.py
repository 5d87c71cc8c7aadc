"""`hfq.report`: where a model's bytes rest, what moves for a forward, and how near that comes to the machine's limit."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hfq.loading.loaded_model import loading_of
from hfq.loading.model_loader import Loading
from hfq.modules.linear import PackedLinear
from hfq.offload.host_memory import huge_page_nbytes
from hfq.offload.offloader import Streamer
from hfq.offload.read_limit import measure_limit
from hfq.placement.plan import ModuleHome, Plan
from hfq.runtime.predicted_speed import SpeedReport, report_speed
from hfq.runtime.timeline import Timeline, measure_timeline
from hfq.version import __version__

__all__ = ["HomeReport", "OutlierReport", "Report", "StreamReport", "report"]


@dataclass(frozen=True)
class HomeReport:
    """One home: the bytes that rest in it, and those of them that a forward of all modules moves to where they compute."""

    home: str
    nbytes: int
    moved_nbytes: int


@dataclass(frozen=True)
class StreamReport:
    """What streaming did so far.

    Attributes:
        mode: How blocks are read: `direct` or `buffered`.
        blocks: The streamed blocks.
        pass_nbytes: What one pass over all of them reads. Embeddings are read by row and experts when they are routed to: neither
            is counted here.
        ring_nbytes: The memory that blocks are brought to.
        huge_page_nbytes: How much of it is in huge pages; None where the system does not tell.
        passes: Completed forwards of the whole model.
        visits: Forwards of blocks.
        mispredicts: How often another block came than was expected.
        apart: How often a block had no room in the ring.
        nbytes_read: The bytes of blocks read so far.
        read_seconds: The time during which reader threads were busy.
        waited_seconds: The time during which forwards waited for a block.
        limit: Bytes per second that the disk gives, where it was measured.
        expert_hits: Routed experts that were kept.
        expert_misses: Routed experts that were read.
        expert_nbytes: The bytes of experts that are kept.
        expert_budget: The most that may be kept.
    """

    mode: str
    blocks: int
    pass_nbytes: int
    ring_nbytes: int
    huge_page_nbytes: int | None
    passes: int
    visits: int
    mispredicts: int
    apart: int
    nbytes_read: int
    read_seconds: float
    waited_seconds: float
    limit: float | None
    expert_hits: int
    expert_misses: int
    expert_nbytes: int
    expert_budget: int

    @property
    def rate(self) -> float | None:
        """Bytes per second while reader threads were busy."""
        return self.nbytes_read / self.read_seconds if self.nbytes_read and self.read_seconds else None

    @property
    def share_of_limit(self) -> float | None:
        """The rate over the measured limit."""
        return self.rate / self.limit if self.rate and self.limit else None


@dataclass(frozen=True)
class OutlierReport:
    """LLM.int8() so far: the input channels that were left as they are, and all input channels, summed over layers and calls."""

    outliers: int
    channels: int

    @property
    def share(self) -> float:
        """The outliers' share of the channels."""
        return self.outliers / self.channels if self.channels else 0.0


@dataclass(frozen=True)
class Report:
    """A model's homes, its streaming, its speed as predicted and achieved, LLM.int8()'s outliers, and what happened when.

    `print` it, take `to_dict`, or `save` it for `hfq report`, which draws it.
    """

    homes: tuple[HomeReport, ...]
    stream: StreamReport | None
    speed: SpeedReport | None = None
    outliers: OutlierReport | None = None
    model: dict[str, Any] | None = None
    modules: tuple[ModuleHome, ...] = ()
    timeline: Timeline | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        stream = None
        if self.stream is not None:
            stream = asdict(self.stream) | {"rate": self.stream.rate, "share_of_limit": self.stream.share_of_limit}
        speed = None if self.speed is None else asdict(self.speed)
        outliers = None if self.outliers is None else asdict(self.outliers) | {"share": self.outliers.share}
        return {
            "model": self.model, "homes": [asdict(home) for home in self.homes], "stream": stream, "speed": speed,
            "outliers": outliers, "modules": [asdict(module) for module in self.modules],
            "timeline": None if self.timeline is None else self.timeline.to_dict(),
        }  # fmt: skip

    def save(self, file: str | os.PathLike) -> None:
        """Writes the report as JSON."""
        Path(file).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"{home.home}: {home.nbytes:,} B, {home.moved_nbytes:,} B moved a forward" for home in self.homes]
        if self.outliers is not None:
            found = self.outliers
            lines.append(f"{found.outliers:,} of {found.channels:,} input channels were outlier channels ({found.share:.2%})")
        speed = [] if self.speed is None else [str(self.speed)]
        if self.stream is None:
            return "\n".join([*lines, "nothing is streamed", *speed])
        return "\n".join([*lines, *_stream_lines(self.stream), *speed])


def report(model: nn.Module, measure: bool = False, timeline: Timeline | None = None) -> Report:
    """Says where a model's bytes rest and how its streaming fares.

    Args:
        model: A model that hfq loaded.
        measure: Also measure what the disk gives, by reading at most 1 GiB of what is streamed past the page cache, and how long
            one token takes, and record one such forward where no timeline is given.
        timeline: What `hfq.timeline` recorded.

    Raises:
        SetupError: hfq did not load the model, or the profile of `hfq calibrate` cannot be read.
    """
    loading = loading_of(model)
    speed = report_speed(loading, measure)
    if measure and timeline is None:
        timeline = measure_timeline(loading)
    streamer = loading.streamer
    stream = None if streamer is None else _stream(streamer, measure)
    order = (name for name, _ in loading.model.named_modules())
    modules = tuple(loading.plan.modules(order))
    return Report(tuple(_homes(loading.plan)), stream, speed, _outliers(model), _describe(loading), modules, timeline)


def _describe(loading: Loading) -> dict[str, Any]:
    dtype = str(loading.model.dtype).removeprefix("torch.")
    return {
        "path": str(loading.checkpoint.root), "class": type(loading.model).__name__, "dialects": loading.describe_formats(),
        "dtype": dtype, "device": loading.main, "hfq": __version__,
    }  # fmt: skip


def _outliers(model: nn.Module) -> OutlierReport | None:
    tallies = [
        module.outliers for module in model.modules() if isinstance(module, PackedLinear) and module.outliers is not None
    ]
    if not tallies:
        return None
    return OutlierReport(sum(tally.outliers for tally in tallies), sum(tally.channels for tally in tallies))


def _homes(plan: Plan) -> list[HomeReport]:
    moved: dict[str, int] = {}
    for entry in plan.entries:
        moved[entry.home] = moved.get(entry.home, 0) + entry.nbytes * entry.is_moved
    return [HomeReport(home, nbytes, moved[home]) for home, nbytes in plan.nbytes_by_home().items()]


def _stream(streamer: Streamer, measure: bool) -> StreamReport:
    regions, experts, schedule = streamer.regions, streamer.experts, streamer.schedule
    return StreamReport(
        mode=streamer.source.mode, blocks=len(streamer.blocks), pass_nbytes=streamer.pass_nbytes, ring_nbytes=regions.nbytes,
        huge_page_nbytes=huge_page_nbytes(regions.buffer) if regions.buffer.numel() else None, passes=streamer.passes,
        visits=schedule.visits, mispredicts=schedule.mispredicts, apart=streamer.apart, nbytes_read=streamer.source.nbytes_read,
        read_seconds=streamer.pool.busy_seconds, waited_seconds=streamer.waited_seconds,
        limit=measure_limit(streamer.source, regions.layouts) if measure else None, expert_hits=experts.hits,
        expert_misses=experts.misses, expert_nbytes=experts.nbytes, expert_budget=experts.budget,
    )  # fmt: skip


def _stream_lines(stream: StreamReport) -> list[str]:
    huge = "" if stream.huge_page_nbytes is None else f" ({stream.huge_page_nbytes:,} B in huge pages)"
    lines = [
        f"{stream.blocks} streamed blocks: {stream.pass_nbytes:,} B a pass through a ring of {stream.ring_nbytes:,} B{huge}, "
        f"{stream.mode} reads",
        f"{stream.passes} passes, {stream.visits} visits, {stream.mispredicts} mispredicts, {stream.apart} without room, "
        f"{stream.waited_seconds:.3f} s waited",
    ]
    if stream.rate is not None:
        share = (
            "" if stream.share_of_limit is None else f", {stream.share_of_limit:.2f} of the disk's {_rate(stream.limit or 0)}"
        )
        lines.append(f"{stream.nbytes_read:,} B read in {stream.read_seconds:.3f} s: {_rate(stream.rate)}{share}")
    if stream.expert_hits + stream.expert_misses:
        lines.append(
            f"experts: {stream.expert_hits} kept, {stream.expert_misses} read; {stream.expert_nbytes:,} of "
            f"{stream.expert_budget:,} B in use"
        )
    return lines


def _rate(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB/s"
