"""Measurement of a machine profile, which `hfq plan` uses to predict speed.

Products run over several copies of a layer that together exceed the caches, like the layers of a model. Tiny
models show the fixed costs of a layer, an offloaded unit, and a load. Reading and computing at the same time
shows how much each slows the other. Everything is measured several times in turns. The profile contains
medians.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hfq.checkpoint.private_folder import user_cache
from hfq.errors import SetupError
from hfq.formats.awq import Awq
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.loading.dry_run import PlannedModel, kind_of_weight
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.machine_limits import drop_cache
from hfq.machine_profile.model_probes import DepthProbe
from hfq.machine_profile.product_probes import Layer, ProductProbe, layers_of
from hfq.machine_profile.read_probes import BesideProbe, ReadProbe
from hfq.machine_profile.zero3_ranks import measure_ranks
from hfq.placement.accelerators import describe_accelerator, free_nbytes, list_accelerators
from hfq.placement.estimate.profile import Profile

__all__ = ["MachineProbe", "default_folder", "disk_file", "measure_machine"]

ROWS = (1, 4, 16)
_SIZE, _ROUNDS = 2048, 3
_FILE_NBYTES = 1 << 30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_USUAL = Gptq(4, 128, False, "stored")
"""Format of the layers of the tiny models."""


def measure_machine(
    folder: Path,
    say: Callable[[str], None],
    model: PlannedModel | None = None,
    quick: bool = False,
    ranks: int = 0,
) -> Profile:
    """Measures this machine.

    Args:
        folder: Folder on the disk that holds checkpoints. A file of 1 GiB is written there and removed.
        say: Function that receives progress lines.
        model: Checkpoint whose layers are measured in addition to the usual ones. None measures only those.
        quick: True to use small sizes, which tests that the measurement works, without useful results.
        ranks: Number of local ranks for measuring a step under ZeRO-3. 0 measures no ZeRO-3 step.

    Raises:
        SetupError: The folder is not writable, or the ranks do not run.
    """
    size, nbytes, rounds = (256, 4 << 20, 1) if quick else (_SIZE, _FILE_NBYTES, _ROUNDS)
    say("disk, memory, layers, and loads")
    with disk_file(folder, nbytes) as file, tempfile.TemporaryDirectory() as models:
        machine = MachineProbe(file, Path(models), size, quick)
        for _ in range(rounds):
            machine.measure()
        profile = machine.profile(machine_facts(folder) | _device_facts())
    products, calls = {}, {}
    usual = [
        Fp8(strategy="block", block_structure=(128, 128)),
        *(Gptq(bits, 128, False, "stored") for bits in (4, 8)),
        Awq(),
    ]
    for name, dtype in _DTYPES.items():
        say(f"products with {name} activations")
        layers: dict[str, tuple[Layer, Layer | None]] = {
            kind_of_weight(each, name): (Layer(each, size, size), None) for each in usual
        }
        for kind, sizes in (layers_of(model, name) if model is not None else {}).items():
            in_order = sorted(sizes, key=lambda layer: layer.weights)
            layers[kind] = in_order[-1], in_order[0]
        layers[f"dense {name}"] = Layer(None, size, size), None
        for kind, (large, small) in layers.items():
            products[kind], calls[kind] = _measure_product(large, small, dtype, rounds)
    zero3 = None
    if ranks:
        say(f"{ranks} ranks under ZeRO-3")
        zero3 = measure_ranks(ranks, quick)
    return dataclasses.replace(
        profile,
        products=products,
        calls=calls,
        zero3=zero3,
        host_to_device=_link_rate(nbytes),
        device_memory=_device_rate(nbytes),
    )


def default_folder() -> Path:
    """Returns the folder of files to measure with: `hfq/bench` in the user's cache folder."""
    return user_cache() / "bench"


class MachineProbe:
    """Rates that do not depend on the format: disk, page cache, memory, and fixed costs.

    Args:
        file: File to read, on the disk to measure.
        folder: Folder for tiny models.
        size: Inputs and outputs of the layers that compute while a file is read.
        quick: True to use the smallest models.
    """

    def __init__(self, file: Path, folder: Path, size: int = _SIZE, quick: bool = False) -> None:
        self._disk, self._cached = ReadProbe(file, True), ReadProbe(file, False)
        self._product = ProductProbe(Layer(_USUAL, size, size), copies=1 if quick else None)
        seconds = 0.0 if quick else 0.15
        self._beside = [BesideProbe(self._product, read, seconds) for read in (self._disk, self._cached)]
        self._depth = DepthProbe(folder, quick)
        self._all: list[ReadProbe | ProductProbe | BesideProbe | DepthProbe] = [
            self._disk,
            self._product,
            self._cached,
        ]
        self._all += [*self._beside, self._depth]
        self._memory: list[float] = []
        self._memory_nbytes = min(256 << 20, 64 * size * size)

    def measure(self) -> None:
        """Adds one sample per probe."""
        for probe in self._all:
            probe.measure()
        self._memory.append(_read_rate(self._memory_nbytes))

    def forget(self) -> None:
        """Drops all samples."""
        for probe in self._all:
            probe.forget()
        self._memory.clear()

    def profile(self, machine: dict[str, str] | None = None) -> Profile:
        """Returns the profile of all samples, without products.

        Args:
            machine: Facts about the machine, or None.
        """
        beside_disk, beside_cached = (probe.shares for probe in self._beside)
        depth = self._depth
        return Profile(
            "measured",
            self._disk.rate,
            self._cached.rate,
            statistics.median(self._memory),
            machine=machine or {},
            layer_seconds=depth.layer_seconds(self._product.call_seconds),
            load_seconds=depth.load_seconds,
            step_seconds=depth.step_seconds,
            block_seconds=depth.block_seconds(self._cached.rate),
            beside_disk=beside_disk,
            beside_cached=beside_cached,
        )


def _measure_product(
    large: Layer, small: Layer | None, dtype: torch.dtype, rounds: int
) -> tuple[dict[int, float], float]:
    """Returns ({rows: weights per second}, seconds of a call) for one kind of weight."""
    probes = {rows: ProductProbe(large, small, rows, dtype, 2 if rounds == 1 else None) for rows in ROWS}
    for _ in range(rounds):
        for probe in probes.values():
            probe.measure()
    return {rows: probe.rate for rows, probe in probes.items()}, probes[ROWS[0]].call_seconds


def _read_rate(nbytes: int) -> float:
    """Returns the bytes per second of reading memory, measured by a sum over float32."""
    values = torch.zeros(nbytes // 4)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - started)
    return nbytes / best


@contextlib.contextmanager
def disk_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """Yields a file of random bytes, and removes it afterwards.

    Raises:
        SetupError: The file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".hfq-calibrate-")
    except OSError as error:
        raise _unmeasurable(folder, nbytes, error) from error
    file = Path(name)
    try:
        try:
            with os.fdopen(descriptor, "wb") as stream:
                block = os.urandom(16 << 20)
                for start in range(0, nbytes, len(block)):
                    stream.write(block[: nbytes - start])
        except OSError as error:
            raise _unmeasurable(folder, nbytes, error) from error
        drop_cache([file])
        yield file
    finally:
        file.unlink()


def _unmeasurable(folder: Path, nbytes: int, error: OSError) -> SetupError:
    return SetupError(
        "The disk cannot be measured.",
        file=folder,
        expected=f"a writable folder with {nbytes:,} bytes free",
        found=error.strerror or error,
        fix="Pass --folder with a writable folder on the disk that holds your checkpoints.",
    )


def _device_facts() -> dict[str, str]:
    """Returns the threads of the CPU, and name and bytes of each accelerator."""
    threads = {"threads": str(torch.get_num_threads())}
    found = [describe_accelerator(device) for device in list_accelerators()]
    texts = [f"{each.device}: {each.model}, {each.total_nbytes:,} B" for each in found]
    return threads | {"accelerators": "; ".join(texts)} if texts else threads


def _device_rate(nbytes: int) -> float | None:
    """Returns the memory read rate of the first accelerator in bytes per second, or None.

    Args:
        nbytes: The most bytes to read; fewer if the accelerator has less free memory.
    """
    if not torch.accelerator.is_available():
        return None
    values = torch.zeros(_within_free(nbytes) // 4, device=list_accelerators()[0])
    best = float("inf")
    for _ in range(5):
        torch.accelerator.synchronize()
        started = time.perf_counter()
        values.sum().item()
        best = min(best, time.perf_counter() - started)
    return values.nbytes / best


def _link_rate(nbytes: int) -> float | None:
    """Returns the copy rate from pinned memory to the first accelerator, or None without one.

    Args:
        nbytes: Four times the most bytes to copy; fewer if the accelerator has less free memory.
    """
    if not torch.accelerator.is_available():
        return None
    source = torch.empty(_within_free(nbytes // 4), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=list_accelerators()[0])
    best = float("inf")
    for _ in range(5):
        torch.accelerator.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - started)
    return source.nbytes / best


def _within_free(nbytes: int) -> int:
    """Returns at most half of the free bytes of the first accelerator."""
    free = free_nbytes(list_accelerators()[0])
    return nbytes if free is None else min(nbytes, free // 2)
