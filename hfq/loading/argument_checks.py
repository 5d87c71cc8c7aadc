"""Checks of arguments and local folders before transformers opens a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.headers_only import check_has_weights
from hfq.checkpoint.index import split_gguf_path
from hfq.checkpoint.loadable import open_loadable
from hfq.errors import CheckpointError, PlacementError, SetupError, nearest, raise_first
from hfq.loading.context import load_context
from hfq.placement.accelerators import list_accelerators
from hfq.placement.device_map import AUTOMATIC, absent_accelerator, check_device

__all__ = ["check_arguments", "open_local", "take_gguf_file"]

_UNSUPPORTED = {
    "state_dict": "Pass the folder of the checkpoint instead.",
    "device_mesh": "Leave it out. transformers creates the mesh for tp_plan.",
    "load_in_4bit": "Leave it out. HfqConfig(quantize_weights=METHOD) quantizes on load.",
    "load_in_8bit": "Leave it out. HfqConfig(quantize_weights=METHOD) quantizes on load.",
}
_DTYPES = ("auto", "bfloat16", "float16", "float32")


def check_arguments(kwargs: Mapping[str, Any]) -> None:
    """Checks the arguments of `from_pretrained`, `device_map` among them.

    Raises:
        SetupError: An argument is unsupported, `dtype`, `offload_folder`, or `max_memory` is not valid, or
            `max_memory` is set without an automatic device map.
        PlacementError: `device_map` names no device, or `max_memory` one that this machine does not have.
    """
    raise_first(
        SetupError(
            f"from_pretrained({name}=…) cannot be used with HfqConfig. Nothing was loaded.",
            found=name,
            expected=f"no {name}",
            fix=fix,
        )
        for name, fix in _UNSUPPORTED.items()
        if kwargs.get(name) not in (None, False)
    )
    for name in ("dtype", "torch_dtype"):
        _check_dtype(name, kwargs.get(name))
    folder = kwargs.get("offload_folder")
    if folder is not None and not (isinstance(folder, (str, os.PathLike)) and os.fspath(folder)):
        raise SetupError(
            "offload_folder is not a path. Nothing was loaded.",
            found=repr(folder)[:80],
            expected="the path of a folder",
            fix='Pass a folder on a fast disk, such as offload_folder="/scratch".',
        )
    device_map = kwargs.get("device_map")
    is_automatic = isinstance(device_map, str) and device_map in AUTOMATIC
    if kwargs.get("max_memory") is not None:
        if not is_automatic:
            raise SetupError(
                "from_pretrained(max_memory=…) requires an automatic device_map. Nothing was loaded.",
                expected=f"device_map={AUTOMATIC[0]!r}",
                found=f"device_map={device_map!r}"[:80],
                fix="Pass device_map='auto', or leave max_memory out.",
            )
        _check_max_memory(kwargs["max_memory"])
    if device_map is not None and (
        isinstance(device_map, bool) or not isinstance(device_map, (str, int, dict, torch.device))
    ):
        raise PlacementError(
            "device_map has an unsupported type. Nothing was loaded.",
            found=repr(device_map)[:80],
            expected='"auto", a device, or a dict',
            fix='Pass "auto", or a dict such as {"": "cpu"}.',
        )
    if not is_automatic and isinstance(device_map, (str, int, torch.device)):
        check_device(device_map)


def _check_dtype(name: str, value: Any) -> None:
    """Checks that a name of a dtype is one of torch; transformers checks everything else."""
    if (
        isinstance(value, str)
        and value != "auto"
        and not isinstance(getattr(torch, value, None), torch.dtype)
    ):
        raise SetupError(
            f"from_pretrained({name}={value!r}) names no dtype of torch."
            f"{nearest(value.replace('fp', 'float'), _DTYPES)} Nothing was loaded.",
            found=repr(value),
            expected=f"{', '.join(map(repr, _DTYPES))}, or a torch.dtype",
            fix=f"Pass {name}='auto', or another of these.",
        )


def _check_max_memory(max_memory: Any) -> None:
    """Checks that keys are devices and values are sizes, as accelerate accepts them."""
    from accelerate.utils import convert_file_size_to_int

    if not isinstance(max_memory, Mapping):
        raise SetupError(
            "from_pretrained(max_memory=…) is not a dict. Nothing was loaded.",
            found=repr(max_memory)[:80],
            expected='a dict such as {0: "8GiB", "cpu": "16GiB"}',
            fix="Pass a dict with a size for each device.",
        )
    for key, limit in max_memory.items():
        if isinstance(key, bool) or not (isinstance(key, int) or key in ("cpu", "disk", "mps")):
            raise SetupError(
                f"max_memory has the key {key!r}, which is not a device. Nothing was loaded.",
                found=repr(key),
                expected='the number of an accelerator, "cpu", or "disk"',
                fix='Use keys such as 0 for the first accelerator, "cpu", or "disk".',
            )
        if isinstance(key, int) and not 0 <= key < len(list_accelerators()):
            raise absent_accelerator(key, f"max_memory[{key!r}]")
        try:
            nbytes = convert_file_size_to_int(limit if isinstance(limit, str) else int(limit))
            is_size = nbytes >= 0 and not isinstance(limit, bool)
        except (TypeError, ValueError, OverflowError):
            is_size = False
        if not is_size:
            raise SetupError(
                f"max_memory[{key!r}] is not a size. Nothing was loaded.",
                found=repr(limit),
                expected="bytes as an integer, or a text with a number and a unit",
                fix='Pass bytes as an integer, such as 700000, or a size with a unit, such as "24GiB".',
            )


def take_gguf_file(path: Any, kwargs: dict[str, Any]) -> tuple[Any, str | None]:
    """Removes `gguf_file` from the arguments, since transformers must not read the file itself.

    The path may be that of a GGUF file.

    Returns:
        The folder or Hub id, and the name of the file; None without one.

    Raises:
        SetupError: `gguf_file` is not the name of a GGUF file.
    """
    name = kwargs.pop("gguf_file", None)
    if name is not None and not (isinstance(name, str) and name.endswith(".gguf")):
        raise SetupError(
            "from_pretrained(gguf_file=…) is not the name of a GGUF file. Nothing was loaded.",
            found=repr(name)[:80],
            expected="a name that ends in .gguf",
            fix='Pass a file of the checkpoint, such as gguf_file="model-Q4_K_M.gguf".',
        )
    return split_gguf_path(path, name) if isinstance(path, (str, os.PathLike)) else (path, name)


def open_local(path: Any, kwargs: Mapping[str, Any], gguf_file: str | None = None) -> Checkpoint | None:
    """Validates the checkpoint in a local folder.

    Args:
        path: The folder or Hub id.
        kwargs: Arguments of `from_pretrained`.
        gguf_file: The name of a GGUF file in the folder; None to look for a checkpoint.

    Returns:
        The checkpoint, or None for a Hub id or a folder with only an adapter.

    Raises:
        CheckpointError: The path is a file, or does not exist and cannot be a Hub id. Also raised if the
            checkpoint is damaged, or has only headers and is about to be loaded.
    """
    if path is None:
        raise CheckpointError(
            "from_pretrained requires a checkpoint.",
            expected="a folder or a Hub id",
            found="None",
            fix="Pass the folder of the checkpoint, or a Hub id such as ORG/MODEL.",
        )
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(
            "from_pretrained requires a path or a Hub id.",
            expected="a folder or a Hub id",
            found=repr(path)[:80],
            fix="Pass the folder of the checkpoint, or a Hub id such as ORG/MODEL.",
        )
    text = os.fspath(path)
    folder = Path(text, kwargs.get("subfolder") or "")
    if not os.path.lexists(text) and not _looks_local(text):
        return None
    if os.path.lexists(folder / "adapter_config.json") and not os.path.lexists(folder / "config.json"):
        return None
    if not load_context().stops_at_meta_model:
        check_has_weights(folder)
    needs_config = kwargs.get("config") is None
    return open_loadable(folder, kwargs.get("variant"), gguf_file, needs_config=needs_config)


def _looks_local(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text or len(text) > 200
