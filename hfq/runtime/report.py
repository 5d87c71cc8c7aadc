"""Report on a loaded model: devices, offloading, and speed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from hfq.loading.loaded_model import loader_of
from hfq.loading.model_loader import ModelLoader
from hfq.modules.linear import QuantizedLinear
from hfq.offload.host_memory import huge_page_nbytes
from hfq.offload.offloader import Offloader
from hfq.offload.read_limit import measure_limit
from hfq.output_file import write_output_file
from hfq.placement.plan import ModuleDevice, Plan
from hfq.runtime.predicted_speed import SpeedReport, report_speed
from hfq.runtime.record_routing import Routing
from hfq.runtime.timeline import Timeline, measure_timeline
from hfq.tables import Displayed, Table
from hfq.version import __version__

__all__ = ["DeviceReport", "OutlierReport", "Report", "OffloadReport", "report"]


@dataclass(frozen=True)
class DeviceReport:
    """Bytes on one device, and the bytes of them that a forward pass onloads.

    Attributes:
        device: Name of the device.
        nbytes: Bytes on the device.
        onloaded_nbytes: Bytes that a forward pass of all modules copies to the execution device.
    """

    device: str
    nbytes: int
    onloaded_nbytes: int


@dataclass(frozen=True)
class OffloadReport:
    """Activity of the offloader so far.

    Attributes:
        mode: Read mode, `direct` or `buffered`.
        units: Number of offloaded units.
        pass_nbytes: Bytes that one pass over all units reads. It leaves out embeddings, which are read by
            row, and experts, which are read when they are routed to.
        buffer_nbytes: Size of the offload buffer; of all of them, if there are several.
        buffers: Their bytes on each device. Those of an accelerator are partly on the host.
        huge_page_nbytes: Bytes of it in huge pages; None if the system does not tell.
        passes: Completed forward passes of the whole model.
        unit_forwards: Forward passes of units.
        prefetch_misses: Number of times that another unit ran than the prefetched one.
        buffer_overflows: Number of times that a unit did not fit in the offload buffer.
        nbytes_read: Bytes of units read so far.
        read_seconds: Seconds during which reader threads were busy.
        stall_seconds: Seconds during which forward passes waited for a unit.
        disk_bandwidth: Measured bytes per second of the disk; None if not measured.
        expert_hits: Number of routed experts that were in the cache.
        expert_misses: Number of routed experts that were read.
        expert_guesses: Number of experts that were read ahead of the router, or began to wait for it.
        expert_guesses_used: Number of those that were routed to; they count as in the cache.
        expert_wasted_nbytes: Bytes that were read of the others.
        expert_nbytes: Bytes of experts in the cache.
        expert_cache_nbytes: Size limit of the cache on all devices, in bytes.
    """

    mode: str
    units: int
    pass_nbytes: int
    buffer_nbytes: int
    buffers: dict[str, int]
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
    expert_guesses: int
    expert_guesses_used: int
    expert_wasted_nbytes: int
    expert_nbytes: int
    expert_cache_nbytes: int

    @property
    def read_bandwidth(self) -> float | None:
        """Bytes per second while reader threads were busy; None if nothing was read."""
        return self.nbytes_read / self.read_seconds if self.nbytes_read and self.read_seconds else None

    @property
    def share_of_disk_bandwidth(self) -> float | None:
        """Fraction of the disk bandwidth that reads achieved; None if not measured."""
        return (
            self.read_bandwidth / self.disk_bandwidth if self.read_bandwidth and self.disk_bandwidth else None
        )


@dataclass(frozen=True)
class OutlierReport:
    """Input channels of LLM.int8() so far, summed over layers and calls.

    Attributes:
        outliers: Input channels that were left unquantized.
        channels: All input channels.
    """

    outliers: int
    channels: int

    @property
    def share(self) -> float:
        """Fraction of the channels that were outliers."""
        return self.outliers / self.channels if self.channels else 0.0


@dataclass(frozen=True, repr=False)
class Report(Displayed):
    """Devices, offloading, speed, LLM.int8() outliers, and timeline of a model.

    Print it, convert it with `to_dict`, or `save` it for `hfq plot`.
    """

    devices: tuple[DeviceReport, ...]
    offload: OffloadReport | None
    speed: SpeedReport | None = None
    outliers: OutlierReport | None = None
    model: dict[str, Any] | None = None
    modules: tuple[ModuleDevice, ...] = ()
    timeline: Timeline | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-ready data."""
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
        """Writes the report as JSON.

        Raises:
            SetupError: The file cannot be written. An old file keeps its content.
        """
        write_output_file(file, json.dumps(self.to_dict(), indent=1) + "\n")

    def _table(self) -> Table:
        rows = [(each.device, f"{each.nbytes:,}", f"{each.onloaded_nbytes:,}") for each in self.devices]
        header = ("device", "bytes stored", "bytes onloaded per forward")
        return Table("hfq report", "\n".join(self._notes()), header, rows)

    def __str__(self) -> str:
        lines = [
            f"{device.device}: {device.nbytes:,} B, {device.onloaded_nbytes:,} B onloaded per forward pass"
            for device in self.devices
        ]
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        """Returns the lines on changes, outliers, offloading, and speed."""
        changes = (self.model or {}).get("changes")
        lines = [changes] if changes else []
        if self.outliers is not None:
            found = self.outliers
            lines.append(
                f"{found.outliers:,} of {found.channels:,} input channels were outlier channels "
                f"({found.share:.2%})"
            )
        lines += ["nothing is offloaded"] if self.offload is None else _offload_lines(self.offload)
        return lines if self.speed is None else [*lines, str(self.speed)]


def report(
    model: nn.Module,
    measure: bool = False,
    timeline: Timeline | None = None,
    routing: Routing | None = None,
) -> Report:
    """Returns a report on a model: devices of its weights, offloading, and speed.

    Args:
        model: A model that hfq loaded.
        measure: True also measures the disk bandwidth and the seconds of one token. It reads at most 1 GiB of
            offloaded weights past the page cache. It also records one forward pass if no timeline is given.
        timeline: Recording of `hfq.timeline`; None for no recording.
        routing: Recording of `hfq.record_routing`, from which hits of the expert cache are predicted. None
            takes those of the tokens that the model has decoded; before the first one, of even routing.

    Raises:
        SetupError: hfq did not load the model, the machine profile cannot be read, or the routing is that of
            another model.
    """
    loading = loader_of(model)
    speed = report_speed(loading, measure, routing=routing)
    if measure and timeline is None:
        timeline = measure_timeline(loading)
    offloader = loading.offloader
    offload = None if offloader is None else _stream(offloader, measure)
    order = (name for name, _ in loading.model.named_modules())
    modules = tuple(loading.plan.modules(order))
    return Report(
        tuple(_device_reports(loading.plan)),
        offload,
        speed,
        _outliers(model),
        _describe(loading),
        modules,
        timeline,
    )


def _describe(loading: ModelLoader) -> dict[str, Any]:
    dtype = str(loading.model.dtype).removeprefix("torch.")
    return {
        "path": str(loading.checkpoint.root),
        "class": type(loading.model).__name__,
        "formats": loading.describe_formats(),
        "changes": loading.describe_changes(),
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


def _device_reports(plan: Plan) -> list[DeviceReport]:
    moved: dict[str, int] = {}
    for entry in plan.entries:
        moved[entry.device] = moved.get(entry.device, 0) + entry.nbytes * entry.is_moved
    return [DeviceReport(device, nbytes, moved[device]) for device, nbytes in plan.nbytes_by_device().items()]


def _stream(offloader: Offloader, measure: bool) -> OffloadReport:
    host = [buffers.buffer for buffers in offloader.buffers.values() if buffers.buffer.device.type == "cpu"]
    huge = [huge_page_nbytes(buffer) for buffer in host if buffer.numel()]
    experts = offloader.experts
    prefetch_order = offloader.prefetch_order
    return OffloadReport(
        mode=offloader.source.mode,
        units=len(offloader.units),
        pass_nbytes=offloader.pass_nbytes,
        buffer_nbytes=offloader.buffer_nbytes,
        buffers=offloader.buffer_nbytes_by_device(),
        huge_page_nbytes=huge[0] if huge else None,
        passes=offloader.passes,
        unit_forwards=prefetch_order.unit_forwards,
        prefetch_misses=prefetch_order.prefetch_misses,
        buffer_overflows=offloader.buffer_overflows,
        nbytes_read=offloader.source.nbytes_read,
        read_seconds=offloader.pool.busy_seconds,
        stall_seconds=offloader.stall_seconds,
        disk_bandwidth=measure_limit(offloader.source, offloader.layouts) if measure else None,
        expert_hits=experts.hits,
        expert_misses=experts.misses,
        expert_guesses=experts.guesses.made,
        expert_guesses_used=experts.guesses.used,
        expert_wasted_nbytes=experts.guesses.wasted_nbytes,
        expert_nbytes=experts.nbytes,
        expert_cache_nbytes=experts.budget,
    )


def _offload_lines(offload: OffloadReport) -> list[str]:
    huge = "" if offload.huge_page_nbytes is None else f" ({offload.huge_page_nbytes:,} B in huge pages)"
    where = ", ".join(f"{nbytes:,} B on {device}" for device, nbytes in offload.buffers.items())
    where = f" ({where})" if len(offload.buffers) > 1 else ""
    lines = [
        f"{offload.units} offloaded units: {offload.pass_nbytes:,} B per pass, offload buffer of "
        f"{offload.buffer_nbytes:,} B{where}{huge}, "
        f"{offload.mode} reads",
        f"{offload.passes} passes, {offload.unit_forwards} unit forwards, "
        f"{offload.prefetch_misses} prefetch misses, "
        f"{offload.buffer_overflows} buffer overflows, "
        f"{offload.stall_seconds:.3f} s stalled",
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
    if lookups := offload.expert_hits + offload.expert_misses:
        lines.append(
            f"experts: {offload.expert_hits} cached ({offload.expert_hits / lookups:.0%}), "
            f"{offload.expert_misses} read; {offload.expert_nbytes:,} of "
            f"{offload.expert_cache_nbytes:,} B in use"
        )
    if offload.expert_guesses:
        lines.append(
            f"experts ahead of the router: {offload.expert_guesses} guessed, {offload.expert_guesses_used} "
            f"of them used, {offload.expert_wasted_nbytes:,} B read in vain"
        )
    return lines


def _rate(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB/s"
