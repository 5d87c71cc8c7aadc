"""A simulated accelerator: PyTorch devices `sim:0`, `sim:1`, … for machines without a GPU.

It is a backend for PrivateUse1. The host cannot touch the memory of its devices. Its streams run in threads and
can be late, so that a missing wait gives NaN. Each device has a capacity, and memory that is used after it was
freed is an error. Every operator is computed by the CPU's, so results equal those of the CPU bit for bit. It
says nothing about speed.

Start it before anything asks torch for its accelerator, once in a process:

    sim = simulated_accelerator.start(count=3)
    model.to("sim:0")

Limits: no Triton, no graphs, no FP8 products. Operators whose result has a shape that depends on data wait for
the device. Random numbers come from the generator of the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

__all__ = ["missing", "start"]

_FOLDER = Path(__file__).parent
_BUILD = _FOLDER.parents[2] / "build" / "simulated_accelerator"


def missing() -> str:
    """Returns the reason why the accelerator cannot be built here, or an empty text."""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"the simulated accelerator needs the compiler {compiler}"
    if not cpp_extension.is_ninja_available():
        return "the simulated accelerator needs ninja"
    return ""


@functools.cache
def start(count: int = 3, capacity: int = 1 << 30) -> SimulatedModule:
    """Builds the backend if necessary, registers it with torch, and returns `torch.sim`.

    Args:
        count: Number of devices, at most 8.
        capacity: Bytes that each device holds; `set_capacity` changes it.
    """
    folder = _BUILD / f"torch-{torch.__version__}-py{sys.version_info.major}{sys.version_info.minor}"
    folder.mkdir(parents=True, exist_ok=True)
    native = cpp_extension.load(
        "simulated_accelerator",
        [str(_FOLDER / "src" / "simulated.cpp")],
        extra_cflags=["-O1", "-g1", "-Wall"],
        build_directory=str(folder),
        verbose="SIMULATED_VERBOSE" in os.environ,
    )
    native.start(count)
    torch.utils.rename_privateuse1_backend("sim")
    module = SimulatedModule(native, count)
    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module  # type: ignore[assignment]
    torch.utils.generate_methods_for_privateuse1_backend()
    for index in range(count):
        module.set_capacity(index, capacity)
    return module


class SimulatedModule:
    """The functions that torch, accelerate, and transformers call on `torch.sim`, and those of the simulation.

    Args:
        native: The compiled backend.
        count: Number of devices.
    """

    Stream, Event = torch.Stream, torch.Event

    def __init__(self, native: Any, count: int) -> None:
        self._native, self._count = native, count

    def is_available(self) -> bool:
        return self._count > 0

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: Any) -> Any:
        return torch.accelerator.device_index(
            device if isinstance(device, int) else torch.device(device).index
        )

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        index = self.current_device() if device is None else device
        index = index if isinstance(index, int) else torch.device(index).index
        return types.SimpleNamespace(
            name=f"simulated accelerator {index}", total_memory=self._native.capacity(index)
        )

    def get_device_name(self, device: Any = None) -> str:
        return self.get_device_properties(device).name

    def is_bf16_supported(self, *_: Any, **__: Any) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def stream(self, stream: torch.Stream | None) -> Any:
        return stream if stream is not None else contextlib.nullcontext()

    def memory_allocated(self, device: Any = None) -> int:
        return torch.accelerator.memory_allocated(device)

    def max_memory_allocated(self, device: Any = None) -> int:
        return torch.accelerator.max_memory_allocated(device)

    def memory_reserved(self, device: Any = None) -> int:
        return torch.accelerator.memory_reserved(device)

    def max_memory_reserved(self, device: Any = None) -> int:
        return torch.accelerator.max_memory_reserved(device)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(device)

    def memory_stats(self, device: Any = None) -> dict:
        return torch.accelerator.memory_stats(device)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats(device)

    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = "sim") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "sim") -> None:
        torch.set_rng_state(state)

    def set_capacity(self, device: int, nbytes: int) -> None:
        """Sets the bytes that a device holds; an allocation beyond raises `torch.OutOfMemoryError`."""
        self._native.set_capacity(device, nbytes)

    @contextlib.contextmanager
    def streams(self, default: int | str = 0, others: int | str = 0) -> Iterator[None]:
        """Makes streams late; synchronizes every device at the end.

        Args:
            default: For default streams: the most microseconds by which each task is late, a random time, or
                "lazy" to start a task only when somebody waits for it.
            others: The same for all other streams.
        """
        for is_default, delay in ((True, default), (False, others)):
            self._native.set_delay(is_default, 0 if delay == "lazy" else delay, delay == "lazy")
        try:
            yield
        finally:
            for is_default in (True, False):
                self._native.set_delay(is_default, 0, False)
            for index in range(self._count):
                torch.accelerator.synchronize(index)

    def take_counts(self) -> dict[str, int]:
        """Returns what all devices did since the last call.

        The keys are `queued`, `waited` (the host waited within an operator), `device`, `stream`, and `event
        synchronizations`, `allocations`, `pinned` and `pageable copies` and `bytes` to a device, `copies` and
        `bytes to host`, `peer copies`, and the names of operators that were not queued.
        """
        return self._native.take_counts()

    def fail(self, copy: int = 0, allocation: int = 0) -> None:
        """Makes a later copy or allocation fail; 0 cancels.

        Like an error of CUDA, a failed copy is raised whenever the host waits for a point of its stream after
        it, or of a stream that has waited for such a point. Unlike there, another call of this function ends
        that, for what is queued after the call.

        Args:
            copy: The n-th copy between host and device from now fails when the device executes it.
            allocation: The n-th allocation from now is out of memory.
        """
        self._native.fail(copy, allocation)

    def cudart(self) -> Any:
        """Returns the functions that pin existing host memory, under the names of CUDA's runtime."""
        return _Runtime(self._native)


class _Runtime:
    """Pins existing host memory; memory that is pinned already is an error, as in CUDA."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        try:
            self._native.host_register(address, nbytes)
        except RuntimeError:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._native.host_unregister(address)
        return 0
