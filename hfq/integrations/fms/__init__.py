"""IBM's Foundation Model Stack: FMS models on packed bytes, by hfq's own reader (`load`) or by FMS's
`get_model` (`register`).

    model = hfq.fms.load(path)                     # an FMS model; logits as of transformers, up to the order
    of float sums

    hfq.fms.register()
    model = fms.models.get_model("hf_pretrained", model_path=path, linear_config={"linear_type": "hfq"})

FMS is optional (`pip install hfq[fms]`) and imported only here. See docs/how_to/use_ibm_fms.md.
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
"""FMS versions that hfq is tested with: from the first on, below the second."""


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
    """Builds an FMS model from a checkpoint in transformers' layout, quantized in any dialect that hfq reads,
    or in none.

    Packed layers are `QuantizedLinear`: they hold the checkpoint's own bytes, mapped where these are aligned.
    Only layers whose rows FMS wants in another order (query and key, for RoPE) are copied, and stay packed.
    The model's tensors are frozen, and it is in evaluation mode.

    Args:
        path: The checkpoint's folder.
        data_type: The dtype of dense tensors, as a dtype or its name; by default the checkpoint's own.
        device: Where the model rests and computes.
        fused_weights: Whether attention and MLP ask for query, key and value, and for gate and up, as one
            layer. The packed parts of such a layer stay as they are stored, and are multiplied by one after
            another. By default only where the checkpoint itself stores them as one.
        distributed_strategy: `"tp"` gives each rank of `group` its slice of every layer that FMS cuts; None
            the whole model.
        group: The process group for `"tp"`; by default all ranks.
        config: hfq's options; `kernel` and `cpu_memory` (`"auto"`, `"mmap"`, `"private"`) are used.

    Returns:
        The FMS model, whose `forward` takes tokens and gives logits.

    Raises:
        SetupError: FMS is absent or of an untested version, does not know the architecture, or an option
            cannot be used.
        CheckpointError: The folder holds no checkpoint, or a damaged one.
        FormatError: A tensor is missing, unexpected, of a wrong size or dtype, or cannot be laid out as FMS
            wants it.
    """
    check_installed()
    from hfq.integrations.fms.loader import load_model

    return load_model(
        path, data_type, torch.device(device), fused_weights, distributed_strategy, group, config
    )


def register(config: HfqConfig | None = None) -> None:
    """Makes FMS's `get_model("hf_pretrained", …)` read quantized checkpoints with hfq, from then on.

    It adds the linear type `hfq` to FMS's registry, with its tensor parallel sharding, and a step to the
    adapters of the architectures that honour `linear_config`, which reorders packed rows (asymmetric zero
    points and few key heads included) and fills the layers. A checkpoint that names a quantization gets this
    type and `fused_weights=False`, whatever `linear_config` says. Calling it again replaces the options.

    Args:
        config: hfq's options; `kernel` and `activations` are used.

    Raises:
        SetupError: FMS is absent or of an untested version.
    """
    check_installed()
    from hfq.integrations.fms.registry import install

    install(config)


def check_installed() -> str:
    """The version of FMS that is installed.

    Raises:
        SetupError: None is, or one that hfq was not tested with.
    """
    expected = f"ibm-fms>={_OLDEST},<{_NEXT}"
    try:
        found = metadata.version("ibm-fms")
    except metadata.PackageNotFoundError:
        raise SetupError(
            "IBM's Foundation Model Stack is not installed.",
            expected=expected,
            found="no ibm-fms",
            fix="pip install 'hfq[fms]'",
        ) from None
    if not _OLDEST <= Version(found) < _NEXT:
        raise SetupError(
            "hfq was not tested with this version of IBM's Foundation Model Stack.",
            expected=expected,
            found=f"ibm-fms {found}",
            fix=f"pip install '{expected}'",
        )
    return found
