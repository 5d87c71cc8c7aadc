"""Findings of `hfq doctor` about the environment, devices, kernels, and compiled operators."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hfq.cli.doctor.findings import Finding

__all__ = ["device_findings", "environment_findings", "kernel_findings", "operator_findings"]

_OPERATORS = {"async_io": "offload to NVMe", "cpu_adam": "optimizer states in CPU memory"}
_BUILDERS = {
    "async_io": ("AsyncIOBuilder", "DS_BUILD_AIO"),
    "cpu_adam": ("CPUAdamBuilder", "DS_BUILD_CPU_ADAM"),
}
_SHARED = "/dev/shm"


def environment_findings(folder: Path) -> Iterator[Finding]:
    """Yields processor, memory limits, and variables; no names of hosts, users, or folders."""
    from hfq.checkpoint.memory_limit import available_memory, cgroup_limit
    from hfq.machine_profile.machine_facts import machine_facts

    for what, value in machine_facts(folder).items():
        if what != "versions":
            yield Finding("environment", "ok", f"{what}: {value}")
    available = available_memory()
    if available is not None:
        yield Finding("environment", "ok", f"available memory: {available / 1e9:.1f} GB")
    limit = cgroup_limit()
    if limit is not None:
        yield Finding(
            "environment",
            "warning",
            f"a control group limits this process to {limit / 1e9:.1f} GB of the machine's memory",
            f'Plan with it: hfq plan MODEL --cpu {limit}B, and pass max_memory={{"cpu": {limit}}}.',
        )
    if os.path.isdir(_SHARED):
        status = os.statvfs(_SHARED)
        yield Finding(
            "environment", "ok", f"shared memory: {status.f_bavail * status.f_frsize / 1e9:.1f} GB free"
        )
    switches = sorted(name for name in os.environ if name.startswith("HFQ_"))
    for name in switches:
        yield Finding("environment", "note", f"{name}={os.environ[name]}")


def device_findings() -> Iterator[Finding]:
    """Yields the accelerators that torch finds, with their memory."""
    import torch

    from hfq.kernels.cpu.thread_limit import threads_above_quota
    from hfq.kernels.cuda.libraries import capability_of
    from hfq.kernels.registry import KERNELS
    from hfq.placement.accelerators import accelerator_kind, describe_accelerator, list_accelerators

    for device in list_accelerators():
        text = ", ".join(filter(None, (str(describe_accelerator(device)), capability_of(device))))
        yield Finding("devices", "ok", text)
    kind = accelerator_kind()
    if kind is None:
        yield Finding("devices", "ok", "no accelerator")
    elif not any(kind in kernel.devices for kernel in KERNELS.values()):
        yield Finding("devices", "note", f"{kind}: hfq has no kernel for it; the reference kernel multiplies")
    yield Finding(
        "devices", "ok", f"CPU: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    above = threads_above_quota()
    if above is not None:
        yield Finding(
            "devices",
            "warning",
            f"{above[0]} threads compute on a quota of {above[1]:g} CPUs, which a control group sets",
            f"export OMP_NUM_THREADS={math.ceil(above[1])}",
        )


def kernel_findings() -> Iterator[Finding]:
    """Builds the compiled kernel; yields available kernels, and reasons for the others."""
    from hfq.kernels.registry import KERNELS, check_kernel

    check_kernel("auto")
    for kernel in sorted(KERNELS.values(), key=lambda kernel: -kernel.priority):
        missing = kernel.lacks()
        if missing is None:
            yield Finding("kernels", "ok", f"{kernel.name} runs")
        else:
            fix = _compiler_fix() if kernel.name == "cpp" else ""
            yield Finding(
                "kernels", "warning" if fix else "note", f"{kernel.name} does not run: {missing}", fix
            )


def _compiler_fix() -> str:
    """Returns the command that installs a compiler.

    It is empty if there is one, if the kernel is disabled, or if $CXX is wrong.
    """
    from hfq.kernels.cpp.build import BuildError, CompilerNotFoundError, find_compiler
    from hfq.kernels.cpp.library import is_wanted

    try:
        find_compiler()
    except CompilerNotFoundError:
        return "pip install 'hfq[compiler]'" if is_wanted() else ""
    except BuildError:
        return ""
    return ""


def operator_findings() -> Iterator[Finding]:
    """Yields DeepSpeed's compiled operators, or the command that builds them."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        yield Finding("DeepSpeed operators", "note", "DeepSpeed is not installed")
        return
    root = Path(spec.origin).parent
    for name, use in _OPERATORS.items():
        builder, variable = _BUILDERS[name]
        if _is_built(root, name):
            yield Finding("DeepSpeed operators", "ok", f"{name} is built ({use})")
            continue
        lacking = [program for program in ("ninja",) if shutil.which(program) is None]
        if name == "async_io" and not _has_header("libaio.h"):
            lacking.append("libaio.h (apt install libaio-dev)")
        build = f"python -c 'from deepspeed.ops.op_builder import {builder}; {builder}().load()'"
        first = f"install {', '.join(lacking)}, then " if lacking else ""
        fix = f"{first}{build} (or {variable}=1 pip install --no-build-isolation deepspeed)"
        yield Finding(
            "DeepSpeed operators",
            "note",
            f"{name} is not built yet ({use}); DeepSpeed builds it on first use",
            fix,
        )


def _is_built(root: Path, name: str) -> bool:
    """Returns True if an operator was compiled, at installation or on first use."""
    if any((root / "ops").rglob(f"*{name}_op*.so")):
        return True
    caches = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = (
        Path(caches)
        if caches
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    )
    return folder.is_dir() and any(folder.rglob(f"{name}.so"))


def _has_header(name: str) -> bool:
    return any((Path(folder) / name).exists() for folder in ("/usr/include", "/usr/local/include"))
