"""Inference under ZeRO-3: the nearest home of the shards that fits each rank and node. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfq.errors import PlacementError
from hfq.placement.estimate.estimate import ModelSizes, Workload
from hfq.placement.estimate.hardware import Hardware
from hfq.placement.estimate.kv_cache import activation_nbytes, kv_nbytes
from hfq.placement.estimate.profile import Profile
from hfq.placement.estimate.roofline import Prediction, Work, predict
from hfq.placement.launch_configs import LIVE_ELEMENTS
from hfq.placement.zero.memory import DEVICES, ModelStates, ShardDevice, ZeroMemory, ZeroSetup, estimate_zero

__all__ = ["ZeroFit", "fit_zero3", "gathering_work", "predict_zero3"]


@dataclass(frozen=True)
class ZeroFit:
    """What each rank holds.

    Attributes:
        memory: The shards and the buffers that swap them in.
        parts: {part: {home: bytes}} on one rank: those of `memory`, and what a forward adds on the device.
        gathered: The bytes of weights that a forward gathers on every rank.
        ranks_on_cpu: Whether ranks compute on CPUs, so that their device is the node's memory.
    """

    memory: ZeroMemory
    parts: Mapping[str, Mapping[ShardDevice, int]]
    gathered: int
    ranks_on_cpu: bool

    def per_rank(self) -> dict[ShardDevice, int]:
        """The bytes of one rank in each home."""
        return {device: sum(devices.get(device, 0) for devices in self.parts.values()) for device in DEVICES}

    def to_dict(self) -> dict:
        """The fit as JSON-ready data."""
        setup = self.memory.setup
        return {
            "num_processes": setup.ranks,
            "ranks_per_node": setup.on_a_node,
            "offload_param": setup.offload_param,
            "per_rank": self.per_rank(),
            "parts_per_rank": {name: dict(devices) for name, devices in self.parts.items()},
            "gathered_per_forward_nbytes": self.gathered,
            "ranks_on_cpu": self.ranks_on_cpu,
        }


def fit_zero3(
    states: ModelStates,
    sizes: ModelSizes,
    hardware: Hardware,
    workload: Workload,
    ranks: int,
    ranks_per_node: int | None = None,
    has_nvme: bool = False,
) -> ZeroFit:
    """Puts shards on the devices, else in CPU memory, else on NVMe: the first that fits.

    Args:
        states: The model's weights.
        sizes: What a forward adds.
        hardware: One node; without accelerators, ranks compute on its CPU.
        workload: What each rank does: batch is that of one rank.
        ranks: All ranks.
        ranks_per_node: Those of one node; None for all.
        has_nvme: Whether shards may rest on NVMe.

    Raises:
        PlacementError: None fits, or there are fewer accelerators than ranks on a node.
    """
    on_a_node = ZeroSetup(3, ranks, ranks_per_node, "none").on_a_node
    if hardware.gpus and len(hardware.gpus) < on_a_node:
        raise PlacementError(
            "There are fewer accelerators than ranks on a node.",
            expected=f"{on_a_node}",
            found=f"{len(hardware.gpus)}",
            fix=f"pass --gpu {hardware.gpus[0]}B×{on_a_node}, or fewer --num-processes",
        )
    tried = []
    for offload in ("none", "cpu", *(["nvme"] if has_nvme else [])):
        fit = _fit(
            states,
            sizes,
            workload,
            ZeroSetup(3, ranks, ranks_per_node, "none", offload_param=offload),
            hardware,
        )
        lacking = _lacking(fit, hardware, on_a_node)
        if not lacking:
            return fit
        tried.append(f"offload_param {offload}: {lacking}")
    least = fit.per_rank()
    node = (least["cpu"] + (0 if hardware.gpus else least["device"])) * on_a_node
    ways = [f"--cpu {node}B"] if node > hardware.cpu else []
    ways += (
        [f"--gpu {least['device']}B×{on_a_node}"]
        if hardware.gpus and least["device"] > min(hardware.gpus)
        else []
    )
    raise PlacementError(
        "The model does not fit under ZeRO-3. Nothing was loaded.",
        expected="room on each rank and node",
        problems=tried,
        found=f"{len(hardware.gpus)} accelerators and {hardware.cpu:,} B of CPU memory on a node",
        fix=f"pass {' and '.join(ways)}"
        + ("" if has_nvme else ", or --nvme-path FOLDER, or more --num-processes"),
    )


def gathering_work(fit: ZeroFit, sizes: ModelSizes, workload: Workload) -> Work:
    """What a step of each rank does.

    Args:
        fit: What the ranks hold.
        sizes: The model.
        workload: What each rank does.
    """
    resting = sum(nbytes for devices in fit.memory.parts.values() for nbytes in devices.values())
    kv = kv_nbytes(sizes.kv, workload.batch, workload.context, sizes.dtype, workload.kv_dtype)
    return Work(
        sizes.weights,
        0,
        0,
        kv,
        workload.batch,
        sizes.layers,
        resting,
        is_on_cpu=fit.ranks_on_cpu,
        calls=sizes.calls,
        gathered=fit.gathered,
    )


def predict_zero3(fit: ZeroFit, sizes: ModelSizes, workload: Workload, profile: Profile) -> Prediction | str:
    """How long a step takes on every rank, or why that is not predicted.

    Args:
        fit: What the ranks hold.
        sizes: The model.
        workload: What each rank does.
        profile: The machine's rates.
    """
    setup, rates = fit.memory.setup, profile.zero3
    if rates is None:
        return (
            f"gathers were not measured; `hfq profile-machine --num-processes {setup.ranks}` does, on "
            "this machine"
        )
    if setup.offload_param != "none":
        return f"shards rest on {setup.offload_param}, and what bringing them in costs was not measured"
    if (rates.ranks, rates.ranks) != (setup.ranks, setup.on_a_node):
        return (
            f"{rates.ranks} ranks of one machine were measured, and not {setup.ranks} with "
            f"{setup.on_a_node} on each node"
        )
    if (rates.device == "cpu") != fit.ranks_on_cpu:
        return f"ranks were measured on {rates.device}"
    return predict(gathering_work(fit, sizes, workload), profile)


def _fit(
    states: ModelStates, sizes: ModelSizes, workload: Workload, setup: ZeroSetup, hardware: Hardware
) -> ZeroFit:
    memory = estimate_zero(states, setup)
    whole = sum(states.quantized) + sum(states.frozen) * states.itemsize
    kv = kv_nbytes(sizes.kv, workload.batch, workload.context, sizes.dtype, workload.kv_dtype)
    adding = {
        "gathered weights, at most": min(whole, LIVE_ELEMENTS * states.itemsize),
        "KV cache": kv,
        "activations": activation_nbytes(sizes.activations, workload.batch, workload.context, sizes.dtype),
    }
    parts: dict[str, Mapping[ShardDevice, int]] = dict(memory.parts)
    parts |= {name: {"device": nbytes} for name, nbytes in adding.items()}
    return ZeroFit(memory, parts, whole, not hardware.gpus)


def _lacking(fit: ZeroFit, hardware: Hardware, on_a_node: int) -> str:
    """What there is too little of; nothing where all fits."""
    held = fit.per_rank()
    if hardware.gpus and held["device"] > min(hardware.gpus):
        return f"{held['device']:,} B on a device of {min(hardware.gpus):,} B"
    node = (held["cpu"] + (0 if hardware.gpus else held["device"])) * on_a_node
    return f"{node:,} B in CPU memory of {hardware.cpu:,} B" if node > hardware.cpu else ""
