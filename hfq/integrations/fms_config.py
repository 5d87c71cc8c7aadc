"""A checkpoint's config as FMS takes it: the architecture and its parameters, with the quantization out of sight."""

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
from hfq.formats.source import source_config
from hfq.integrations.matching import Match, match_model
from hfq.integrations.preflight import check_sizes, open_local

__all__ = ["Source", "read_source"]

_DEFAULT_ROPE = ("default", None)
_SCALED_ROPE = {"llama": ("llama3",)}
"""FMS architectures that take parameters for scaling RoPE, and the kinds that compute what transformers computes."""


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
    match: Match
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
            "hfq.fms reads a folder.", expected="the folder of a checkpoint", found=repr(os.fspath(path)),
            fix="download it first: hf download NAME, and pass the folder that it prints",
        )  # fmt: skip
    check_sizes(checkpoint)
    plain = _without_quantization(config if config is not None else transformers.AutoConfig.from_pretrained(path))
    match = match_model(_skeleton(plain), checkpoint, source_config(checkpoint) or {})
    params = _params(plain)
    head_dim = getattr(plain, "head_dim", None) or plain.hidden_size // plain.num_attention_heads
    return Source(checkpoint, match, params.pop("architecture"), params, plain.dtype, head_dim)


def _params(config: PreTrainedConfig) -> dict[str, Any]:
    """What FMS's builder makes of a config.

    FMS 1.13 looks for `rope_scaling` within `rope_parameters`, where transformers 5 has none, so that scaled RoPE would be lost.
    """
    try:
        params = type(_FMS_MODEL_CONFIG_REGISTRY).hf_config_to_fms_config_params(_FMS_MODEL_CONFIG_REGISTRY, config, None)
    except (KeyError, AttributeError, ValueError) as error:
        known = sorted(_FMS_MODEL_CONFIG_REGISTRY.model_arch_mappings)
        raise SetupError(
            "FMS does not build this model; nothing was loaded.", expected=", ".join(known), found=f"{config.architectures}: {error}",
            fix="load it with transformers: from_pretrained(path, quantization_config=HfqConfig())",
        ) from error  # fmt: skip
    params.pop("model_path", None)
    params.setdefault("multiple_of", 1)  # Mistral's builder leaves FMS to round the inner size up
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    if theta is not None:
        params.setdefault("rope_theta", theta)  # Qwen3's builder gives it another name, which FMS's config does not know
    if config.pad_token_id is not None:
        params.setdefault("pad_id", config.pad_token_id)  # a default may lie beyond the vocabulary
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind in _SCALED_ROPE.get(params["architecture"], ()):
        params["rope_scaling"] = dict(rope)
    elif kind not in _DEFAULT_ROPE:
        raise SetupError(
            "FMS would leave out how this model scales RoPE; nothing was loaded.", expected="rope_type default",
            found=f"rope_type {kind}", fix="load it with transformers: from_pretrained(path, quantization_config=HfqConfig())",
        )  # fmt: skip
    return params


def _without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def _skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """transformers' model on meta: it knows every layer's size and the names that checkpoints use."""
    names = config.architectures or [None]
    cls = getattr(transformers, str(names[0]), None)
    if cls is None:
        raise SetupError(
            "config.json names no architecture that transformers has; nothing was loaded.", expected="architectures in config.json",
            found=names[0], fix="restore the checkpoint's own config.json",
        )  # fmt: skip
    with torch.device("meta"):
        return cls._from_config(config)
