"""Device maps with whole dotted names.

The key `model.layers.1` covers `model.layers.1` and its submodules, never `model.layers.10`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from hfq.errors import PlacementError, nearest

__all__ = [
    "AUTOMATIC",
    "check_device",
    "check_present",
    "covering_device",
    "execution_device",
    "execution_devices",
    "execution_map",
    "leaf_map",
    "resolve_devices",
]

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that transformers infers."""


def resolve_devices(
    device_map: Mapping[str, Any] | None,
    names: Iterable[str],
    modules: Iterable[str],
    check: Callable[[Any, str], str] | None = None,
) -> dict[str, str]:
    """Returns the device of each tensor.

    The longest key that is the tensor's name or a dotted ancestor of it decides.

    Args:
        device_map: As given to `from_pretrained`, already inferred if it was automatic; None places
            everything on the CPU.
        names: Names of the model's tensors.
        modules: Names of the model's modules.
        check: Returns the canonical text of a value, given the value and its key; None for `check_device`,
            which checks the devices of this machine.

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
            "device_map contains keys that match no module. Nothing was loaded.",
            expected="names of modules",
            problems=[f"{key!r}.{nearest(key, known)}" for key in unknown],
            fix="Use full module names.",
        )
    resolved = {name: covering_device(name, devices) for name in names}
    uncovered = [name for name, device in resolved.items() if device is None]
    if uncovered:
        raise PlacementError(
            "device_map does not cover all tensors of the model. Nothing was loaded.",
            expected="a device for every tensor",
            problems=_largest_modules(uncovered, (name for name in resolved if resolved[name] is not None)),
            fix='Add these modules, or add a default: {"": "cpu"}.',
        )
    return {name: device for name, device in resolved.items() if device is not None}


def _largest_modules(uncovered: Iterable[str], covered: Iterable[str]) -> list[str]:
    """Returns the largest modules, or tensors, that hold the uncovered tensors alone."""
    partly = {parent for name in covered for parent in _ancestors(name)}
    return list(
        dict.fromkeys(
            next(part for part in [*_ancestors(name), name] if part not in partly) for name in uncovered
        )
    )


def _ancestors(name: str) -> list[str]:
    """Returns the dotted names above a name, the shortest first, without the root."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def check_device(value: Any, key: str = "") -> str:
    """Returns the canonical text of a value of a device map, such as `"disk"` or `"cuda:0"`.

    Raises:
        PlacementError: The value is no device, or a device that this machine does not have.
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
        where = f"[{key!r}]" if key else ""
        raise PlacementError(
            f"device_map{where} is not a device.{hint} Nothing was loaded.",
            found=repr(value),
            expected='"cpu", "disk", the number of a GPU, or a torch device',
            fix='Use "cpu", "disk", or a device such as "cuda:0".',
        )
    count = _count(device.type)
    if device.type in ("cuda", _accelerator()) and (device.index or 0) >= count:
        raise PlacementError(
            "device_map names an accelerator that this machine does not have. Nothing was loaded.",
            found=repr(value),
            expected=f"one of {count} {device.type} devices",
            fix='Use "cpu" or "disk", or check the driver.',
        )
    if device.type == "cpu":
        return "cpu"
    if device.type != "mps" and device.index is None:
        device = torch.device(device.type, 0)
    return str(device)


def check_present(devices: Iterable[str]) -> None:
    """Raises an error for a device of an accelerator that torch does not find.

    Raises:
        PlacementError: Names the first such device.
    """
    found = torch.accelerator.current_accelerator()
    for device in devices:
        kind = device.partition(":")[0]
        if kind not in ("cpu", "disk") and (found is None or found.type != kind):
            raise PlacementError(
                "device_map names an accelerator that this machine does not have. Nothing was loaded.",
                found=repr(device),
                expected='"cpu", "disk", or an accelerator that torch finds',
                fix='Use "cpu" or "disk", or check the driver.',
            )


def _accelerator() -> str:
    """Returns the device type of a bare number: the accelerator torch finds, else CUDA."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else "cuda"


def _count(kind: str) -> int:
    """Returns how many devices of a type torch finds."""
    return torch.accelerator.device_count() if kind == _accelerator() else 0


def execution_device(devices: Iterable[str]) -> str:
    """Returns the device where offloaded modules compute: the first accelerator, else the CPU."""
    return next((device for device in devices if device not in ("cpu", "disk")), "cpu")


def execution_map(device_map: Mapping[str, Any], devices: Mapping[str, str], main: str) -> dict[str, str]:
    """Returns the execution device of each key, for the matching rules of transformers.

    transformers matches the keys of a device map as unescaped regular expressions against the start of a name
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


def execution_devices(
    devices: Mapping[str, str], main: str, units: Iterable[tuple[str, Collection[str]]]
) -> dict[str, str]:
    """Returns the execution device of each tensor.

    A tensor on an accelerator computes there. An offloaded tensor computes on the accelerator of its unit. A
    unit that is wholly offloaded computes on the accelerator of the unit before it, so that activations
    change devices as rarely as possible.

    Args:
        devices: Device of each tensor.
        main: The execution device of the first units, if no tensor of theirs is on an accelerator.
        units: Names of the decoder layers, and of the leaf modules outside of them, in the order of the
            model, with the names of their tensors.

    Raises:
        PlacementError: The parts of a decoder layer are on several accelerators.
    """
    found: dict[str, str] = {}
    current = main
    for unit, names in units:
        own = sorted({devices[name] for name in names} - {"cpu", "disk"}) if main != "cpu" else []
        if len(own) > 1:
            raise PlacementError(
                "device_map divides a module that computes as a whole between accelerators. Nothing was "
                "loaded.",
                tensor=unit,
                expected="one accelerator, with cpu and disk",
                found=", ".join(own),
                fix=f'Pass {{"{unit}": "{own[0]}"}}.',
            )
        current = own[0] if own else current
        found |= dict.fromkeys(names, current)
    return found


def leaf_map(
    executes: Mapping[str, str], device_map: Mapping[str, str], main: str, modules: Iterable[str]
) -> dict[str, int]:
    """Returns the map of execution devices for accelerate, in which no key is above another.

    Devices are numbers.

    accelerate's hooks send everything below a key to its device, and do not undo it for a longer key
    (`attach_execution_device_hook`, accelerate 1.15). It takes the first of a set of devices for the key `""`
    (`dispatch_model`), so that the result depends on the hashes of texts.

    Args:
        executes: Execution device of each tensor.
        device_map: Execution device of each key of the user's map, for modules without tensors.
        main: The execution device of all others.
        modules: Names of all modules, parents before their children.
    """
    below: dict[str, set[str]] = {}
    for name, device in executes.items():
        for path in _ancestors(name):
            below.setdefault(path, set()).add(device)
    result: dict[str, str] = {}
    for path in modules:
        if path and not any(parent in result for parent in _ancestors(path)):
            found = below.get(path) or {covering_device(path, device_map) or main}
            if len(found) == 1:
                result[path] = next(iter(found))
    for name, device in executes.items():
        if not any(parent in result for parent in _ancestors(name)):
            result[name] = device
    return {name: int(device.partition(":")[2] or 0) for name, device in result.items()}


def covering_device(name: str, devices: Mapping[str, str]) -> str | None:
    """Returns the device of the longest key that is the name or a dotted ancestor of it."""
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
            )  # transformers looks up the matched text, which may be no key
    return device_map.get("", "cpu")
