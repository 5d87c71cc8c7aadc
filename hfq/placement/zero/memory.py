"""Memory of a model under ZeRO: bytes per rank and node, for every stage and offload.

Pure data. With P trained parameters, N ranks, and K bytes of optimizer state for each parameter, mixed
precision takes on each device (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020, figure 1):

    stage 0   2 P + 2 P + K P            weights, gradients, and optimizer states on every rank
    stage 1   2 P + 2 P + K P / N        optimizer states sharded
    stage 2   2 P + (2 + K) P / N        gradients sharded, too
    stage 3   (2 + 2 + K) P / N          weights sharded, too

Frozen weights have neither gradients nor optimizer states. Under stage 3, a flat buffer of quantized weights
is sharded as bytes, viewed as elements of ZeRO's own dtype. Each tensor and each flat buffer is padded to
whole elements on every rank. Activations, gathered weights, communication buckets, and allocator slack are
not model states and not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hfq.errors import PlacementError, nearest

__all__ = [
    "DEVICES",
    "OPTIMIZERS",
    "STAGES",
    "ModelStates",
    "ZeroMemory",
    "ZeroSetup",
    "estimate_zero",
    "shard_numel",
]

ShardDevice = Literal["device", "cpu", "nvme"]
DEVICES: tuple[ShardDevice, ...] = ("device", "cpu", "nvme")
STAGES = (0, 1, 2, 3)

OPTIMIZERS: dict[str, int] = {"none": 0, "sgd": 4, "momentum": 8, "adam": 12, "adam8bit": 6}
"""Bytes of optimizer state per trained parameter: float32 master copy, and moments.

Moments are float32, or 8-bit for `adam8bit`.
"""

SMALLEST_SWAPPED = 1 << 20
"""Bytes of the smallest shard that DeepSpeed stores on NVMe.

DeepSpeed 0.19 keeps smaller shards in CPU memory (swap_tensor/utils.py).
"""

_DEFAULT_BUFFER = 100_000_000
"""Elements of one of DeepSpeed's buffers, unless it is sized after the tensors."""


@dataclass(frozen=True)
class ModelStates:
    """Weights that ZeRO has to place.

    Attributes:
        quantized: Bytes of the flat buffer of each quantized module.
        frozen: Elements of each frozen float tensor.
        trained: Elements of each trained tensor.
        itemsize: Bytes per element of ZeRO's dtype: 2 for bfloat16 and float16.
        is_sum: True if these are sums over a model whose tensors are unknown.
    """

    quantized: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()
    itemsize: int = 2
    is_sum: bool = False


_OPTIONS = {
    "stage": "--zero-stage",
    "ranks": "--num-processes",
    "ranks_per_node": "--num-machines",
    "optimizer": "--optimizer",
    "offload_param": "--offload-param-device",
    "offload_optimizer": "--offload-optimizer-device",
}
"""The option of `hfq plan` for each field of `ZeroSetup`, for messages."""


@dataclass(frozen=True)
class ZeroSetup:
    """Settings of a ZeRO run.

    Attributes:
        stage: 0 to 3.
        ranks: Number of all ranks.
        ranks_per_node: Number of ranks that share a node's memory and disk; None for all.
        optimizer: A key of `OPTIMIZERS`.
        gradient_nbytes: Bytes per element of a gradient.
        offload_param: Device of the weights: `none`, `cpu`, or `nvme`; stage 3 only.
        offload_optimizer: Device of the optimizer states: `none`, `cpu`, or `nvme`; stages 1 to 3. From stage
            2 on, gradients are then stored in CPU memory.
        buffer_count: Maximum number of buffers that swap weights in from NVMe, each as large as the largest
            shard there.
    """

    stage: int
    ranks: int = 1
    ranks_per_node: int | None = None
    optimizer: str = "adam"
    gradient_nbytes: int = 2
    offload_param: str = "none"
    offload_optimizer: str = "none"
    buffer_count: int = 5

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise _refused("stage", self.stage, "0, 1, 2, or 3", "Pass --zero-stage 3, or another of these.")
        if self.ranks < 1:
            raise _refused(
                "ranks",
                self.ranks,
                "at least 1",
                "Pass --num-processes 8, for example.",
            )
        if not 1 <= self.on_a_node <= self.ranks:
            raise _refused(
                "ranks_per_node",
                self.on_a_node,
                f"1 to {self.ranks}",
                "Pass the number of processes of one node.",
            )
        if self.optimizer not in OPTIMIZERS:
            fix = f"Choose one of these.{nearest(self.optimizer, OPTIMIZERS)}"
            raise _refused("optimizer", self.optimizer, ", ".join(OPTIMIZERS), fix)
        for name, least in (("offload_param", 3), ("offload_optimizer", 1)):
            device = getattr(self, name)
            if device not in ("none", "cpu", "nvme"):
                raise _refused(name, device, "none, cpu, or nvme", "Use one of these values.")
            if device != "none" and self.stage < least:
                fix = f"Pass --zero-stage {least}, or omit {_OPTIONS[name]}."
                stage = f"--zero-stage {self.stage}"
                raise _refused(name, device, f"--zero-stage {least} or more", fix, found=stage)

    @property
    def on_a_node(self) -> int:
        """Number of ranks on one node."""
        return self.ranks if self.ranks_per_node is None else self.ranks_per_node


@dataclass(frozen=True)
class ZeroMemory:
    """Memory of one rank.

    Attributes:
        setup: Settings of the run.
        parts: Bytes of each part (`packed weights`, `frozen weights`, `trained weights`, `gradients`,
            `optimizer states`, `swap buffers`) on each device that it uses, on the fullest rank.
        largest_row_nbytes: Least bytes that stage 3 gathers on the device while it computes: its largest
            tensor or flat buffer. 0 if nothing is gathered, and if tensors are unknown.
    """

    setup: ZeroSetup
    parts: Mapping[str, Mapping[ShardDevice, int]]
    largest_row_nbytes: int

    def per_rank(self) -> dict[ShardDevice, int]:
        """Returns the bytes of one rank on each device."""
        return {device: sum(devices.get(device, 0) for devices in self.parts.values()) for device in DEVICES}

    def per_node(self) -> dict[ShardDevice, int]:
        """Returns the bytes of all ranks of one node on each device; `device` is all its devices."""
        return {device: nbytes * self.setup.on_a_node for device, nbytes in self.per_rank().items()}

    def to_dict(self) -> dict:
        """Returns the estimate as JSON-ready data."""
        return {
            "stage": self.setup.stage,
            "per_rank": self.per_rank(),
            "per_node": self.per_node(),
            "parts_per_rank": {name: dict(devices) for name, devices in self.parts.items()},
            "largest_row_nbytes": self.largest_row_nbytes,
        }


def shard_numel(nbytes: int, ranks: int, itemsize: int = 2) -> int:
    """Returns the elements of ZeRO's dtype in each rank's shard of `nbytes` bytes.

    The flat buffer is padded to a multiple of ranks × itemsize.
    """
    return -(-nbytes // (ranks * itemsize))


def estimate_zero(states: ModelStates, setup: ZeroSetup) -> ZeroMemory:
    """Returns the bytes that each rank holds of a model's states.

    Args:
        states: The model's weights.
        setup: Settings of the run.

    Raises:
        PlacementError: Weights are trained, but there is no optimizer.
    """
    if setup.optimizer == "none" and states.trained:
        raise _refused(
            "optimizer", "none", "an optimizer for trained weights", "Pass an optimizer, or train nothing."
        )
    shards = setup.ranks if setup.stage == 3 else 1
    frozen = [numel * states.itemsize for numel in states.frozen]
    trained = [numel * states.itemsize for numel in states.trained]
    groups = {"quantized weights": states.quantized, "frozen weights": frozen, "trained weights": trained}
    parts: dict[str, dict[ShardDevice, int]] = {}
    swapped: list[int] = []
    for name, rows in groups.items():
        held = [shard_numel(nbytes, shards, states.itemsize) * states.itemsize for nbytes in rows]
        parts[name] = _rest(held, setup.offload_param)
        swapped += [nbytes for nbytes in held if setup.offload_param == "nvme" and nbytes >= SMALLEST_SWAPPED]
    gradients, masters = _trained_shards(states, setup)
    with_optimizer = setup.stage >= 2 and setup.offload_optimizer != "none"
    parts["gradients"] = _rest([gradients * setup.gradient_nbytes], "cpu" if with_optimizer else "none")
    states_device = (
        "cpu"
        if masters * 4 < SMALLEST_SWAPPED and setup.offload_optimizer == "nvme"
        else setup.offload_optimizer
    )
    parts["optimizer states"] = _rest([masters * OPTIMIZERS[setup.optimizer]], states_device, smallest=0)
    parts["swap buffers"] = _rest([_buffers(swapped, states, setup.buffer_count)], "cpu")
    gathers = setup.stage == 3 and not states.is_sum
    gathered = max((*states.quantized, *frozen, *trained), default=0) if gathers else 0
    return ZeroMemory(setup, {name: devices for name, devices in parts.items() if devices}, gathered)


def _trained_shards(states: ModelStates, setup: ZeroSetup) -> tuple[int, int]:
    """Returns the elements of gradients, and of optimizer states, that a rank holds.

    They are flat in stages 1 and 2, and per tensor in stage 3.
    """
    total = sum(states.trained)
    if setup.stage == 3:
        sharded = sum(shard_numel(numel, setup.ranks, 1) for numel in states.trained)
        return sharded, sharded
    sharded = shard_numel(total, setup.ranks, 1)
    return (sharded if setup.stage == 2 else total), (sharded if setup.stage >= 1 else total)


def _buffers(swapped: list[int], states: ModelStates, count: int) -> int:
    """Returns the bytes of the swap buffers for these shards."""
    largest = max(swapped, default=0)
    if states.is_sum:
        return count * min(largest, _DEFAULT_BUFFER * states.itemsize)
    return min(count, len(swapped)) * largest


def _rest(shards: Iterable[int], offload: str, smallest: int = SMALLEST_SWAPPED) -> dict[ShardDevice, int]:
    """Returns the bytes of these shards on each device.

    Shards too small for NVMe stay in CPU memory.
    """
    devices: dict[ShardDevice, int] = {}
    for nbytes in shards:
        device: ShardDevice = "device"
        if offload != "none":
            device = "nvme" if offload == "nvme" and nbytes >= smallest else "cpu"
        if nbytes:
            devices[device] = devices.get(device, 0) + nbytes
    return devices


def _refused(name: str, value: object, expected: str, fix: str, found: str | None = None) -> PlacementError:
    return PlacementError(
        f"{_OPTIONS[name]} {value} is not valid.",
        expected=expected,
        found=value if found is None else found,
        fix=fix,
    )
