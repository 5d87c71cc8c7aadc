"""`hfq.report`: where a model's bytes rest, what moves for a forward, and how near that comes to the
machine's limit.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hfq.loading.loaded_model import loader_of
from hfq.loading.model_loader import ModelLoader
from hfq.modules.linear import QuantizedLinear
from hfq.offload.host_memory import huge_page_nbytes
from hfq.offload.offloader import Offloader
from hfq.offload.read_limit import measure_limit
from hfq.placement.plan import ModuleDevice, Plan
from hfq.runtime.predicted_speed import SpeedReport, report_speed
from hfq.runtime.timeline import Timeline, measure_timeline
from hfq.tables import Displayed, Table
from hfq.version import __version__

__all__ = ["DeviceReport", "OutlierReport", "Report", "OffloadReport", "report"]


@dataclass(frozen=True)
class DeviceReport:
    """One home: the bytes that rest in it, and those of them that a forward of all modules moves to where
    they compute.
    """

    device: str
    nbytes: int
    onloaded_nbytes: int


@dataclass(frozen=True)
class OffloadReport:
    """What streaming did so far.

    Attributes:
        mode: How blocks are read: `direct` or `buffered`.
        units: The streamed blocks.
        pass_nbytes: What one pass over all of them reads. Embeddings are read by row and experts when they
            are routed to: neither is counted here.
        buffer_nbytes: The memory that blocks are brought to.
        huge_page_nbytes: How much of it is in huge pages; None where the system does not tell.
        passes: Completed forwards of the whole model.
        unit_forwards: Forwards of blocks.
        prefetch_misses: How often another block came than was expected.
        buffer_overflows: How often a block had no room in the ring.
        nbytes_read: The bytes of blocks read so far.
        read_seconds: The time during which reader threads were busy.
        stall_seconds: The time during which forwards waited for a block.
        disk_bandwidth: Bytes per second that the disk gives, where it was measured.
        expert_hits: Routed experts that were kept.
        expert_misses: Routed experts that were read.
        expert_nbytes: The bytes of experts that are kept.
        expert_cache_nbytes: The most that may be kept.
    """

    mode: str
    units: int
    pass_nbytes: int
    buffer_nbytes: int
    huge_page_nbytes: int | None
    passes: int
    unit_forwards: int
    prefetch_misses: int
    buffer_overflows: int
    nbytes_read: int
    read_seconds: float
    stall_seconds: float
    disk_bandwidth: float | None
    expert_hits: int
    expert_misses: int
    expert_nbytes: int
    expert_cache_nbytes: int

    @property
    def read_bandwidth(self) -> float | None:
        """Bytes per second while reader threads were busy."""
        return self.nbytes_read / self.read_seconds if self.nbytes_read and self.read_seconds else None

    @property
    def share_of_disk_bandwidth(self) -> float | None:
        """The rate over the measured limit."""
        return (
            self.read_bandwidth / self.disk_bandwidth if self.read_bandwidth and self.disk_bandwidth else None
        )


@dataclass(frozen=True)
class OutlierReport:
    """LLM.int8() so far: the input channels that were left as they are, and all input channels, summed over
    layers and calls.
    """

    outliers: int
    channels: int

    @property
    def share(self) -> float:
        """The outliers' share of the channels."""
        return self.outliers / self.channels if self.channels else 0.0


@dataclass(frozen=True, repr=False)
class Report(Displayed):
    """A model's homes, its streaming, its speed as predicted and achieved, LLM.int8()'s outliers, and what
    happened when.

    `print` it, take `to_dict`, or `save` it for `hfq plot`, which draws it.
    """

    devices: tuple[DeviceReport, ...]
    offload: OffloadReport | None
    speed: SpeedReport | None = None
    outliers: OutlierReport | None = None
    model: dict[str, Any] | None = None
    modules: tuple[ModuleDevice, ...] = ()
    timeline: Timeline | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        offload = None
        if self.offload is not None:
            offload = asdict(self.offload) | {
                "read_bandwidth": self.offload.read_bandwidth,
                "share_of_disk_bandwidth": self.offload.share_of_disk_bandwidth,
            }
        speed = None if self.speed is None else asdict(self.speed)
        outliers = None if self.outliers is None else asdict(self.outliers) | {"share": self.outliers.share}
        return {
            "model": self.model,
            "devices": [asdict(device) for device in self.devices],
            "offload": offload,
            "speed": speed,
            "outliers": outliers,
            "modules": [asdict(module) for module in self.modules],
            "timeline": None if self.timeline is None else self.timeline.to_dict(),
        }

    def save(self, file: str | os.PathLike) -> None:
        """Writes the report as JSON."""
        Path(file).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def _table(self) -> Table:
        rows = [(each.device, f"{each.nbytes:,}", f"{each.onloaded_nbytes:,}") for each in self.devices]
        notes = str(self).splitlines()[len(rows) :]
        header = ("device", "bytes stored", "bytes onloaded per forward")
        return Table("hfq report", "\n".join(notes), header, rows)

    def __str__(self) -> str:
        lines = [
            f"{device.device}: {device.nbytes:,} B, {device.onloaded_nbytes:,} B moved a forward"
            for device in self.devices
        ]
        if self.outliers is not None:
            found = self.outliers
            lines.append(
                f"{found.outliers:,} of {found.channels:,} input channels were outlier channels "
                f"({found.share:.2%})"
            )
        speed = [] if self.speed is None else [str(self.speed)]
        if self.offload is None:
            return "\n".join([*lines, "nothing is streamed", *speed])
        return "\n".join([*lines, *_stream_lines(self.offload), *speed])


def report(model: nn.Module, measure: bool = False, timeline: Timeline | None = None) -> Report:
    """Says where a model's bytes rest and how its streaming fares.

    Args:
        model: A model that hfq loaded.
        measure: Also measure what the disk gives, by reading at most 1 GiB of what is streamed past the page
            cache, and how long one token takes, and record one such forward where no timeline is given.
        timeline: What `hfq.timeline` recorded.

    Raises:
        SetupError: hfq did not load the model, or the profile of `hfq profile-machine` cannot be read.
    """
    loading = loader_of(model)
    speed = report_speed(loading, measure)
    if measure and timeline is None:
        timeline = measure_timeline(loading)
    offloader = loading.offloader
    offload = None if offloader is None else _stream(offloader, measure)
    order = (name for name, _ in loading.model.named_modules())
    modules = tuple(loading.plan.modules(order))
    return Report(
        tuple(_homes(loading.plan)), offload, speed, _outliers(model), _describe(loading), modules, timeline
    )


def _describe(loading: ModelLoader) -> dict[str, Any]:
    dtype = str(loading.model.dtype).removeprefix("torch.")
    return {
        "path": str(loading.checkpoint.root),
        "class": type(loading.model).__name__,
        "formats": loading.describe_formats(),
        "dtype": dtype,
        "device": loading.main,
        "hfq": __version__,
    }


def _outliers(model: nn.Module) -> OutlierReport | None:
    tallies = [
        module.outliers
        for module in model.modules()
        if isinstance(module, QuantizedLinear) and module.outliers is not None
    ]
    if not tallies:
        return None
    return OutlierReport(sum(tally.outliers for tally in tallies), sum(tally.channels for tally in tallies))


def _homes(plan: Plan) -> list[DeviceReport]:
    moved: dict[str, int] = {}
    for entry in plan.entries:
        moved[entry.device] = moved.get(entry.device, 0) + entry.nbytes * entry.is_moved
    return [DeviceReport(device, nbytes, moved[device]) for device, nbytes in plan.nbytes_by_device().items()]


def _stream(offloader: Offloader, measure: bool) -> OffloadReport:
    buffers = offloader.buffers
    experts = offloader.experts
    prefetch_order = offloader.prefetch_order
    return OffloadReport(
        mode=offloader.source.mode,
        units=len(offloader.units),
        pass_nbytes=offloader.pass_nbytes,
        buffer_nbytes=buffers.nbytes,
        huge_page_nbytes=huge_page_nbytes(buffers.buffer) if buffers.buffer.numel() else None,
        passes=offloader.passes,
        unit_forwards=prefetch_order.unit_forwards,
        prefetch_misses=prefetch_order.prefetch_misses,
        buffer_overflows=offloader.buffer_overflows,
        nbytes_read=offloader.source.nbytes_read,
        read_seconds=offloader.pool.busy_seconds,
        stall_seconds=offloader.stall_seconds,
        disk_bandwidth=measure_limit(offloader.source, buffers.layouts) if measure else None,
        expert_hits=experts.hits,
        expert_misses=experts.misses,
        expert_nbytes=experts.nbytes,
        expert_cache_nbytes=experts.budget,
    )


def _stream_lines(offload: OffloadReport) -> list[str]:
    huge = "" if offload.huge_page_nbytes is None else f" ({offload.huge_page_nbytes:,} B in huge pages)"
    lines = [
        f"{offload.units} streamed blocks: {offload.pass_nbytes:,} B a pass through a ring of "
        f"{offload.buffer_nbytes:,} B{huge}, "
        f"{offload.mode} reads",
        f"{offload.passes} passes, {offload.unit_forwards} visits, {offload.prefetch_misses} mispredicts, "
        f"{offload.buffer_overflows} without room, "
        f"{offload.stall_seconds:.3f} s waited",
    ]
    if offload.read_bandwidth is not None:
        share = (
            ""
            if offload.share_of_disk_bandwidth is None
            else f", {offload.share_of_disk_bandwidth:.2f} of the disk's {_rate(offload.disk_bandwidth or 0)}"
        )
        lines.append(
            f"{offload.nbytes_read:,} B read in {offload.read_seconds:.3f} s: "
            f"{_rate(offload.read_bandwidth)}{share}"
        )
    if offload.expert_hits + offload.expert_misses:
        lines.append(
            f"experts: {offload.expert_hits} kept, {offload.expert_misses} read; {offload.expert_nbytes:,} "
            f"of "
            f"{offload.expert_cache_nbytes:,} B in use"
        )
    return lines


def _rate(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB/s"
