"""Loads what is evaluated, into a placement that is named in one word."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from hfq.errors import SetupError, nearest
from hfq.loading.loaded_model import loader_of

__all__ = ["DTYPES", "ModelSize", "as_device_map", "load_model", "text_config"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WORDS = ("cpu", "disk", "auto", "cuda")


def as_device_map(placement: str | dict | None) -> Any:
    """A placement as a `device_map`.

    Args:
        placement: `"cpu"`, `"disk"` (all of it), `"auto"`, a device as `"cuda:0"`, or a device map, as a dict
            or in JSON.

    Raises:
        SetupError: It is none of these.
    """
    if placement is None or isinstance(placement, dict):
        return {"": "cpu"} if placement is None else dict(placement)
    if placement in ("auto", "balanced", "sequential"):
        return placement
    if placement.lstrip().startswith("{"):
        try:
            return json.loads(placement)
        except ValueError as error:
            raise SetupError(
                "The placement is not JSON.",
                expected='{"": "cpu", "model.layers.1": "disk"}',
                found=error,
                fix="correct it",
            ) from error
    word = placement.partition(":")[0]
    if word not in _WORDS:
        raise SetupError(
            f"There is no placement {placement!r}.{nearest(word, _WORDS)}",
            found=placement,
            expected="cpu, disk, auto, cuda:0, or a device map in JSON",
            fix="correct it",
        )
    return {"": placement}


def load_model(
    path: str | os.PathLike,
    device_map: str | dict | None = None,
    dtype: str = "float32",
    kernel: str = "auto",
) -> Any:
    """The causal language model of a checkpoint, quantized or not, loaded by hfq.

    Args:
        path: The checkpoint's folder.
        device_map: See `as_device_map`.
        dtype: Of activations and dense tensors: `float32`, `bfloat16`, `float16`, or `auto` for the
            checkpoint's own.
        kernel: As for `HfqConfig`.

    Raises:
        HfqError: It cannot be loaded exactly.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hfq.loading.config import HfqConfig

    if dtype != "auto" and dtype not in DTYPES:
        raise SetupError(
            f"There is no dtype {dtype!r}.{nearest(dtype, DTYPES)}",
            expected=f"auto, {', '.join(DTYPES)}",
            found=dtype,
            fix="correct the dtype",
        )
    device_map = as_device_map(device_map)
    logging.disable_progress_bar()
    config = HfqConfig(kernel=kernel)
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=DTYPES.get(dtype, dtype), device_map=device_map
    ).eval()


def text_config(path: str | os.PathLike) -> Any:
    """The config of a checkpoint's language model.

    Raises:
        HfqError: There is no checkpoint, or transformers knows no such model.
    """
    from transformers import AutoConfig

    from hfq.checkpoint import Checkpoint

    Checkpoint.open(path)
    try:
        return AutoConfig.from_pretrained(path).get_text_config()
    except Exception as error:  # whatever a config of somebody else's raises
        raise SetupError(
            "transformers cannot read the checkpoint's config.",
            file=path,
            expected="config.json of a causal language model",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            fix="restore the model's own config.json",
        ) from error


class ModelSize:
    """What a loaded model's checkpoint takes.

    Attributes:
        nbytes: The bytes of its safetensors files, headers and all.
        weights: The numbers that it stands for: in × out of every packed layer, and the elements of every
            dense tensor.
        bits_per_weight: The bits of all stored tensors over all weights.
        bits_per_quantized_weight: The bits of quantized layers (codes, scales, zero points, indices, biases)
            over their weights; None if no layer is quantized.
        formats: The formats of the packed layers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        loading = loader_of(model)
        quantized = loading.quantized.values()
        quantized_nbytes = sum(info.nbytes for module in quantized for info in module.infos.values())
        quantized_weights = sum(module.in_features * module.out_features for module in quantized)
        named = [
            *loading.match.unquantized.values(),
            *(loading.checkpoint.tensors[n] for ns in loading.match.merged.values() for n in ns),
        ]
        unquantized = {info.name: info for info in named}
        self.nbytes = loading.checkpoint.nbytes
        self.weights = quantized_weights + sum(info.numel for info in unquantized.values())
        self.bits_per_weight = (
            8 * (quantized_nbytes + sum(info.nbytes for info in unquantized.values())) / self.weights
        )
        self.bits_per_quantized_weight = (
            8 * quantized_nbytes / quantized_weights if quantized_weights else None
        )
        self.formats = loading.describe_formats() or "dense"
