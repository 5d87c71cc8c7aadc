"""Configs of conversions from and to GGUF, which the metadata of the file must confirm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hfq.checkpoint import Checkpoint, Reader
from hfq.errors import FormatError
from hfq.loading.gguf.metadata_config import (
    check_metadata,
    check_rope_tensors,
    config_of_gguf,
    rope_parameters,
    unsaid_rope,
)

__all__ = ["check_template", "with_model_config"]

_SCALED = {
    "rope_freqs.weight": ("llama3",),
    "rope_factors_long.weight": ("longrope", "su"),
}
"""Types of RoPE whose factors a GGUF file stores, by the name of the tensor."""

_WRITTEN = ("default", "linear", "yarn", "llama3", "longrope", "su")
"""Types of RoPE that a GGUF file can tell."""


def with_model_config(source: Checkpoint) -> Checkpoint:
    """Returns a GGUF file with the config of the language model alone.

    Raises:
        FormatError: There is no config for this file, or it contradicts the metadata.
        SetupError: The package `gguf` is not installed, and there is no config.json.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    made = config_of_gguf(source.root, source, {})
    config = AutoConfig.from_pretrained(source.root) if made is None else made
    check_metadata(config, source)
    check_rope_tensors(config, source, Reader(source))
    stored = dict(source.config)
    if made is not None:
        stored = json.loads(made.to_json_string())
        stored["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[made.model_type]]
    if stored.get("dtype") is None and stored.get("torch_dtype") is None:
        stored["dtype"] = "float32"  # the dtype in which hfq loads a GGUF file by default
    return dataclasses.replace(source, config=stored)


def check_template(source: Checkpoint, template: Checkpoint) -> None:
    """Checks that the metadata of a GGUF file do not contradict the config of a checkpoint.

    Raises:
        FormatError: They differ; the file lacks the base, the scaling, or the factors of RoPE; or no file can
            tell how the model computes RoPE.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.root)
    _check_rope_types(config, source)
    check_metadata(config, template, is_template=True)
    check_rope_tensors(config, template, Reader(template), is_template=True)
    for key, wanted in unsaid_rope(config, template):
        raise FormatError(
            "The template does not say how this model computes RoPE. Nothing was written.",
            file=next(iter(template.headers)),
            expected=f"the key {key}, because of {wanted} of the config",
            found="no such key",
            fix="Pass another GGUF file of this model.",
        )
    for name in _missing_factors(config, template):
        raise FormatError(
            "The template lacks a tensor of this model. Nothing was written.",
            file=next(iter(template.headers)),
            tensor=name,
            expected="the factors by which the config scales the frequencies of RoPE",
            found="no such tensor",
            fix="Pass a GGUF file of this model that holds its weights.",
        )


def _check_rope_types(config: Any, source: Checkpoint) -> None:
    for found in rope_parameters(config.get_text_config(decoder=True)):
        kind = found.get("rope_type")
        if kind is not None and kind not in _WRITTEN:
            raise FormatError(
                "No GGUF file can say how this model computes RoPE. Nothing was written.",
                file=Path(source.root, "config.json"),
                expected=f"a rope_type of {', '.join(_WRITTEN)}",
                found=str(kind),
                fix="Keep the checkpoint unchanged.",
            )


def _missing_factors(config: Any, template: Checkpoint) -> list[str]:
    checked = {} if template.gguf is None else template.gguf.checked
    text = config.get_text_config(decoder=True)
    kind = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    return [name for name, kinds in _SCALED.items() if kind in kinds and name not in checked]
