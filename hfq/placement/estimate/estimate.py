"""Memory and speed of a model on a machine: bytes per device, work, and prediction.

Pure data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hfq.errors import PlacementError
from hfq.placement.budget import Budget, Unit, buffer_nbytes, plan_devices
from hfq.placement.estimate.hardware import Hardware
from hfq.placement.estimate.kv_cache import (
    Activations,
    KvLayer,
    activation_nbytes,
    kv_nbytes,
    offloaded_kv_nbytes,
)
from hfq.placement.estimate.profile import Profile
from hfq.placement.estimate.roofline import Prediction, Work, predict

__all__ = [
    "Estimate",
    "HitRate",
    "ModelSizes",
    "Workload",
    "estimate_placement",
    "even_hit_rate",
    "list_stages",
    "work_of_rows",
]

_SHARE_OF_MEMORY = 0.5
"""Largest share of free memory that offloaded weights may take in the page cache.

`hfq.offload.byte_source` uses the same share.
"""


HitRate = Callable[[float], float]
"""Returns the share of routed experts that a cache holds, given the share of all experts that it holds."""


def even_hit_rate(share: float) -> float:
    """Returns the hit rate of even routing: the share of the experts that the cache holds."""
    return share


@dataclass(frozen=True)
class Workload:
    """Input sizes that a plan is made for.

    Attributes:
        batch: Sequences per batch.
        context: Tokens per sequence, including generated tokens.
        kv_dtype: One of `hfq.placement.estimate.kv_cache.KV_DTYPES`, or of `OFFLOADED_KV_DTYPES` if the KV
            cache is offloaded.
        kv_device: `"cpu"` or `"disk"` for an `hfq.OffloadedCache` there; None if the KV cache is where the
            model computes.
    """

    batch: int = 1
    context: int = 2048
    kv_dtype: str = "auto"
    kv_device: str | None = None


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that a placement depends on.

    Attributes:
        units: Units, in the order in which they compute.
        kv: KV cache of each layer.
        activations: Sizes that decide the memory of a forward pass.
        weights: {kind of weight: (weights, bytes)} that a step multiplies by; of experts, only routed ones.
        routed: Share of its experts that a token is routed to.
        dtype: Dtype that the model computes in.
        layers: Number of layers.
        calls: {kind of weight: matrix products} of a step.
        positions: Longest sequence that the model's config allows; None if it names none.
    """

    units: tuple[Unit, ...]
    kv: tuple[KvLayer, ...]
    activations: Activations
    weights: Mapping[str, tuple[int, int]]
    routed: float
    dtype: str
    layers: int
    calls: Mapping[str, int] = field(default_factory=dict)
    positions: int | None = None


@dataclass(frozen=True)
class Estimate:
    """One placement of a model.

    Attributes:
        hardware: The machine.
        workload: The workload of the model.
        budget: Device of every unit. Its capacities exclude the KV cache and the activations.
        buffer: Bytes of the offload buffer, read-ahead included, on each device that has one.
        kv: Bytes of the KV cache on the execution device.
        activations: Bytes of activations.
        work: Work of one step.
        prediction: Predicted times.
        free_memory: Bytes of host memory for the page cache.
        stored_kv: Bytes of the KV cache on `workload.kv_device`.
        hit_rate: Share of a token's experts that the expert caches hold, of those that are offloaded.
    """

    hardware: Hardware
    workload: Workload
    budget: Budget
    buffer: Mapping[str, int]
    kv: int
    activations: int
    work: Work
    prediction: Prediction
    free_memory: int
    stored_kv: int = 0
    hit_rate: float = 0.0

    def devices(self, stored_nbytes: Mapping[str, int] | None = None) -> dict[str, dict[str, int]]:
        """Returns {device: {part: bytes}}.

        The parts are `weights`, `buffer`, `experts` (the expert cache), `kv_cache`, and `activations`.

        Args:
            stored_nbytes: Bytes of weights on each device, from the plan of the loader; None for those of
                `budget`.
        """
        budget, found = self.budget, {}
        weights = budget.stored_nbytes if stored_nbytes is None else stored_nbytes
        kv_device = self.workload.kv_device
        used = (budget.main, *weights, *self.buffer, *([kv_device] if kv_device else []))
        for device in dict.fromkeys(used):
            is_main = device == budget.main
            found[device] = {
                "weights": weights.get(device, 0),
                "buffer": self.buffer.get(device, 0),
                "experts": budget.expert_caches.get(device, 0),
                "kv_cache": self.kv * is_main + self.stored_kv * (device == kv_device),
                "activations": self.activations if is_main else 0,
            }
        return found


def estimate_placement(
    sizes: ModelSizes,
    hardware: Hardware,
    workload: Workload,
    profile: Profile,
    free_memory: int | None = None,
    expert_cache_nbytes: int | None = None,
    hit_rate: HitRate = even_hit_rate,
) -> Estimate:
    """Places a model with a device map on at most one accelerator, and predicts its speed.

    Args:
        sizes: The model.
        hardware: The machine.
        workload: The workload.
        profile: Rates of the machine.
        free_memory: Bytes of host memory for the page cache; None for the rest of `hardware.cpu`.
        expert_cache_nbytes: Bytes of the expert cache, used if experts are offloaded; None for what is left.
        hit_rate: Hits of an expert cache by its size.

    Raises:
        PlacementError: The model does not fit; `fix` names changes, each of which was planned and fits.
    """
    (stored_kv, kv), activations = _kv(sizes, workload), _activations(sizes, workload)
    main, capacities = hardware.main, _capacities(sizes, hardware, workload)
    try:
        if capacities[main] <= 0:
            raise PlacementError("The KV cache and the activations alone do not fit.", fix="-")
        budget = plan_devices(sizes.units, capacities, main, expert_cache_nbytes or 0)
        if expert_cache_nbytes is None:
            budget = budget.with_default_caches(sizes.units)
    except PlacementError as error:
        raise _does_not_fit(error, sizes, hardware, workload, (kv, activations)) from error
    buffers = _buffers(sizes.units, budget)
    free = hardware.cpu - budget.taken("cpu") if free_memory is None else free_memory
    hits = hit_rate(_cached_share(sizes.units, budget))
    work = _work(sizes, budget, workload, buffers.get(budget.main, 0), free, hits)
    prediction = predict(work, profile)
    return Estimate(
        hardware, workload, budget, buffers, kv, activations, work, prediction, free, stored_kv, hits
    )


def _buffers(units: Sequence[Unit], budget: Budget) -> dict[str, int]:
    streamed = [
        unit.unit_onloaded_nbytes
        for unit in units
        if unit.is_offloaded and budget.devices[unit.name] != budget.main
    ]
    return {device: buffer_nbytes(streamed, budget.read_ahead_nbytes()) for device in budget.buffers}


def list_stages(
    units: Sequence[Unit], devices: Mapping[str, str], main: str, routed: float = 1.0
) -> tuple[tuple[int, int], ...]:
    """Returns (bytes that a step computes with, bytes that it onloads) of each unit in order.

    Args:
        units: Units of the model.
        devices: Device of each unit.
        main: Execution device.
        routed: Share of its experts that a token is routed to.
    """
    computing = [unit for unit in units if unit.kind in ("block", "other", "experts")]
    shares = {"experts": routed}
    return tuple(
        (
            int(unit.nbytes * shares.get(unit.kind, 1.0)),
            unit.unit_onloaded_nbytes if unit.is_offloaded and devices[unit.name] != main else 0,
        )
        for unit in computing
    )


def _work(
    sizes: ModelSizes, budget: Budget, workload: Workload, buffer: int, free_memory: int, hits: float
) -> Work:
    streamed, copied, on_demand = _reads(sizes, budget, workload.batch, hits)
    stored_nbytes = sum(nbytes for device, nbytes in budget.stored_nbytes.items() if device != "disk")
    is_on_cpu, is_cached = budget.main == "cpu", _is_cached(budget, free_memory)
    kv_moved, kv_held = _kv(sizes, workload)
    return Work(
        weights=sizes.weights,
        streamed=streamed,
        copied=0 if is_on_cpu else copied,
        cache=kv_nbytes(sizes.kv, workload.batch, workload.context, sizes.dtype)
        if workload.kv_device
        else kv_held,
        rows=workload.batch,
        layers=sizes.layers,
        stored_nbytes=stored_nbytes,
        is_cached=is_cached,
        is_on_cpu=is_on_cpu,
        calls=sizes.calls,
        stages=list_stages(sizes.units, budget.devices, budget.main, sizes.routed),
        buffer=buffer,
        kv_moved=kv_moved,
        is_kv_on_disk=workload.kv_device == "disk",
        on_demand=on_demand,
    )


def work_of_rows(estimate: Estimate, sizes: ModelSizes, rows: int) -> Work:
    """Returns the work of a pass over this many tokens of one sequence.

    Each token counts its own experts, which is an upper bound.
    """
    streamed, copied, on_demand = _reads(sizes, estimate.budget, rows, estimate.hit_rate)
    return replace(
        estimate.work,
        rows=rows,
        streamed=streamed,
        copied=0 if estimate.work.is_on_cpu else copied,
        on_demand=on_demand,
    )


def _is_cached(budget: Budget, free_memory: int) -> bool:
    """Returns True if all that is read from disk stays in the page cache.

    That includes all experts, since each token is routed to others.
    """
    return budget.stored_nbytes.get("disk", 0) <= free_memory * _SHARE_OF_MEMORY


def _reads(sizes: ModelSizes, budget: Budget, rows: int, hits: float) -> tuple[int, int, int]:
    """Returns the bytes that a pass over `rows` tokens moves.

    Returns:
        Bytes from disk, bytes of all offloaded units, and bytes of routed experts from disk.
    """
    offloaded = [unit for unit in sizes.units if budget.devices[unit.name] != budget.main]
    on_disk = [unit for unit in offloaded if budget.devices[unit.name] == "disk"]
    missed = min(1.0, sizes.routed * rows)
    if missed < 1:
        # a cache that is smaller than all experts holds none of those that a step of all needs next
        missed *= 1 - hits
    experts = [unit for unit in on_disk if unit.kind == "experts"]
    return _moved(on_disk, missed), _moved(offloaded, missed), _moved(experts, missed)


def _moved(units: Sequence[Unit], missed: float) -> int:
    """Returns the bytes that a step onloads: whole units, and this share of the experts."""
    whole = sum(unit.unit_onloaded_nbytes for unit in units if unit.is_offloaded)
    return whole + int(missed * sum(unit.nbytes for unit in units if unit.kind == "experts"))


def _cached_share(units: Sequence[Unit], budget: Budget) -> float:
    """Returns the share of offloaded experts that caches hold."""
    experts = sum(
        unit.nbytes for unit in units if unit.kind == "experts" and budget.devices[unit.name] != budget.main
    )
    return min(1.0, sum(budget.expert_caches.values()) / experts) if experts else 0.0


def _does_not_fit(
    error: PlacementError, sizes: ModelSizes, hardware: Hardware, workload: Workload, taken: tuple[int, int]
) -> PlacementError:
    """Returns the error with changes, each of which was planned and fits."""
    ways = [what for what, change in _changes(sizes, hardware, workload, sum(taken)) if _fits(sizes, *change)]
    main = hardware.main
    fix = (
        f"Choose one of these changes, each of which was planned and fits: {'; or '.join(ways)}."
        if ways
        else "Use a smaller model."
    )
    return PlacementError(
        "The model does not fit this machine. Nothing was loaded.",
        expected=f"{error.expected or 'weights'}, and {taken[0]:,} B of KV cache and {taken[1]:,} B of "
        f"activations on {main}",
        found=f"{hardware.capacities()[main]:,} B on {main}",
        fix=fix,
    )


Change = tuple[str, tuple[Hardware, Workload]]


def _changes(sizes: ModelSizes, hardware: Hardware, workload: Workload, taken: int) -> list[Change]:
    """Returns changes that may help, smallest first; the caller drops those that do not."""
    found: list[Change] = []
    if hardware.disk is not None:
        found.append(("leave --disk out", (replace(hardware, disk=None), workload)))
    if workload.kv_dtype == "auto" and workload.kv_device is None:
        found.append(("--kv-cache-device disk", (hardware, replace(workload, kv_device="disk"))))
        found.append(("--kv-cache-dtype fp8", (hardware, replace(workload, kv_dtype="fp8"))))
    longest = min(workload.context, sizes.positions or workload.context)
    contexts = [*([longest] if longest < workload.context else []), *_halves(longest)]
    batches = _halves(workload.batch)
    tries: list[tuple[str, Callable[[int], tuple[Hardware, Workload]], list[int]]] = [
        ("--batch-size", lambda value: (hardware, replace(workload, batch=value)), batches),
        ("--max-model-len", lambda value: (hardware, replace(workload, context=value)), contexts),
    ]
    for option, make, values in tries:
        fitting = next((value for value in values if _fits(sizes, *make(value))), None)
        if fitting is not None:
            found.append((f"{option} {fitting}", make(fitting)))
    total = sum(unit.nbytes for unit in sizes.units) + taken
    more = [replace(hardware, cpu=need) for need in _memories(hardware.cpu, total)]
    enough = next((machine for machine in more if _fits(sizes, machine, workload)), None)
    if enough is not None:
        found.append((f"--cpu {enough.cpu}B", (enough, workload)))
    if hardware.gpus:
        bigger = [
            replace(hardware, gpus=(need, *hardware.gpus[1:])) for need in _memories(hardware.gpus[0], total)
        ]
        enough = next((machine for machine in bigger if _fits(sizes, machine, workload)), None)
        if enough is not None:
            found.append((f"--gpu {enough.gpus[0]}B", (enough, workload)))
    return found


def _fits(sizes: ModelSizes, hardware: Hardware, workload: Workload) -> bool:
    """True if a placement exists."""
    capacities = _capacities(sizes, hardware, workload)
    try:
        plan_devices(sizes.units, capacities, hardware.main)
    except PlacementError:
        return False
    return capacities[hardware.main] > 0


def _kv(sizes: ModelSizes, workload: Workload) -> tuple[int, int]:
    """Returns the bytes of the KV cache on its own device, and on the execution device."""
    arguments = sizes.kv, workload.batch, workload.context, sizes.dtype, workload.kv_dtype
    return (0, kv_nbytes(*arguments)) if workload.kv_device is None else offloaded_kv_nbytes(*arguments)


def _activations(sizes: ModelSizes, workload: Workload) -> int:
    return activation_nbytes(sizes.activations, workload.batch, workload.context, sizes.dtype)


def _capacities(sizes: ModelSizes, hardware: Hardware, workload: Workload) -> dict[str, int]:
    """Returns the bytes of each device that are left for weights and offload buffers."""
    capacities, (stored, held) = hardware.capacities(), _kv(sizes, workload)
    capacities[hardware.main] -= held + _activations(sizes, workload)
    if workload.kv_device == "cpu":
        capacities["cpu"] -= stored
    return capacities


def _halves(value: int) -> list[int]:
    """Returns all smaller values by repeated halving, the largest first."""
    found = []
    while value > 1:
        value //= 2
        found.append(value)
    return found


def _memories(least: int, most: int, steps: int = 48) -> list[int]:
    """Returns sizes between two limits in whole MiB, smallest first."""
    mib = 1 << 20
    span = max(most - least, 0)
    return [-(-(least + span * step // steps) // mib) * mib for step in range(1, steps + 1)]
