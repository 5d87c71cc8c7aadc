"""One checkpoint in one placement: planned like `hfq plan`, loaded, and measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfq.checkpoint.memory_limit import available_memory
from hfq.errors import PlacementError
from hfq.loading.dry_run import PlannedModel
from hfq.loading.loaded_model import loader_of
from hfq.machine_profile.model_probes import Decoder, load_model
from hfq.placement.budget import READ_AHEAD_NBYTES, buffer_nbytes, plan_devices
from hfq.placement.estimate.estimate import Estimate, Workload, estimate_placement, list_stages
from hfq.placement.estimate.hardware import Hardware
from hfq.placement.estimate.profile import PUBLISHED
from hfq.placement.estimate.roofline import Work

__all__ = ["DIRECT", "PLACEMENTS", "Case", "measure_devices", "open_cases"]

DIRECT = "all disk, past the page cache"
PLACEMENTS = ("cpu", "half disk", "all disk", DIRECT)
WORKLOAD = Workload(batch=1, context=64)


@dataclass(frozen=True)
class Case:
    """A placement of a loaded model.

    Attributes:
        placement: One of `PLACEMENTS`.
        planned: {device: bytes}, from headers.
        measured: {device: bytes} of the loaded model.
        work: Planned work of a step.
        decoder: Runs steps.
    """

    placement: str
    planned: dict[str, int]
    measured: dict[str, int]
    work: Work
    decoder: Decoder

    def describe(self) -> dict[str, Any]:
        """Returns the case as JSON-ready data, before its first round."""
        return {"placement": self.placement, "planned": self.planned, "measured": self.measured, "rounds": []}


def open_cases(path: Path, model: PlannedModel, placements: tuple[str, ...] = PLACEMENTS) -> Iterator[Case]:
    """Plans and loads a checkpoint in each placement.

    Args:
        path: The checkpoint.
        model: Its planned model.
        placements: Some of `PLACEMENTS`.
    """
    total = sum(unit.nbytes for unit in model.sizes.units)
    roomy = _estimate(model, 4 * total + (1 << 40))
    least = _estimate(model, _least(model, total) + roomy.kv + roomy.activations)
    for placement in placements:
        if placement == "half disk":
            yield _open_half(path, model, roomy)
        else:
            yield _open(path, model, placement, roomy if placement == "cpu" else least)


def measure_devices(model: Any) -> dict[str, int]:
    """Returns {`cpu`, `disk`, `ring`: bytes} of a loaded model.

    These are tensors in memory, tensors that stay in files, and the offload buffer.
    """
    loading = loader_of(model)
    held = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()] if not t.is_meta}
    offloaded = [
        module
        for module in loading.quantized.values()
        if all(t.is_meta for t in module.stored_tensors().values())
    ]
    on_disk = sum(info.nbytes for module in offloaded for info in module.infos.values())
    parameters = dict(model.named_parameters())
    dense = [
        info
        for name, info in loading.match.unquantized.items()
        if name in parameters and parameters[name].is_meta
    ]
    on_disk += sum(info.nbytes for info in dense)
    return {
        "cpu": sum(held.values()),
        "disk": on_disk,
        "buffer": loading.offloader.buffer_nbytes if loading.offloader else 0,
    }


def _open(path: Path, model: PlannedModel, placement: str, estimate: Estimate) -> Case:
    """Returns a case that `max_memory` determines."""
    options: dict[str, Any] = {"device_map": {"": "cpu"}}
    if placement != "cpu":
        options = {"device_map": "auto", "max_memory": {"cpu": estimate.budget.capacities["cpu"]}}
    loaded = load_model(
        path, dtype="auto", disk_io="direct" if placement == DIRECT else "buffered", **options
    )
    buffer = estimate.buffer.get("cpu", 0)
    work = dataclasses.replace(estimate.work, is_cached=placement != DIRECT)
    planned = _planned(model, model.device_map(estimate.budget), buffer)
    return Case(placement, planned, measure_devices(loaded), work, Decoder(loaded))


def _open_half(path: Path, model: PlannedModel, roomy: Estimate) -> Case:
    """Returns a case with the later half of the decoder layers on disk, set by a device map.

    In a small model, `max_memory` would not leave half of the layers in memory next to an offload buffer.
    """
    units = model.sizes.units
    blocks = [unit for unit in units if unit.kind == "block"]
    offloaded = blocks[len(blocks) // 2 :]
    devices = {unit.name: "disk" if unit in offloaded else "cpu" for unit in units}
    device_map = {"": "cpu", **{unit.name: "disk" for unit in offloaded}}
    loaded = load_model(path, dtype="auto", disk_io="buffered", device_map=dict(device_map))
    buffer = buffer_nbytes([unit.unit_onloaded_nbytes for unit in offloaded], READ_AHEAD_NBYTES)
    work = dataclasses.replace(
        roomy.work,
        streamed=sum(unit.unit_onloaded_nbytes for unit in offloaded),
        is_cached=True,
        buffer=buffer,
        stages=list_stages(units, devices, "cpu", model.sizes.routed),
    )
    return Case(
        "half disk", _planned(model, device_map, buffer), measure_devices(loaded), work, Decoder(loaded)
    )


def _planned(model: PlannedModel, device_map: dict[str, Any], buffer: int) -> dict[str, int]:
    weights = model.weights_by_device(device_map, "cpu")
    return {"cpu": weights.get("cpu", 0), "disk": weights.get("disk", 0), "buffer": buffer}


def _estimate(model: PlannedModel, capacity: int) -> Estimate:
    return estimate_placement(model.sizes, Hardware((), capacity), WORKLOAD, PUBLISHED, available_memory())


def _least(model: PlannedModel, most: int) -> int:
    """Returns the smallest capacity for weights and offload buffer for which a plan exists."""
    low, high = 0, 2 * most
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan_devices(model.sizes.units, {"cpu": middle}, "cpu")
            high = middle
        except PlacementError:
            low = middle
    return high
