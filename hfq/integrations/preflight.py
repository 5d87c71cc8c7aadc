"""What is checked before transformers opens anything: the arguments, the local folder, the sizes its config claims."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfq.checkpoint import Checkpoint
from hfq.errors import CheckpointError, FormatError, PlacementError, SetupError, nearest
from hfq.placement.device_map import AUTOMATIC, check_device

__all__ = ["check_arguments", "check_sizes", "open_local"]

_UNSUPPORTED = {
    "gguf_file": "load GGUF files with transformers alone",
    "state_dict": "pass the folder of the checkpoint instead",
    "key_mapping": "rename the tensors on disk; key_mapping is not supported by hfq yet",
    "tp_plan": "use device_map; tensor parallelism is not supported by hfq yet",
    "tp_size": "use device_map; tensor parallelism is not supported by hfq yet",
    "distributed_config": "use device_map; hfq does not support distributed_config yet",
    "ignore_mismatched_sizes": "correct the config; hfq never loads a tensor into a place of another size",
}
_SIZES = (
    "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "n_embd",
    "n_inner", "d_model", "d_ff", "moe_intermediate_size", "num_experts", "num_local_experts", "ffn_dim",
)  # fmt: skip
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers")


def check_arguments(kwargs: Mapping[str, Any]) -> None:
    """Refuses arguments of `from_pretrained` that hfq would have to ignore, and a device_map that is no device.

    Raises:
        SetupError: An unsupported argument.
        PlacementError: A device_map that names no device.
    """
    for name, fix in _UNSUPPORTED.items():
        if kwargs.get(name):
            raise SetupError(
                f"from_pretrained({name}=…) cannot be used with HfqConfig; nothing was loaded.", found=name,
                expected=f"no {name}", fix=fix,
            )  # fmt: skip
    device_map = kwargs.get("device_map")
    if isinstance(device_map, str) and device_map not in AUTOMATIC:
        check_device(device_map)
        if device_map == "disk":
            raise PlacementError(
                "device_map='disk' is not one of transformers' names; nothing was loaded.", found="'disk'",
                expected="a dict", fix='pass {"": "disk"}',
            )  # fmt: skip


def open_local(path: Any, kwargs: Mapping[str, Any]) -> Checkpoint | None:
    """Validates the checkpoint in a local folder; None for what is not a local folder's business.

    Raises:
        CheckpointError: The path is a file, or does not exist and can be no name of the hub, or the checkpoint is damaged.
    """
    if path is None:
        raise CheckpointError(
            "from_pretrained was given no checkpoint.", expected="a folder or a model of the hub", found="None",
            fix="pass the folder of the checkpoint",
        )  # fmt: skip
    text = os.fspath(path)
    folder = Path(text, kwargs.get("subfolder") or "")
    if not Path(text).exists() and not _looks_local(text):
        return None
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        return None
    checkpoint = Checkpoint.open(folder, variant=kwargs.get("variant"))
    if not checkpoint.config and kwargs.get("config") is None:
        found = sorted(entry.name for entry in folder.iterdir())[:12]
        raise CheckpointError(
            "The checkpoint has no config.json.", file=folder, expected="config.json beside the weights",
            found=", ".join(found) + nearest("config.json", found), fix="download config.json of this model into the folder",
        )  # fmt: skip
    return checkpoint


def check_sizes(checkpoint: Checkpoint) -> None:
    """Refuses a config whose sizes the checkpoint cannot hold, before a model of that size is built.

    Raises:
        FormatError: A size is no positive integer, or is larger than the bits of the whole checkpoint.
    """
    bits, count = 8 * checkpoint.nbytes, len(checkpoint.tensors)
    for config in (checkpoint.config, *(value for value in checkpoint.config.values() if isinstance(value, dict))):
        for keys, bound in ((_SIZES, bits), (_DEPTHS, count)):
            for key in keys:
                value = config.get(key)
                if isinstance(value, bool) or (isinstance(value, int) and not 0 <= value <= bound):
                    raise FormatError(
                        f"config.json says {key}={value!r}, which this checkpoint cannot hold; nothing was loaded.",
                        file=Path(checkpoint.root) / "config.json", expected=f"at most {bound}", found=repr(value),
                        fix=f"correct {key} in config.json",
                    )  # fmt: skip


def _looks_local(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text
