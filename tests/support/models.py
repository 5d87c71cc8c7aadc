"""Loads models through hfq and runs them once, for every test that does not look at how."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from tests.support import tiny_models

__all__ = ["GPTQ", "load", "logits"]

GPTQ = tiny_models.DATA / "tiny-llama-gptq"


def load(
    path: Path | str = GPTQ,
    device_map: Any = None,
    *,
    cls: Any = AutoModelForCausalLM,
    dtype: torch.dtype | str | None = torch.float32,
    max_memory: dict | None = None,
    offload_folder: Path | None = None,
    **options: Any,
) -> Any:
    """Loads a checkpoint by `from_pretrained`, whose arguments those before `options` are.

    Args:
        path: A checkpoint.
        device_map: Of modules, or "auto"; all weights are in CPU memory by default.
        cls: The class whose `from_pretrained` is called.
        dtype: Of activations; that of the checkpoint if None.
        max_memory: Limits of an automatic device map.
        offload_folder: Where quantize on load keeps its files.
        options: Of `HfqConfig`.
    """
    arguments = {"dtype": dtype, "max_memory": max_memory, "offload_folder": offload_folder}
    given = {name: value for name, value in arguments.items() if value is not None}
    return cls.from_pretrained(path, quantization_config=HfqConfig(**options), device_map=device_map, **given)


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of one forward pass without gradients.

    Args:
        model: A causal language model.
        tokens: [batch, length].
    """
    with torch.no_grad():
        return model(input_ids=tokens).logits
