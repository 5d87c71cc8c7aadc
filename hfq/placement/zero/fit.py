"""Inference under ZeRO-3: the fastest device for shards that fits each rank and node.

Pure data.
"""

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
    """Memory of each rank.

    Attributes:
        memory: Shards, and the buffers that swap them in.
        parts: {part: {device: bytes}} on one rank: those of `memory`, and the additions of a forward pass on
            the device.
        gathered: Bytes of weights that a forward pass gathers on every rank.
        ranks_on_cpu: True if ranks compute on CPUs, so that their device is the node's memory.
    """

    memory: ZeroMemory
    parts: Mapping[str, Mapping[ShardDevice, int]]
    gathered: int
    ranks_on_cpu: bool

    def per_rank(self) -> dict[ShardDevice, int]:
        """Returns the bytes of one rank on each device."""
        return {device: sum(devices.get(device, 0) for devices in self.parts.values()) for device in DEVICES}

    def to_dict(self) -> dict:
        """Returns the fit as JSON-ready data."""
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
    """Places shards on the devices, else in CPU memory, else on NVMe: the first that fits.

    Args:
        states: The model's weights.
        sizes: Sizes of KV cache and activations.
        hardware: One node; without accelerators, ranks compute on its CPU.
        workload: Workload of each rank; its batch size is that of one rank.
        ranks: Number of all ranks.
        ranks_per_node: Number of ranks on one node; None for all.
        has_nvme: True if shards may be stored on NVMe.

    Raises:
        PlacementError: None fits, or a node has fewer accelerators than ranks.
    """
    on_a_node = ZeroSetup(3, ranks, ranks_per_node, "none").on_a_node
    if hardware.gpus and len(hardware.gpus) < on_a_node:
        raise PlacementError(
            "A node has fewer accelerators than ranks. Nothing was loaded.",
            expected=f"{on_a_node}",
            found=f"{len(hardware.gpus)}",
            fix=f"Pass --gpu {hardware.gpus[0]}B×{on_a_node}, or a smaller --num-processes.",
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
        tried.append(f"--offload-param-device {offload}: {lacking}")
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
        expected="enough memory on each rank and node",
        problems=tried,
        found=f"{len(hardware.gpus)} accelerators and {hardware.cpu:,} B of CPU memory on a node",
        fix=f"Pass {' and '.join(ways)}"
        + ("." if has_nvme else ", or --nvme-path FOLDER, or a larger --num-processes."),
    )


def gathering_work(fit: ZeroFit, sizes: ModelSizes, workload: Workload) -> Work:
    """Returns the work of a step of each rank.

    Args:
        fit: Memory of the ranks.
        sizes: The model.
        workload: Workload of each rank.
    """
    stored_nbytes = sum(nbytes for devices in fit.memory.parts.values() for nbytes in devices.values())
    kv = kv_nbytes(sizes.kv, workload.batch, workload.context, sizes.dtype, workload.kv_dtype)
    return Work(
        weights=sizes.weights,
        streamed=0,
        copied=0,
        cache=kv,
        rows=workload.batch,
        layers=sizes.layers,
        stored_nbytes=stored_nbytes,
        is_on_cpu=fit.ranks_on_cpu,
        calls=sizes.calls,
        gathered=fit.gathered,
    )


def predict_zero3(fit: ZeroFit, sizes: ModelSizes, workload: Workload, profile: Profile) -> Prediction | str:
    """Predicts the seconds of a step on every rank, or returns the reason why it cannot.

    Args:
        fit: Memory of the ranks.
        sizes: The model.
        workload: Workload of each rank.
        profile: Rates of the machine.
    """
    setup, rates = fit.memory.setup, profile.zero3
    if rates is None:
        return (
            f"gathers were not measured; run `hfq profile-machine --num-processes {setup.ranks}` on "
            "this machine"
        )
    if setup.offload_param != "none":
        return f"shards are stored on {setup.offload_param}, and the cost of onloading them was not measured"
    if (rates.ranks, rates.ranks) != (setup.ranks, setup.on_a_node):
        return (
            f"the profile measured {rates.ranks} ranks on one machine, not {setup.ranks} with "
            f"{setup.on_a_node} on each node"
        )
    if (rates.device == "cpu") != fit.ranks_on_cpu:
        return f"the profile measured ranks on {rates.device}"
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
    """Returns the shortage in words; empty if all fits."""
    held = fit.per_rank()
    if hardware.gpus and held["device"] > min(hardware.gpus):
        return f"{held['device']:,} B on a device of {min(hardware.gpus):,} B"
    node = (held["cpu"] + (0 if hardware.gpus else held["device"])) * on_a_node
    return f"{node:,} B in CPU memory of {hardware.cpu:,} B" if node > hardware.cpu else ""
