"""Predicted times of a placement by the roofline model: the slowest resource decides.

Pure data. One step reads offloaded weights (from disk, or over the link to an accelerator) while it computes.
It would take the longer of the two times if they shared nothing (Williams et al., "Roofline: an insightful
visual performance model", 2009). They share cores and memory, so both slow down while they overlap, and the
offload buffer has a limit: see `pipeline`. Computation reads every weight once, at the rate of a product with
this kind of weight, or of memory. It reads the KV cache at the rate of memory. Each product, layer, onloaded
unit, and step has an additional fixed cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from hfq.placement.estimate.pipeline import Stage, pass_seconds
from hfq.placement.estimate.profile import Profile

__all__ = ["Prediction", "Work", "kv_seconds", "predict", "what_helps"]


@dataclass(frozen=True)
class Work:
    """Work of one step of a placed model, in bytes unless another unit is named.

    Attributes:
        weights: {kind of weight: (weights, bytes)} that a step multiplies by.
        streamed: Bytes read from disk per step.
        copied: Bytes copied from the host's memory to an accelerator per step.
        cache: Bytes read of the KV cache.
        rows: Rows of activations: the tokens that a step computes.
        layers: Number of layers.
        stored_nbytes: Bytes that a load reads into memory.
        is_cached: True if the bytes read from disk stay in the page cache between steps.
        is_on_cpu: True if the CPU computes.
        calls: {kind of weight: products} of a step.
        stages: (bytes, onloaded bytes) of each unit in the order in which units compute; empty if unknown.
        buffer: Bytes of onloaded units that memory may hold.
        gathered: Bytes that each rank gathers of ZeRO-3 shards per step; 0 without ZeRO-3.
        kv_moved: Bytes of an offloaded KV cache that a step reads.
        is_kv_on_disk: True if they are read from disk, and not copied from the host's memory.
        on_demand: Of `streamed`, the bytes of routed experts, whose reads the CPU waits for.
    """

    weights: Mapping[str, tuple[int, int]]
    streamed: int
    copied: int
    cache: int
    rows: int
    layers: int
    stored_nbytes: int
    is_cached: bool = False
    is_on_cpu: bool = True
    calls: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[tuple[int, int], ...] = ()
    buffer: int = 0
    gathered: int = 0
    kv_moved: int = 0
    is_kv_on_disk: bool = False
    on_demand: int = 0


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds, by cause.

    Attributes:
        terms: {term: seconds of a step, on its own}: `disk`, `link`, `weights`, `cache`, `layers`,
            `gathering`, `kv_reads`.
        step_seconds: Seconds of a step of one token per sequence.
        rows: Tokens of a step.
        load_seconds: Seconds of a load of files that are not in the page cache.
        dominant: Term that decides the step.
        source: Source of the rates.
        is_complete: False if the time of the host is unknown and decides: the bytes of the step take less
            than the layers of any model do.
    """

    terms: Mapping[str, float]
    step_seconds: float
    rows: int
    load_seconds: float
    dominant: str
    source: str
    is_complete: bool = True

    @property
    def known_seconds(self) -> float | None:
        """Seconds of a step; None if no rate is known, or if the prediction is not complete."""
        return self.step_seconds if self.step_seconds and self.is_complete else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all sequences of the batch; None if unknown."""
        return self.rows / self.known_seconds if self.known_seconds else None

    def to_dict(self) -> dict:
        """Returns the prediction as JSON-ready data, with None for times that are unknown."""
        known = {"step_seconds": self.known_seconds, "tokens_per_second": self.tokens_per_second}
        return asdict(self) | known


TERMS = {
    "disk": "reads from disk",
    "link": "copies over the link to the accelerator",
    "weights": "products with the weights",
    "cache": "reads of the KV cache",
    "layers": "the fixed cost of layers",
    "gathering": "gathers of ZeRO-3 shards",
    "kv_reads": "reads of the offloaded KV cache",
}
"""Label of each term of a prediction."""

_LEAST_LAYER_SECONDS = {"cpu": 1e-4, "accelerator": 1e-5}
"""Time that a decoder layer takes at least, by the device that computes.

On a CPU, Python calls dozens of operations; an accelerator that replays a graph starts several kernels.
"""

_COMPUTING, _MOVING = ("weights", "cache", "layers"), ("disk", "link")


def kv_seconds(work: Work, profile: Profile) -> float:
    """Returns the seconds of one read of an offloaded KV cache."""
    on_disk = work.kv_moved / profile.disk if work.is_kv_on_disk else 0.0
    link = None if work.is_on_cpu else profile.host_to_device
    return max(on_disk, work.kv_moved / link if link else 0.0)


def predict(work: Work, profile: Profile) -> Prediction:
    """Returns the predicted seconds of a load and of a step.

    Args:
        work: Work of the step and the load.
        profile: Rates of the machine; for work that gathers, including its rates under ZeRO-3.
    """
    memory = profile.memory if work.is_on_cpu else profile.device_memory
    terms = {
        "disk": work.streamed / (profile.page_cache if work.is_cached else profile.disk),
        "link": work.copied / profile.host_to_device if profile.host_to_device else 0.0,
        "weights": sum(
            _product_seconds(kind, *sizes, work, profile, memory) for kind, sizes in work.weights.items()
        ),
        "cache": work.cache / memory if memory else 0.0,
        "layers": profile.step_seconds
        + work.layers * profile.layer_seconds
        + _blocks(work) * profile.block_seconds,
    }
    if work.gathered and profile.zero3 is not None:
        terms |= {name: terms[name] * profile.zero3.slowdown for name in ("weights", "cache")}
        terms["layers"] = profile.zero3.step_seconds + work.layers * profile.zero3.layer_seconds
        terms["gathering"] = work.gathered / profile.zero3.gathering
    step = _step_seconds(terms, work, profile)
    if work.kv_moved:
        terms["kv_reads"] = kv_seconds(work, profile)
        step = max(step, max(terms[name] for name in _MOVING) + terms["kv_reads"])
    computing = {name: terms[name] for name in (*_COMPUTING, "gathering") if name in terms}
    moving = {name: terms[name] for name in (*_MOVING, "kv_reads") if name in terms}
    is_moving = max(moving.values()) > sum(computing.values())
    dominant = max(moving, key=moving.__getitem__) if is_moving else max(computing, key=computing.__getitem__)
    fixed, per_layer = profile.load_seconds
    load = work.stored_nbytes / profile.disk + fixed + per_layer * work.layers
    source = profile.source
    if not memory:
        source += "; the rate of the accelerator's memory is unknown and not counted"
    least = _LEAST_LAYER_SECONDS["cpu" if work.is_on_cpu else "accelerator"]
    is_complete = bool(terms["layers"]) or not step or step >= work.layers * least
    if not is_complete:
        source += (
            f"; the bytes of a step take {step * 1e3:.3g} ms, less than calling {work.layers} layers, which "
            "`hfq profile-machine` measures"
        )
    return Prediction(terms, step, work.rows, load, dominant, source, is_complete)


def _step_seconds(terms: Mapping[str, float], work: Work, profile: Profile) -> float:
    """Returns the seconds of computing, of gathers before it, and of reads.

    Reads of units overlap with computing. Those of routed experts are added, since the router comes first.
    Guesses of routers start them earlier, but cost time on the same cores.
    """
    computing, moving = sum(terms[name] for name in _COMPUTING), max(terms[name] for name in _MOVING)
    waiting = terms["disk"] * work.on_demand / work.streamed if work.on_demand and work.is_on_cpu else 0.0
    if not work.stages or not work.is_on_cpu or not moving:
        return max(computing + terms.get("gathering", 0.0), moving - waiting) + waiting
    if not _blocks(work):
        return computing + waiting
    blocks, whole = _blocks(work) * profile.block_seconds, sum(nbytes for nbytes, _ in work.stages) or 1
    each, spread = profile.block_seconds, computing - blocks
    stages = [
        Stage(nbytes / whole * spread + each * bool(streamed), streamed) for nbytes, streamed in work.stages
    ]
    speeds = profile.beside_cached if work.is_cached else profile.beside_disk
    return pass_seconds(stages, work.buffer, work.streamed / moving, speeds) + waiting


def _blocks(work: Work) -> int:
    """Returns the number of units onloaded to the CPU; 0 if the buffer keeps them all."""
    is_kept = sum(streamed for _, streamed in work.stages) <= work.buffer
    return 0 if is_kept or not work.is_on_cpu else sum(streamed > 0 for _, streamed in work.stages)


def _product_seconds(
    kind: str, weights: int, nbytes: int, work: Work, profile: Profile, memory: float | None
) -> float:
    """Returns the seconds of one pass over these weights.

    Uses the measured rate of their product, else the rate of memory.
    """
    rate = profile.product_rate(kind, work.rows) if work.is_on_cpu else None
    if rate is None:
        return nbytes / memory if memory else 0.0
    return weights / rate + work.calls.get(kind, 0) * profile.calls.get(kind, 0.0)


def what_helps(work: Work, profile: Profile) -> list[tuple[str, Prediction]]:
    """Returns (change, prediction with it) of each single change that helps, best first."""
    resident = replace(work, streamed=0, copied=0, stages=(), on_demand=0)
    changes = {
        "memory for all weights where they compute": (resident, profile),
        "a disk twice as fast": (work, replace(profile, disk=profile.disk * 2)),
        "a link twice as fast": (
            work,
            replace(profile, host_to_device=(profile.host_to_device or 0) * 2 or None),
        ),
        "twice the sequences in a batch": (_doubled(work), profile),
        "products and memory twice as fast": (work, _faster(profile)),
    }
    now = predict(work, profile).tokens_per_second or math.inf
    found = [(what, predict(*each)) for what, each in changes.items()]
    helping = [
        (what, prediction) for what, prediction in found if (prediction.tokens_per_second or 0.0) > now * 1.01
    ]
    return sorted(helping, key=lambda each: -(each[1].tokens_per_second or 0.0))


def _doubled(work: Work) -> Work:
    return replace(work, rows=work.rows * 2, cache=work.cache * 2, kv_moved=work.kv_moved * 2)


def _faster(profile: Profile) -> Profile:
    products = {
        kind: {rows: rate * 2 for rows, rate in rates.items()} for kind, rates in profile.products.items()
    }
    device = profile.device_memory * 2 if profile.device_memory else None
    return replace(profile, memory=profile.memory * 2, products=products, device_memory=device)
