"""What is checked before transformers opens anything: the arguments, the local folder, the sizes its config
claims.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.headers_only import check_has_weights
from hfq.errors import CheckpointError, FormatError, PlacementError, SetupError, nearest, raise_first
from hfq.loading.context import load_context
from hfq.placement.device_map import AUTOMATIC, check_device

__all__ = ["check_arguments", "check_sizes", "open_local"]

_UNSUPPORTED = {
    "gguf_file": "load GGUF files with transformers alone",
    "state_dict": "pass the folder of the checkpoint instead",
    "device_mesh": "leave it out; transformers makes the mesh that tp_plan asks for",
    "ignore_mismatched_sizes": "correct the config; hfq never loads a tensor into a place of another size",
}
_NEEDED = ("hidden_size", "vocab_size", "d_model", "n_embd")
_SIZES = (
    *_NEEDED,
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_inner",
    "d_ff",
    "ffn_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
_MAY_BE_ZERO = ("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts")
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "depth",
)
_MOST_ELEMENTS = 1 << 50


def check_arguments(kwargs: Mapping[str, Any]) -> None:
    """Refuses arguments of `from_pretrained` that hfq would have to ignore, and a device_map that is no
    device.

    Raises:
        SetupError: An unsupported argument, or `max_memory` without an automatic device_map.
        PlacementError: A device_map that names no device.
    """
    raise_first(
        SetupError(
            f"from_pretrained({name}=…) cannot be used with HfqConfig. Nothing was loaded.",
            found=name,
            expected=f"no {name}",
            fix=fix,
        )
        for name, fix in _UNSUPPORTED.items()
        if kwargs.get(name) not in (None, False)
    )
    device_map = kwargs.get("device_map")
    if kwargs.get("max_memory") is not None and not (isinstance(device_map, str) and device_map in AUTOMATIC):
        raise SetupError(
            "from_pretrained(max_memory=…) limits nothing without an automatic device_map. Nothing was "
            "loaded.",
            expected=f"device_map={AUTOMATIC[0]!r}",
            found=f"device_map={device_map!r}"[:80],
            fix="pass device_map='auto', or leave max_memory out",
        )
    if device_map is not None and (
        isinstance(device_map, bool) or not isinstance(device_map, (str, int, dict, torch.device))
    ):
        raise PlacementError(
            "device_map is of a type that means nothing. Nothing was loaded.",
            found=repr(device_map)[:80],
            expected='"auto", a device, or a dict',
            fix='pass {"": "cpu"} or another dict',
        )
    if isinstance(device_map, str) and device_map not in AUTOMATIC:
        check_device(device_map)
        if device_map == "disk":
            raise PlacementError(
                "device_map='disk' is not one of transformers' names. Nothing was loaded.",
                found="'disk'",
                expected="a dict",
                fix='pass {"": "disk"}',
            )


def open_local(path: Any, kwargs: Mapping[str, Any]) -> Checkpoint | None:
    """Validates the checkpoint in a local folder; None for what is not a local folder's business.

    Raises:
        CheckpointError: The path is a file, or does not exist and can be no name of the hub, or the
            checkpoint is damaged, or has headers alone and is not only planned.
    """
    if path is None:
        raise CheckpointError(
            "from_pretrained was given no checkpoint.",
            expected="a folder or a model of the hub",
            found="None",
            fix="pass the folder of the checkpoint",
        )
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(
            "from_pretrained was given no path.",
            expected="a folder or a model of the hub",
            found=repr(path)[:80],
            fix="pass the folder of the checkpoint",
        )
    text = os.fspath(path)
    folder = Path(text, kwargs.get("subfolder") or "")
    if not os.path.lexists(text) and not _looks_local(text):
        return None
    if os.path.lexists(folder / "adapter_config.json") and not os.path.lexists(folder / "config.json"):
        return None
    if not load_context().stops_at_meta_model:
        check_has_weights(folder)
    checkpoint = Checkpoint.open(folder, variant=kwargs.get("variant"))
    _check_index(checkpoint)
    if not checkpoint.config and kwargs.get("config") is None:
        found = sorted(entry.name for entry in folder.iterdir())[:12]
        raise CheckpointError(
            "The checkpoint has no config.json.",
            file=folder,
            expected="config.json beside the weights",
            found=", ".join(found) + "." + nearest("config.json", found),
            fix="download config.json of this model into the folder",
        )
    return checkpoint


def _check_index(checkpoint: Checkpoint) -> None:
    """transformers reads the `metadata` of an index without asking whether there is any (`utils/hub.py`, 5.17
    to 5.23).
    """
    index = checkpoint.side_file("model.safetensors.index.json") if len(checkpoint.headers) > 1 else None
    if index is not None and not isinstance(index.get("metadata"), dict):
        raise CheckpointError(
            "The index of the checkpoint has no metadata, without which transformers does not load it.",
            expected='"metadata": {}',
            file=Path(checkpoint.root) / "model.safetensors.index.json",
            found=repr(index.get("metadata"))[:80],
            fix='add "metadata": {} to the index, beside its weight_map',
        )


def check_sizes(checkpoint: Checkpoint) -> None:
    """Refuses a config whose sizes the checkpoint cannot hold, before a model of that size is built.

    Raises:
        FormatError: A size is no positive integer, or is larger than the bits of the whole checkpoint.
    """
    bits, count = 8 * checkpoint.nbytes, len(checkpoint.tensors)
    for config in _nested(checkpoint.config):
        for keys, bound in ((_SIZES, bits), (_DEPTHS, count)):
            for key in keys:
                if key in config and not _is_possible(key, config[key], bound):
                    raise _impossible(checkpoint, key, config[key], f"a positive size of at most {bound}")
        queries = ("num_attention_heads", "head_dim", "hidden_size")
        sizes = [config.get(key) for key in queries]
        if all(isinstance(size, int) for size in sizes) and math.prod(sizes) > _MOST_ELEMENTS:  # type: ignore[arg-type]
            raise _impossible(checkpoint, " × ".join(queries), math.prod(sizes), "what fits a machine")  # type: ignore[arg-type]


def _nested(config: Mapping[str, Any], level: int = 0) -> Iterator[Mapping[str, Any]]:
    """A config and the configs of its parts, as of a model that sees and reads."""
    yield config
    for key, value in config.items():
        if isinstance(value, dict) and key != "quantization_config" and level < 4:
            yield from _nested(value, level + 1)


def _is_possible(key: str, value: object, bound: int) -> bool:
    """Whether a size can be that of this checkpoint; some may be absent as None, or differ by layer in a
    list.
    """
    if value is None:
        return key not in _NEEDED
    if isinstance(value, list) and key not in _NEEDED:
        return all(_is_possible(key, item, bound) for item in value)
    least = 0 if key in (*_MAY_BE_ZERO, *_DEPTHS) else 1
    return type(value) is int and least <= value <= bound


def _impossible(checkpoint: Checkpoint, key: str, value: object, expected: str) -> FormatError:
    return FormatError(
        f"config.json says {key}={value!r}, which this checkpoint cannot hold. Nothing was loaded.",
        file=Path(checkpoint.root) / "config.json",
        expected=expected,
        found=repr(value),
        fix=f"correct {key} in config.json",
    )


def _looks_local(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text or len(text) > 200
