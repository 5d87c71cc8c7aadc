"""What a model takes on a machine, and how fast it is there: bytes in each home, work of a step, prediction.
Pure data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hfq.errors import PlacementError
from hfq.placement.budget import Budget, Unit, buffer_nbytes, plan_devices
from hfq.placement.estimate.hardware import Hardware
from hfq.placement.estimate.kv_cache import Activations, KvLayer, activation_nbytes, kv_nbytes
from hfq.placement.estimate.profile import Profile
from hfq.placement.estimate.roofline import Prediction, Work, predict

__all__ = ["Estimate", "ModelSizes", "Workload", "estimate_placement", "list_stages"]

_SHARE_OF_MEMORY = 0.5
"""What is streamed is read through the page cache where it takes no more of the free memory
(`hfq.offload.byte_source`).
"""


@dataclass(frozen=True)
class Workload:
    """What the model is to do.

    Attributes:
        batch: Sequences at once.
        context: Tokens of each, those that are generated among them.
        kv_dtype: One of `hfq.placement.estimate.kv_cache.KV_DTYPES`.
    """

    batch: int = 1
    context: int = 2048
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class ModelSizes:
    """What a placement needs to know of a model.

    Attributes:
        units: The parts that have a home of their own, in the order in which they compute.
        kv: What each layer caches.
        activations: The sizes that decide what a forward holds.
        weights: {unit: {kind of weight: (weights, bytes)}} that a step multiplies by; of experts, those that
            are routed to.
        routed: The share of its experts that a token is routed to.
        dtype: The dtype that it computes in.
        layers: Its layers.
        calls: {kind of weight: products} of a step.
    """

    units: tuple[Unit, ...]
    kv: tuple[KvLayer, ...]
    activations: Activations
    weights: Mapping[str, tuple[int, int]]
    routed: float
    dtype: str
    layers: int
    calls: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """One placement of a model.

    Attributes:
        hardware: The machine.
        workload: What the model does there.
        budget: The home of every unit; its capacities are what is left beside the cache and the activations.
        buffer: The bytes of the ring, read-ahead included, on each device that has one.
        kv: The bytes of the KV cache.
        activations: The bytes of activations.
        work: What a step does.
        prediction: How long that takes.
    """

    hardware: Hardware
    workload: Workload
    budget: Budget
    buffer: Mapping[str, int]
    kv: int
    activations: int
    work: Work
    prediction: Prediction

    def devices(self, stored_nbytes: Mapping[str, int] | None = None) -> dict[str, dict[str, int]]:
        """{home: {part: bytes}}: `weights`, `buffer`, `experts` (their cache), `kv_cache`, `activations`.

        Args:
            stored_nbytes: The bytes of weights in each home, as the loader's own plan has them; None for the
                budget's.
        """
        budget, found = self.budget, {}
        weights = budget.stored_nbytes if stored_nbytes is None else stored_nbytes
        for device in dict.fromkeys((budget.main, *weights, *self.buffer)):
            is_main = device == budget.main
            found[device] = {
                "weights": weights.get(device, 0),
                "buffer": self.buffer.get(device, 0),
                "experts": budget.expert_cache_nbytes if is_main else 0,
                "kv_cache": self.kv if is_main else 0,
                "activations": self.activations if is_main else 0,
            }
        return found


def estimate_placement(
    sizes: ModelSizes,
    hardware: Hardware,
    workload: Workload,
    profile: Profile,
    free_memory: int | None = None,
    expert_cache_nbytes: int = 0,
) -> Estimate:
    """Places a model by a device map, on at most one accelerator, and predicts what that gives.

    Args:
        sizes: The model.
        hardware: The machine.
        workload: What the model does.
        profile: The machine's rates.
        free_memory: The host's memory that the page cache may take; None for what `hardware.cpu` leaves.
        expert_cache_nbytes: What the cache of routed experts takes where they rest elsewhere.

    Raises:
        PlacementError: It does not fit; `fix` names changes, each of which was found to fit.
    """
    kv, activations = _taken(sizes, workload)
    main, capacities = hardware.main, hardware.capacities()
    capacities[main] -= kv + activations
    try:
        if capacities[main] <= 0:
            raise PlacementError("The KV cache and the activations alone do not fit.", fix="-")
        budget = plan_devices(sizes.units, capacities, main, expert_cache_nbytes)
    except PlacementError as error:
        raise _does_not_fit(error, sizes, hardware, workload, (kv, activations)) from error
    buffers = _buffers(sizes.units, budget)
    work = _work(sizes, budget, hardware, workload, (kv, buffers.get(budget.main, 0)), free_memory)
    return Estimate(hardware, workload, budget, buffers, kv, activations, work, predict(work, profile))


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
    """(bytes that a step computes with, bytes that it streams of them) of each part, in the order in which
    they compute.

    Args:
        units: The parts of the model.
        devices: The home of each.
        main: Where they compute.
        routed: The share of its experts that a token is routed to.
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
    sizes: ModelSizes,
    budget: Budget,
    hardware: Hardware,
    workload: Workload,
    held: tuple[int, int],
    free_memory: int | None,
) -> Work:
    kv, buffer = held
    offloaded = [unit for unit in sizes.units if budget.devices[unit.name] != budget.main]
    on_disk = [unit for unit in offloaded if budget.devices[unit.name] == "disk"]
    streamed, copied = (_moved(units, sizes.routed, workload.batch) for units in (on_disk, offloaded))
    free = hardware.cpu - budget.taken("cpu") if free_memory is None else free_memory
    stored_nbytes = sum(nbytes for device, nbytes in budget.stored_nbytes.items() if device != "disk")
    is_on_cpu = budget.main == "cpu"
    return Work(
        sizes.weights,
        streamed,
        0 if is_on_cpu else copied,
        kv,
        workload.batch,
        sizes.layers,
        stored_nbytes,
        is_cached=streamed <= free * _SHARE_OF_MEMORY,
        is_on_cpu=is_on_cpu,
        calls=sizes.calls,
        stages=list_stages(sizes.units, budget.devices, budget.main, sizes.routed),
        buffer=buffer,
    )


def _moved(units: Sequence[Unit], routed: float, batch: int) -> int:
    """What a step moves of these units: blocks whole, of experts those that are routed to."""
    whole = sum(unit.unit_onloaded_nbytes for unit in units if unit.is_offloaded)
    experts = sum(unit.nbytes for unit in units if unit.kind == "experts")
    return whole + int(experts * min(1.0, routed * batch))


def _does_not_fit(
    error: PlacementError, sizes: ModelSizes, hardware: Hardware, workload: Workload, taken: tuple[int, int]
) -> PlacementError:
    """The error with ways out, each of which was planned and fits."""
    ways = [what for what, change in _changes(sizes, hardware, workload, sum(taken)) if _fits(sizes, *change)]
    main = hardware.main
    fix = (
        f"change one of these, each of which was planned and fits: {'; or '.join(ways)}"
        if ways
        else "use a smaller model"
    )
    return PlacementError(
        "The model does not fit this machine. Nothing was loaded.",
        expected=error.expected or "room for weights beside these",
        found=f"{hardware.capacities()[main]:,} B on {main}, of which KV cache {taken[0]:,} B and "
        f"activations {taken[1]:,} B",
        problems=[error.message],
        fix=fix,
    )


Change = tuple[str, tuple[Hardware, Workload]]


def _changes(sizes: ModelSizes, hardware: Hardware, workload: Workload, taken: int) -> list[Change]:
    """Changes that may help, smallest first. A change that does not is left out by who plans them."""
    found: list[Change] = []
    if hardware.disk is not None:
        found.append(("leave --disk out", (replace(hardware, disk=None), workload)))
    if workload.kv_dtype == "auto":
        found.append(("--kv-cache-dtype fp8", (hardware, replace(workload, kv_dtype="fp8"))))
    contexts = _halves(workload.context)
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
    """Whether a placement exists."""
    capacities = hardware.capacities()
    try:
        capacities[hardware.main] -= sum(_taken(sizes, workload))
        plan_devices(sizes.units, capacities, hardware.main)
    except PlacementError:
        return False
    return capacities[hardware.main] > 0


def _taken(sizes: ModelSizes, workload: Workload) -> tuple[int, int]:
    """The bytes of the KV cache, and of activations."""
    kv = kv_nbytes(sizes.kv, workload.batch, workload.context, sizes.dtype, workload.kv_dtype)
    return kv, activation_nbytes(sizes.activations, workload.batch, workload.context, sizes.dtype)


def _halves(value: int) -> list[int]:
    """All smaller values that halving gives, the largest first."""
    found = []
    while value > 1:
        value //= 2
        found.append(value)
    return found


def _memories(least: int, most: int, steps: int = 48) -> list[int]:
    """Sizes between two, smallest first, in whole MiB."""
    mib = 1 << 20
    span = max(most - least, 0)
    return [-(-(least + span * step // steps) // mib) * mib for step in range(1, steps + 1)]
