"""FMS's config of a checkpoint: architecture and parameters, without quantization."""

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
from hfq.loading.argument_checks import open_local
from hfq.loading.config_checks import check_sizes
from hfq.loading.custom_code import refusing_custom_code
from hfq.loading.matching.match import CheckpointMatch, match_model

__all__ = ["TESTED", "Source", "read_source"]

TESTED = ("llama", "granite", "mistral", "qwen3", "gpt_bigcode", "granite_moe_hybrid")
"""FMS architectures whose logits the tests compare with transformers.

Others may return different logits.
"""
_DEFAULT_ROPE = ("default", None)
_SCALED_ROPE = {"llama": ("llama3",)}
"""FMS architectures that support scaled RoPE, with the RoPE types that match transformers."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, its match with the meta model of transformers, and its config in FMS.

    Attributes:
        checkpoint: The validated checkpoint.
        match: The quantized and unquantized tensors.
        architecture: Name of the architecture in FMS.
        params: Parameters of FMS's config.
        dtype: Dtype of unquantized tensors in config.json, or None.
        head_dim: Size of an attention head, or None if unknown.
    """

    checkpoint: Checkpoint
    match: CheckpointMatch
    architecture: str
    params: dict[str, Any]
    dtype: torch.dtype | None
    head_dim: int | None


def read_source(path: str | os.PathLike, config: PreTrainedConfig | None = None) -> Source:
    """Opens and matches a checkpoint, and derives its FMS config.

    Args:
        path: The checkpoint's folder.
        config: The checkpoint's config, or None to read it. It is not changed.

    Raises:
        CheckpointError: The folder holds no checkpoint, or a damaged one.
        FormatError: The checkpoint does not match the model's class.
        SetupError: FMS does not support the architecture, or would ignore a part of the config.
    """
    checkpoint = open_local(path, {})
    if checkpoint is None:
        raise SetupError(
            "hfq.fms requires a local folder.",
            expected="the folder of a checkpoint",
            found=repr(os.fspath(path)),
            fix="Run hf download NAME, and pass the folder that it prints.",
        )
    checkpoint.check_safetensors("Nothing was loaded")
    check_sizes(checkpoint)
    with refusing_custom_code(path):
        plain = _without_quantization(
            config or transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        )
    match = match_model(_meta_model(plain), checkpoint, source_config(checkpoint) or {})
    params = _params(plain)
    head_dim = getattr(plain, "head_dim", None) or plain.hidden_size // plain.num_attention_heads
    return Source(checkpoint, match, params.pop("architecture"), params, plain.dtype, head_dim)


def _params(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the parameters that FMS derives from a config.

    FMS 1.13 looks for `rope_scaling` in `rope_parameters`. transformers 5 does not store it there, so FMS
    alone would lose scaled RoPE.
    """
    try:
        params = type(_FMS_MODEL_CONFIG_REGISTRY).hf_config_to_fms_config_params(
            _FMS_MODEL_CONFIG_REGISTRY, config, None
        )
    except (KeyError, AttributeError, ValueError) as error:
        known = sorted(_FMS_MODEL_CONFIG_REGISTRY.model_arch_mappings)
        raise SetupError(
            "FMS does not support this model. Nothing was loaded.",
            expected=", ".join(known),
            found=f"{config.architectures}: {error}",
            fix="Load it with transformers: from_pretrained(path, quantization_config=HfqConfig()).",
        ) from error
    params.pop("model_path", None)
    if params["architecture"] not in TESTED:
        raise SetupError(
            "FMS's implementation of this architecture has not been compared with transformers. Nothing "
            "was loaded.",
            expected=", ".join(TESTED),
            found=params["architecture"],
            fix="Load it with transformers: from_pretrained(path, quantization_config=HfqConfig()).",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    told: dict[
        str, Any
    ] = {  # values that some builders leave at FMS's defaults; configs without these fields ignore them
        "multiple_of": 1,
        "pad_id": config.pad_token_id,
        "rope_theta": rope.get("rope_theta"),
        "activation_fn": getattr(config, "activation_function", None) or getattr(config, "hidden_act", None),
    }
    params = {key: value for key, value in told.items() if value is not None} | params
    return params | _scaling(config, rope, params["architecture"])


def _scaling(config: PreTrainedConfig, rope: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Returns FMS's parameters for scaled RoPE.

    Raises:
        SetupError: FMS would ignore scaled RoPE or a sliding window of the config.
    """
    kind, share = rope.get("rope_type"), rope.get("partial_rotary_factor")
    is_scaled = kind in _SCALED_ROPE.get(architecture, ())
    if (kind not in _DEFAULT_ROPE and not is_scaled) or (share or 1.0) != 1.0:
        raise SetupError(
            "FMS would ignore this model's RoPE parameters. Nothing was loaded.",
            found=f"rope_parameters {rope}",
            expected="rope_type default, for whole heads",
            fix="Load it with transformers: from_pretrained(path, quantization_config=HfqConfig()).",
        )
    window = getattr(config, "sliding_window", None)
    if architecture == "mistral" and window is not None and window < config.max_position_embeddings:
        raise SetupError(
            "FMS's mistral does not support a sliding window, so longer inputs would give different logits. "
            "Nothing was loaded.",
            expected="no sliding_window, or one that covers all positions",
            found=f"sliding_window {window} of {config.max_position_embeddings} positions",
            fix="Load it with transformers. For inputs within the window, you can instead set "
            "max_position_embeddings to the window in config.json.",
        )
    return {"rope_scaling": dict(rope)} if is_scaled else {}


def _without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def _meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the meta model of transformers, which has every layer's size and checkpoint name."""
    names = config.architectures or [None]
    cls = getattr(transformers, str(names[0]), None)
    if cls is None:
        raise SetupError(
            "config.json names no architecture that transformers supports. Nothing was loaded.",
            expected="architectures in config.json",
            found=names[0],
            fix="Restore the checkpoint's own config.json.",
        )
    with torch.device("meta"):
        return cls._from_config(config)
