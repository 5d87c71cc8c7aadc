"""Private unnamed files of quantized layers, one for each device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hfq.checkpoint import Reader
from hfq.checkpoint.read_plan import ReadPlan
from hfq.checkpoint.temporary_file import TemporaryFile
from hfq.errors import PlacementError
from hfq.loading.context import load_context

__all__ = ["check_offload_folder", "device_label", "free_unmapped", "open_device_file"]


def check_offload_folder(device: str, layer: str) -> None:
    """Checks that there is a folder for a layer that is quantized on load.

    Raises:
        PlacementError: The device is `disk`, and the load has no `offload_folder`.
    """
    if device == "disk" and load_context().offload_folder is None:
        raise PlacementError(
            "device_map puts a layer that is quantized on load on disk, without offload_folder. "
            "Nothing was loaded.",
            tensor=layer,
            expected="offload_folder",
            found="None",
            fix="Pass from_pretrained(offload_folder=…), a folder on a fast disk with space for the "
            "quantized layers.",
        )


def device_label(device: str) -> str:
    """Returns the name of a device's file in messages and byte ranges.

    The folder in it tells the file system of the file.
    """
    if device == "disk":
        return f"{Path(load_context().offload_folder or '').absolute()}/(quantized on load)"
    return f"/dev/shm/(quantized on load, {device})"


def open_device_file(reader: Reader, device: str, nbytes: int) -> TemporaryFile:
    """Returns a new file: in `offload_folder` for `disk`, and in memory for every other device."""
    folder = load_context().offload_folder if device == "disk" else None
    return TemporaryFile(reader, device_label(device), nbytes, folder)


def free_unmapped(files: Mapping[str, TemporaryFile], plan: ReadPlan) -> None:
    """Frees the files in memory that no module maps, once their bytes are read."""
    mapped = {info.range.file for row in plan.reads if row.how == "mapped" for info in row.infos.values()}
    for device, file in files.items():
        if device != "disk" and file.label not in mapped:
            file.empty()
