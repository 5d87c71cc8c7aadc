"""Availability of other libraries' kernels for CUDA devices.

The answers depend on facts of the machine alone: the device's compute capability, torch's version of CUDA,
and the installed packages. Nothing is downloaded, imported, or run for an answer.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch

__all__ = ["LIBRARIES", "Library", "capability", "capability_of", "probe"]

_GPTQMODEL = "hfq does not call it: it requires a second, repacked copy of the weight"


@dataclass(frozen=True, slots=True)
class Library:
    """A kernel of another library, and its requirements.

    Attributes:
        least: The lowest compute capability, (major, minor).
        most: The highest compute capability; None for any.
        cuda: The lowest version of CUDA that torch is built with.
        package: The package that contains the kernel; None for torch itself.
        unused: Why hfq does not call the kernel although it could run; None if hfq calls it.
    """

    least: tuple[int, int]
    most: tuple[int, int] | None = None
    cuda: tuple[int, int] = (0, 0)
    package: str | None = None
    unused: str | None = None


LIBRARIES = {
    "scaled_mm tensorwise": Library((8, 9)),
    "scaled_mm rowwise": Library((9, 0)),
    "scaled_mm blockwise": Library((9, 0), (9, 0), (12, 9)),
    "marlin": Library((7, 5), package="gptqmodel", unused=_GPTQMODEL),
    "machete": Library((9, 0), (9, 0), package="gptqmodel", unused=_GPTQMODEL),
    "kernels hub": Library(
        (7, 5), package="kernels", unused="hfq does not call it: it runs code from the network"
    ),
}
"""Kernels of other libraries, by name.

Sources: torch's documentation of `scaled_mm`; pytorch#153555, #158037; gptqmodel 7.7's declarations.
"""


@functools.cache
def capability() -> tuple[int, int] | None:
    """Returns the lowest compute capability of the CUDA devices; None if there is no device."""
    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def capability_of(device: str) -> str:
    """Returns the compute capability of a CUDA device in words; empty for other devices."""
    found = torch.device(device)
    if found.type != "cuda":
        return ""
    return f"compute capability {_dotted(torch.cuda.get_device_capability(found))}"


@functools.cache
def probe(name: str) -> tuple[bool, str]:
    """Returns whether hfq can use a kernel of `LIBRARIES` on this machine, and the reason."""
    library, found = LIBRARIES[name], capability()
    if found is None:
        return False, "this machine has no CUDA device"
    if torch.version.hip is not None:
        return False, "ROCm's devices have other codes of FP8, and report capabilities of their own"
    if found < library.least or (library.most is not None and found > library.most):
        wanted = f"{_dotted(library.least)} or later" if library.most is None else _dotted(library.least)
        return False, f"it needs compute capability {wanted}, the device has {_dotted(found)}"
    built = _cuda_version()
    if built < library.cuda:
        return False, f"it needs CUDA {_dotted(library.cuda)} or later, torch is built with {_dotted(built)}"
    if library.package is not None and importlib.util.find_spec(library.package) is None:
        return False, f"{library.package} is not installed"
    if library.unused is not None:
        return False, library.unused
    return True, f"compute capability {_dotted(found)}"


def _cuda_version() -> tuple[int, ...]:
    """Returns the version of CUDA that torch is built with; (0, 0) if it is built without CUDA."""
    return tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
