"""Errors of transformers during a load, as errors of hfq with a cause and a fix."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hfq.errors import CheckpointError, HfqError, PlacementError, SetupError, error_of_limit, nearest
from hfq.loading.context import load_context
from hfq.placement.accelerators import list_accelerators

__all__ = ["as_hfq_error", "naming_accelerators"]

_ARGUMENTS = (
    "attn_implementation",
    "config",
    "device_map",
    "dtype",
    "experts_implementation",
    "key_mapping",
    "max_memory",
    "offload_folder",
    "quantization_config",
    "revision",
    "subfolder",
    "trust_remote_code",
    "variant",
)
"""Arguments of `from_pretrained` that a misspelled one may have meant."""


@contextmanager
def naming_accelerators(path: Any) -> Iterator[None]:
    """A context manager for a load, which names accelerators that are full or fail.

    Raises:
        PlacementError: An accelerator has too little memory.
        SetupError: An accelerator reports an error.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (torch.OutOfMemoryError, torch.AcceleratorError)):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, torch.OutOfMemoryError):
            raise _full(path, cause) from error
        if cause is not None:
            raise SetupError(
                "The accelerator failed during the load. Nothing was loaded.",
                file=path,
                found=f"{type(cause).__name__}: {str(cause).strip()}",
                fix="Start a new process. If the error returns, check the device and its driver.",
            ) from error
        raise


def _full(path: Any, error: torch.OutOfMemoryError) -> PlacementError:
    planned = load_context().planned
    devices = list_accelerators()
    held = [f"{name}: {torch.accelerator.memory_allocated(name):,} B held" for name in devices]
    return PlacementError(
        "An accelerator has too little memory for this load. Nothing was loaded.",
        file=path,
        expected="; ".join(f"{name}: {planned.get(name, 0):,} B of weights planned" for name in devices),
        found="; ".join([str(error).strip(), *held]),
        fix='Free its memory, or pass device_map="auto" with max_memory below the free bytes of each device.',
    )


def as_hfq_error(path: Any, error: Exception, arguments: Mapping[str, Any], is_local: bool) -> HfqError:
    """Returns the error of hfq for an error that transformers raised while it loaded a model.

    Args:
        path: The checkpoint, as given to `from_pretrained`.
        error: The error of transformers.
        arguments: The keyword arguments of `from_pretrained`.
        is_local: True if the checkpoint was found in a folder.
    """
    found = f"{type(error).__name__}: {error}"
    if isinstance(error, FileNotFoundError) and os.path.exists(str(error).rpartition(": ")[2]):
        # safetensors 0.8 reports every file that it cannot open as missing
        used_up = error_of_limit(OSError(f"Too many open files ({error})"), path)
    else:
        used_up = error_of_limit(error, path)
    if used_up is not None:
        return used_up
    if isinstance(error, OSError) and not is_local:
        return CheckpointError(
            "transformers did not find the model. Nothing was loaded.",
            file=path,
            found=str(error).partition("\n")[0],
            expected="a local folder, or a Hub id that is online or cached",
            fix=f"Check the name. On a machine with a network: hf download {path}",
        )
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown is not None and unknown[1] in arguments:
        return SetupError(
            f"from_pretrained has no argument {unknown[1]}.{nearest(unknown[1], _ARGUMENTS)} "
            f"Nothing was loaded.",
            file=path,
            found=found,
            fix=f"Remove {unknown[1]}, or correct its name.",
        )
    named = [name for name in arguments if re.search(rf"`{name}\b|\b{name}=", str(error))]
    return SetupError(
        "transformers cannot load this checkpoint. Nothing was loaded.",
        file=path,
        found=found,
        expected="a config and arguments that transformers accepts",
        fix=f"Read the error under found, and correct the argument {named[0]}."
        if named
        else "Read the error under found. Usually config.json has a wrong value, or an argument has a wrong "
        "type.",
    )
