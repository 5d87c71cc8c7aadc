"""Device maps with whole dotted names.

The key `model.layers.1` covers `model.layers.1` and its submodules, never `model.layers.10`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from hfq.errors import PlacementError, nearest
from hfq.placement.accelerators import free_nbytes, list_accelerators

__all__ = [
    "AUTOMATIC",
    "absent_accelerator",
    "ancestors",
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
    if check is None:
        _check_one_kind(device_map.values())
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
    partly = {parent for name in covered for parent in ancestors(name)}
    return list(
        dict.fromkeys(
            next(part for part in [*ancestors(name), name] if part not in partly) for name in uncovered
        )
    )


def ancestors(name: str) -> list[str]:
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
    kind = _kind_of_numbers()
    try:
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        device = torch.device(kind, value) if is_number else torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        device = None
    if device is None or device.type == "meta" or isinstance(value, bool):
        hint = nearest(value, ["cpu", "disk", kind, *AUTOMATIC]) if isinstance(value, str) else ""
        where = f"[{key!r}]" if key else f"={value!r}"
        raise PlacementError(
            f"device_map{where} is not a device.{hint} Nothing was loaded.",
            found=repr(value),
            expected='"cpu", "disk", the number of an accelerator, or a torch device',
            fix=f'Use "cpu", "disk", or a device such as "{kind}:0".',
        )
    count = torch.accelerator.device_count() if device.type == _kind_found() else 0
    if device.type in ("cuda", kind) and (device.index or 0) >= count:
        raise absent_accelerator(value)
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
    for device in devices:
        if device not in ("cpu", "disk") and device.partition(":")[0] != _kind_found():
            raise absent_accelerator(device)


def absent_accelerator(value: Any, what: str = "device_map") -> PlacementError:
    """Returns the error for an accelerator that torch does not find.

    Args:
        value: The device, as given.
        what: The argument that names it.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    hides = "" if hidden is None else f" CUDA_VISIBLE_DEVICES={hidden!r} hides other devices."
    return PlacementError(
        f"{what} names an accelerator that this machine does not have. Nothing was loaded.",
        found=repr(value),
        expected=_devices_here(),
        fix=f"Use {_choices_here(is_number=what != 'device_map')}.{hides}",
    )


def _devices_here() -> str:
    """Returns the devices of this machine, accelerators with their free bytes."""
    sizes = ((device, free_nbytes(device)) for device in list_accelerators())
    present = [device if free is None else f"{device} ({free:,} B free)" for device, free in sizes]
    return ", ".join(["cpu", "disk", *present]) + ("" if present else "; torch finds no accelerator")


def _choices_here(is_number: bool = False) -> str:
    """Returns the devices of this machine as written in Python, accelerators as text or number."""
    found = list_accelerators()
    own = map(str, range(len(found))) if is_number else (f'"{device}"' for device in found)
    return " or ".join(['"cpu"', '"disk"', *own])


def _check_one_kind(values: Iterable[Any]) -> None:
    """Checks that a device map names accelerators of one kind, as torch uses in a process.

    Raises:
        PlacementError: It names several.
    """
    kinds: dict[str, str] = {}
    for value in values:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        kind = _kind_of_numbers() if is_number else str(value).partition(":")[0]
        if kind not in ("cpu", "disk", "meta"):
            kinds.setdefault(kind, repr(value) if is_number else f'"{value}"')
    if len(kinds) < 2 or not all(map(_is_kind, kinds)):
        return
    raise PlacementError(
        "device_map names accelerators of several kinds. Nothing was loaded.",
        found=" and ".join(kinds.values()),
        expected=_devices_here(),
        fix=f"Use {_choices_here()}.",
    )


def _is_kind(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _kind_found() -> str | None:
    """Returns the device type of the accelerator that torch is built for; None if there is none."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def _kind_of_numbers() -> str:
    """Returns the device type of a bare number: that of the accelerator, else CUDA."""
    return _kind_found() or "cuda"


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
    match = _as_patterns(result)
    for name, device in executes.items():
        for key in (name.rpartition(".")[0], name):
            if match(name) != device and key not in result:
                result[key] = device
                match = _as_patterns(result)
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
                fix=f'Pass {{"{unit}": "{own[0]}"}}, and remove the longer keys, which begin with "{unit}.".',
            )
        current = own[0] if own else current
        found |= dict.fromkeys(names, current)
    return found


def leaf_map(
    executes: Mapping[str, str],
    device_map: Mapping[str, str],
    main: str,
    modules: Iterable[str],
    units: Iterable[str] = (),
) -> dict[str, int]:
    """Returns the map of execution devices for accelerate, in which no key is above another.

    Devices are numbers. Each unit has a key of its own: below a key, accelerate's hooks leave out modules
    without tensors, such as offloaded layers, and their inputs would stay on another device.

    accelerate's hooks send everything below a key to its device, and do not undo it for a longer key
    (`attach_execution_device_hook`, accelerate 1.15). It takes the first of a set of devices for the key `""`
    (`dispatch_model`), so that the result depends on the hashes of texts.

    Args:
        executes: Execution device of each tensor.
        device_map: Execution device of each key of the user's map, for modules without tensors.
        main: The execution device of all others.
        modules: Names of all modules, parents before their children.
        units: Names of the decoder layers, and of the leaf modules outside of them.
    """
    divided = {parent for unit in units for parent in ancestors(unit)}
    below: dict[str, set[str]] = {}
    for name, device in executes.items():
        for path in ancestors(name):
            below.setdefault(path, set()).add(device)
    result: dict[str, str] = {}
    for path in modules:
        if path and path not in divided and not any(parent in result for parent in ancestors(path)):
            found = below.get(path) or {covering_device(path, device_map) or main}
            if len(found) == 1:
                result[path] = next(iter(found))
    for name, device in executes.items():
        if not any(parent in result for parent in ancestors(name)):
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


def _as_patterns(device_map: Mapping[str, str]) -> Callable[[str], str | None]:
    """Returns the function by which transformers looks up the device of a name in a map."""
    keys = sorted(device_map, key=lambda key: (key.count("."), len(key)), reverse=True)
    # one pattern for names of modules, which have no group or flag
    is_plain = all(re.fullmatch(r"[\w.]*", key) for key in keys)
    patterns = ["|".join(keys)] if keys and is_plain else keys

    def match(name: str) -> str | None:
        for pattern in patterns:
            found = re.match(pattern, name)
            if found:
                # transformers looks up the matched text, which may be no key
                return device_map.get(found.group())
        return device_map.get("", "cpu")

    return match
