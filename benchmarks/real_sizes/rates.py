"""Rates of the machine, with which speed is predicted."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from hfq.loading.dry_run import open_model
from hfq.machine_profile.machine_limits import read_files
from hfq.machine_profile.measure_machine import MachineProbe, disk_file
from hfq.machine_profile.product_probes import KindProbe, layers_of
from hfq.placement.estimate.profile import Profile

__all__ = ["direct_rate", "measure_rates"]

_FILE_NBYTES, _ROUNDS, _DTYPE = 1 << 30, 3, "bfloat16"


def measure_rates(folder: Path, paths: Iterable[Path], threads: int, quick: bool) -> Profile:
    """Measures memory, fixed costs, and the products with the layers of these models.

    Args:
        folder: Folder for a file and small models.
        paths: The models.
        threads: Number of threads.
        quick: True to use small sizes, which give no useful rates.
    """
    torch.set_num_threads(threads)
    size, nbytes, rounds = (256, 4 << 20, 1) if quick else (2048, _FILE_NBYTES, _ROUNDS)
    with disk_file(folder, nbytes) as file, tempfile.TemporaryDirectory() as models:
        machine = MachineProbe(file, Path(models), size, quick)
        products = {
            kind: KindProbe(layers, getattr(torch, _DTYPE), 1 if quick else None)
            for path in paths
            for kind, layers in layers_of(open_model(path, _DTYPE), _DTYPE).items()
        }
        for _ in range(rounds):
            machine.measure()
            for probe in products.values():
                probe.measure()
        rates = {kind: {1: probe.rate} for kind, probe in products.items()}
        return dataclasses.replace(machine.profile(), products=rates)


def direct_rate(files: Iterable[Path]) -> float | None:
    """Returns the bytes per second of one pass of direct reads, or None if there are none here."""
    found = list(files)
    seconds = read_files(found, direct=True, threads=8)
    return sum(file.stat().st_size for file in found) / seconds if seconds else None
