"""Loading of models for evaluation, with placements given as one word."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from hfq.errors import HfqError, SetupError, nearest
from hfq.loading.custom_code import refusing_custom_code
from hfq.loading.loaded_model import loader_of
from hfq.placement.accelerators import accelerator_kind
from hfq.placement.device_map import AUTOMATIC

__all__ = ["DTYPES", "ModelSize", "as_device_map", "load_model", "text_config"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_device_map(placement: str | dict | None, option: str = "device_map") -> Any:
    """Returns the `device_map` of a placement.

    Args:
        placement: `"cpu"`, `"disk"` (everything), `"auto"`, a device such as `"cuda:0"`, or a device map, as
            a dict or as JSON; None for the CPU.
        option: Name of the option, for messages.

    Raises:
        SetupError: The placement is none of these.
    """
    if placement is None or isinstance(placement, dict):
        return {"": "cpu"} if placement is None else dict(placement)
    if placement in AUTOMATIC:
        return placement
    if placement.lstrip().startswith("{"):
        try:
            return json.loads(placement)
        except ValueError as error:
            raise SetupError(
                f"{option} {placement} is not valid JSON.",
                expected='{"": "cpu", "model.layers.1": "disk"}',
                found=error,
                fix="Pass a JSON object such as the expected one.",
            ) from error
    word, words = placement.partition(":")[0], ("cpu", "disk", "auto", "cuda", accelerator_kind())
    if word not in words:
        raise SetupError(
            f"{option} {placement} is not a device map.{nearest(word, filter(None, words))}",
            found=placement,
            expected="cpu, disk, auto, cuda:0, or a device map in JSON",
            fix="Use one of these values.",
        )
    return {"": placement}


def load_model(
    path: str | os.PathLike,
    device_map: str | dict | None = None,
    dtype: str = "float32",
    kernel: str = "auto",
    trust_remote_code: bool = False,
) -> Any:
    """Loads a causal language model, quantized or not, with hfq.

    Args:
        path: Folder of the checkpoint.
        device_map: See `as_device_map`.
        dtype: Dtype of activations and unquantized tensors: `float32`, `bfloat16`, `float16`, or `auto` for
            the checkpoint's own.
        kernel: Same as for `HfqConfig`.
        trust_remote_code: True to run Python code that the checkpoint contains.

    Raises:
        HfqError: The model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hfq.loading.config import HfqConfig

    if dtype != "auto" and dtype not in DTYPES:
        raise SetupError(
            f"Dtype {dtype!r} is not valid.{nearest(dtype, DTYPES)}",
            expected=f"auto, {', '.join(DTYPES)}",
            found=dtype,
            fix="Use one of these values.",
        )
    device_map = as_device_map(device_map)
    logging.disable_progress_bar()
    config = HfqConfig(kernel=kernel)
    return AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=config,
        dtype=DTYPES.get(dtype, dtype),
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    ).eval()


def text_config(path: str | os.PathLike, trust_remote_code: bool = False) -> Any:
    """Returns the config of a checkpoint's language model.

    Args:
        path: Folder of the checkpoint, or path of a GGUF file.
        trust_remote_code: True to run Python code that the checkpoint contains.

    Raises:
        HfqError: The checkpoint is missing, or transformers does not know the model.
    """
    from transformers import AutoConfig

    from hfq.checkpoint import Checkpoint
    from hfq.loading.gguf.metadata_config import config_of_gguf

    checkpoint = Checkpoint.open(path)
    trust = {"trust_remote_code": trust_remote_code}
    try:
        with refusing_custom_code(path):
            config = config_of_gguf(checkpoint.root, checkpoint, trust)
            return (config or AutoConfig.from_pretrained(checkpoint.root, **trust)).get_text_config()
    except HfqError:
        raise
    except Exception as error:  # configs with custom code raise any type
        raise SetupError(
            "transformers cannot read the checkpoint's config.",
            file=path,
            expected="config.json of a causal language model",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            fix="Restore the model's original config.json.",
        ) from error


class ModelSize:
    """Size of a loaded model's checkpoint.

    Attributes:
        nbytes: Bytes of the safetensors files, including headers.
        weights: Number of weights: in × out for every quantized layer, and all elements of unquantized
            tensors.
        bits_per_weight: Bits of all stored tensors divided by all weights.
        bits_per_quantized_weight: Bits of quantized layers (codes, scales, zero points, indices, and biases)
            divided by their weights. None if no layer is quantized.
        formats: Formats of the quantized layers.
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
        self.formats = loading.describe_formats() or "unquantized"
