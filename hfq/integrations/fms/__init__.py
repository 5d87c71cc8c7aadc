"""Quantized models of IBM's Foundation Model Stack (FMS).

`load` reads a checkpoint with hfq. `register` lets FMS's `get_model` read it.

    model = hfq.fms.load(path)

    hfq.fms.register()
    model = fms.models.get_model("hf_pretrained", model_path=path, linear_config={"linear_type": "hfq"})

Logits equal those of transformers up to the order of float sums.

FMS is optional (`pip install hfq[fms]`), and only this package imports it. See docs/how_to/use_ibm_fms.md.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn

from hfq.errors import SetupError

if TYPE_CHECKING:
    from hfq.loading.config import HfqConfig

__all__ = ["check_installed", "load", "register"]

_OLDEST, _NEXT = Version("1.13"), Version("1.14")
"""Bounds of the tested FMS versions: at least the first, and lower than the second."""


def load(
    path: str | os.PathLike,
    *,
    data_type: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    fused_weights: bool | None = None,
    distributed_strategy: str | None = None,
    group: Any = None,
    config: HfqConfig | None = None,
) -> nn.Module:
    """Builds an FMS model from a checkpoint in the layout of transformers.

    The checkpoint is unquantized, or quantized in any format that hfq reads. Quantized layers become
    `QuantizedLinear`. They hold the bytes of the checkpoint, memory-mapped if aligned. hfq copies only layers
    whose rows FMS requires in another order (query and key, for RoPE). These layers stay quantized, too.
    The model's tensors are frozen, and the model is in evaluation mode.

    Args:
        path: The checkpoint's folder.
        data_type: Dtype of unquantized tensors, or its name. None means the dtype of the checkpoint.
        device: Device on which the model is stored and computes.
        fused_weights: True if query, key, and value form one layer, and gate and up form another. The
            quantized parts of such a layer stay separate, and are multiplied one after another. None means
            True only if the checkpoint stores them fused.
        distributed_strategy: `"tp"` if each rank of `group` holds its slice of every layer that FMS slices,
            or None if each process holds the whole model.
        group: Process group for `"tp"`. None means all ranks.
        config: Options of hfq. Only those of the layers are used, such as `kernel` and `cpu_memory`
            (`"auto"`, `"mmap"`, or `"private"`).

    Returns:
        The FMS model, whose `forward` maps tokens to logits.

    Raises:
        SetupError: FMS is missing, its version is untested, it does not support the architecture, or an
            option is invalid.
        CheckpointError: The folder holds no checkpoint, or a damaged one.
        FormatError: A tensor is missing, is unexpected, has a wrong size or dtype, or cannot be arranged in
            the order that FMS requires.
    """
    check_installed()
    from hfq.integrations.fms.loader import load_model

    return load_model(
        path, data_type, torch.device(device), fused_weights, distributed_strategy, group, config
    )


def register(config: HfqConfig | None = None) -> None:
    """Makes FMS's `get_model("hf_pretrained", …)` read quantized checkpoints with hfq.

    This adds the linear type `hfq`, with its tensor parallel sharding, to FMS's registry. It also adds a step
    to the adapters of the architectures that use `linear_config`. The step reorders the rows of quantized
    weights and fills the layers. It supports asymmetric zero points and models with few key heads.

    A checkpoint whose config names a quantization always gets this linear type and `fused_weights=False`,
    even if `linear_config` names another type. A second call replaces the options.

    Args:
        config: Options of hfq. Only those of the layers are used, such as `kernel`, `cpu_memory`, and
            `quantize_activations`.

    Raises:
        SetupError: FMS is missing or its version is untested.
    """
    check_installed()
    from hfq.integrations.fms.registry import install

    install(config)


def check_installed() -> str:
    """Returns the installed version of FMS.

    Raises:
        SetupError: FMS is missing or its version is untested.
    """
    expected = f"ibm-fms>={_OLDEST},<{_NEXT}"
    try:
        found = metadata.version("ibm-fms")
    except metadata.PackageNotFoundError:
        raise SetupError(
            "IBM's Foundation Model Stack is not installed.",
            expected=expected,
            found="no ibm-fms",
            fix="Run pip install 'hfq[fms]'.",
        ) from None
    if not _OLDEST <= Version(found) < _NEXT:
        raise SetupError(
            "hfq does not support this version of IBM's Foundation Model Stack.",
            expected=expected,
            found=f"ibm-fms {found}",
            fix=f"Run pip install '{expected}'.",
        )
    return found
