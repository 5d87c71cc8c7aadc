"""A checkpoint's config as FMS takes it: the architecture and its parameters, with the quantization out of
sight.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from fms.models.hf.config_utils import _FMS_MODEL_CONFIG_REGISTRY
from transformers import PreTrainedConfig, PreTrainedModel

from hfq.checkpoint import Checkpoint
from hfq.errors import SetupError
from hfq.formats.configs.source_config import source_config
from hfq.loading.argument_checks import check_sizes, open_local
from hfq.loading.matching.match import CheckpointMatch, match_model

__all__ = ["TESTED", "Source", "read_source"]

TESTED = ("llama", "granite", "mistral", "qwen3", "gpt_bigcode", "granite_moe_hybrid")
"""FMS architectures whose logits are compared with transformers' by the tests; others compute something else,
or may.
"""
_DEFAULT_ROPE = ("default", None)
_SCALED_ROPE = {"llama": ("llama3",)}
"""FMS architectures that take parameters for scaling RoPE, and the kinds that compute what transformers
computes.
"""


@dataclass(frozen=True)
class Source:
    """A checkpoint, matched with transformers' own skeleton of its model, and what FMS calls that model.

    Attributes:
        checkpoint: The validated checkpoint.
        match: What is packed and what is dense.
        architecture: FMS's name of the architecture.
        params: The parameters of FMS's config.
        dtype: The dtype that config.json gives dense tensors, if any.
        head_dim: The size of an attention head, where config.json or its class says.
    """

    checkpoint: Checkpoint
    match: CheckpointMatch
    architecture: str
    params: dict[str, Any]
    dtype: torch.dtype | None
    head_dim: int | None


def read_source(path: str | os.PathLike, config: PreTrainedConfig | None = None) -> Source:
    """Opens and matches a checkpoint, and asks FMS for its config.

    Args:
        path: The checkpoint's folder.
        config: Its config, where it has been read before; left as it is.

    Raises:
        CheckpointError: The folder holds no checkpoint, or a damaged one.
        FormatError: The checkpoint does not match the model's class.
        SetupError: FMS does not know the architecture, or would compute something else than the config says.
    """
    checkpoint = open_local(path, {})
    if checkpoint is None:
        raise SetupError(
            "hfq.fms reads a folder.",
            expected="the folder of a checkpoint",
            found=repr(os.fspath(path)),
            fix="download it first: hf download NAME, and pass the folder that it prints",
        )
    check_sizes(checkpoint)
    plain = _without_quantization(
        config if config is not None else transformers.AutoConfig.from_pretrained(path)
    )
    match = match_model(_meta_model(plain), checkpoint, source_config(checkpoint) or {})
    params = _params(plain)
    head_dim = getattr(plain, "head_dim", None) or plain.hidden_size // plain.num_attention_heads
    return Source(checkpoint, match, params.pop("architecture"), params, plain.dtype, head_dim)


def _params(config: PreTrainedConfig) -> dict[str, Any]:
    """What FMS's builder makes of a config.

    FMS 1.13 looks for `rope_scaling` within `rope_parameters`, where transformers 5 has none, so that scaled
    RoPE would be lost.
    """
    try:
        params = type(_FMS_MODEL_CONFIG_REGISTRY).hf_config_to_fms_config_params(
            _FMS_MODEL_CONFIG_REGISTRY, config, None
        )
    except (KeyError, AttributeError, ValueError) as error:
        known = sorted(_FMS_MODEL_CONFIG_REGISTRY.model_arch_mappings)
        raise SetupError(
            "FMS does not build this model. Nothing was loaded.",
            expected=", ".join(known),
            found=f"{config.architectures}: {error}",
            fix="load it with transformers: from_pretrained(path, quantization_config=HfqConfig())",
        ) from error
    params.pop("model_path", None)
    if params["architecture"] not in TESTED:
        raise SetupError(
            "FMS's model of this architecture was not compared with transformers' of the same name. Nothing "
            "was loaded.",
            expected=", ".join(TESTED),
            found=params["architecture"],
            fix="load it with transformers: from_pretrained(path, quantization_config=HfqConfig())",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    told: dict[
        str, Any
    ] = {  # what some builders leave to FMS's defaults; a config that has no such field ignores it
        "multiple_of": 1,
        "pad_id": config.pad_token_id,
        "rope_theta": rope.get("rope_theta"),
        "activation_fn": getattr(config, "activation_function", None) or getattr(config, "hidden_act", None),
    }
    params = {key: value for key, value in told.items() if value is not None} | params
    return params | _scaling(config, rope, params["architecture"])


def _scaling(config: PreTrainedConfig, rope: dict[str, Any], architecture: str) -> dict[str, Any]:
    """How FMS is told to scale RoPE; and what of RoPE, or of a sliding window, it would leave out is
    refused.
    """
    kind, share = rope.get("rope_type"), rope.get("partial_rotary_factor")
    is_scaled = kind in _SCALED_ROPE.get(architecture, ())
    if (kind not in _DEFAULT_ROPE and not is_scaled) or (share or 1.0) != 1.0:
        raise SetupError(
            "FMS would leave out how this model scales RoPE. Nothing was loaded.",
            found=f"rope_parameters {rope}",
            expected="rope_type default, for whole heads",
            fix="load it with transformers: from_pretrained(path, quantization_config=HfqConfig())",
        )
    window = getattr(config, "sliding_window", None)
    if architecture == "mistral" and window is not None and window < config.max_position_embeddings:
        raise SetupError(
            "FMS's mistral knows no sliding window, and would be another model beyond it. Nothing was "
            "loaded.",
            expected="no sliding_window, or one of all positions",
            found=f"sliding_window {window} of {config.max_position_embeddings}",
            fix="load it with transformers; or, for inputs within the window, set max_position_embeddings to "
            "it in config.json",
        )
    return {"rope_scaling": dict(rope)} if is_scaled else {}


def _without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def _meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """transformers' model on meta: it knows every layer's size and the names that checkpoints use."""
    names = config.architectures or [None]
    cls = getattr(transformers, str(names[0]), None)
    if cls is None:
        raise SetupError(
            "config.json names no architecture that transformers has. Nothing was loaded.",
            expected="architectures in config.json",
            found=names[0],
            fix="restore the checkpoint's own config.json",
        )
    with torch.device("meta"):
        return cls._from_config(config)
