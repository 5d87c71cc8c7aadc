"""Device maps by whole dotted names: `model.layers.1` takes `model.layers.1` and what is below it, never
`model.layers.10`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hfq.errors import PlacementError, nearest

__all__ = [
    "AUTOMATIC",
    "check_device",
    "check_present",
    "execution_device",
    "execution_map",
    "resolve_devices",
]

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
"""The device maps that transformers infers."""


def resolve_devices(
    device_map: Mapping[str, Any] | None,
    names: Iterable[str],
    modules: Iterable[str],
    check: Callable[[Any, str], str] | None = None,
) -> dict[str, str]:
    """The home of each tensor: the value of the longest key that is the tensor's name or a dotted ancestor of
    it.

    Args:
        device_map: As given to `from_pretrained`, already inferred if it was automatic; None puts everything
            on the CPU.
        names: The model's tensors by their names in the model.
        modules: The model's modules.
        check: Gives the canonical text of a value, by its key; None for `check_device`, which knows the
            devices of this machine.

    Returns:
        name → `"cpu"`, `"disk"`, or a device such as `"cuda:0"`.

    Raises:
        PlacementError: A key is no module or tensor of the model, a value is no device, or a tensor is not
            covered.
    """
    if device_map is None:
        return dict.fromkeys(names, "cpu")
    names, known = list(names), {"", *modules}
    known.update(names)
    devices = {key: (check or check_device)(value, key) for key, value in device_map.items()}
    unknown = [str(key) for key in devices if key not in known]
    if unknown:
        raise PlacementError(
            "device_map has a key that matches nothing in the model. Nothing was loaded.",
            expected="names of modules",
            problems=[f"{key!r}.{nearest(key, known)}" for key in unknown],
            fix="correct these keys",
        )
    resolved = {name: _device(name, devices) for name in names}
    uncovered = [name for name, device in resolved.items() if device is None]
    if uncovered:
        raise PlacementError(
            "device_map leaves a part of the model out. Nothing was loaded.",
            expected="a home for every tensor",
            problems=uncovered,
            fix='add these modules, or a default: {"": "cpu", …}',
        )
    return {name: device for name, device in resolved.items() if device is not None}


def check_device(value: Any, key: str = "") -> str:
    """The canonical text of a device_map's value: `"disk"`, `"cpu"`, `"cuda:0"`, ….

    Raises:
        PlacementError: It is no device, or one that this machine does not have.
    """
    if value == "disk":
        return "disk"
    choices = ["cpu", "disk", "cuda", *AUTOMATIC]
    try:
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        device = torch.device(_accelerator(), value) if is_number else torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        device = None
    if device is None or device.type == "meta" or isinstance(value, bool):
        hint = nearest(value, choices) if isinstance(value, str) else ""
        where = f" for {key!r}" if key else ""
        raise PlacementError(
            f"device_map names no device{where}.{hint} Nothing was loaded.",
            found=repr(value),
            expected='"cpu", "disk", the number of a GPU, or a torch device',
            fix="correct this value",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise PlacementError(
            "device_map names a GPU that this machine does not have. Nothing was loaded.",
            found=repr(value),
            expected=f"one of {torch.cuda.device_count()} CUDA devices",
            fix='use "cpu" or "disk", or check the driver',
        )
    if device.type == "cpu":
        return "cpu"
    if device.type != "mps" and device.index is None:
        device = torch.device(device.type, 0)
    return str(device)


def check_present(devices: Iterable[str]) -> None:
    """Refuses homes on an accelerator that torch does not find.

    Raises:
        PlacementError: Names the first such home.
    """
    found = torch.accelerator.current_accelerator()
    for device in devices:
        kind = device.partition(":")[0]
        if kind not in ("cpu", "disk") and (found is None or found.type != kind):
            raise PlacementError(
                "device_map names an accelerator that this machine does not have. Nothing was loaded.",
                found=repr(device),
                expected='"cpu", "disk", or an accelerator that torch finds',
                fix='use "cpu" or "disk", or check the driver',
            )


def _accelerator() -> str:
    """What a bare number means: the accelerator torch finds, or CUDA where there is none."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else "cuda"


def execution_device(devices: Iterable[str]) -> str:
    """Where offloaded modules compute: the first accelerator that is someone's home, else the CPU."""
    return next((device for device in devices if device not in ("cpu", "disk")), "cpu")


def execution_map(device_map: Mapping[str, Any], devices: Mapping[str, str], main: str) -> dict[str, str]:
    """The device each part computes on, such that transformers' own matching reads it as hfq does.

    transformers matches the keys of a device map as unescaped regular expressions against the front of a name
    (`expand_device_map`, transformers 5.17 to 5.23). Where that would misplace a tensor, its own name is
    added.
    """
    executes = {name: main if device in ("cpu", "disk") else device for name, device in devices.items()}
    result = {
        key: main if str(value) in ("cpu", "disk") else check_device(value)
        for key, value in device_map.items()
    }
    for name, device in executes.items():
        module = name.rpartition(".")[0]
        if _matched_as_regex(name, result) != device and module not in result:
            result[module] = device
        if _matched_as_regex(name, result) != device:
            result[name] = device
    return result


def _device(name: str, devices: Mapping[str, str]) -> str | None:
    key = name
    while True:
        if key in devices:
            return devices[key]
        if not key:
            return None
        key = key.rpartition(".")[0]


def _matched_as_regex(name: str, device_map: Mapping[str, str]) -> str | None:
    keys = sorted(device_map, key=lambda key: (key.count("."), len(key)), reverse=True)
    for key in keys:
        match = re.match(key, name)
        if match:
            return device_map.get(
                match.group()
            )  # transformers looks up what was matched, which may be no key
    return device_map.get("", "cpu")
