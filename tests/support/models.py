"""Loads of models through hfq, and single forward passes, for all tests that do not test these."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.errors import HfqError
from tests.support import tiny_models

__all__ = ["GPTQ", "finish_reads", "load", "logits"]

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
    """Loads a checkpoint by `from_pretrained`.

    Args:
        path: A checkpoint.
        device_map: Map of modules, or "auto"; None puts all weights in CPU memory.
        cls: The class whose `from_pretrained` is called.
        dtype: Dtype of activations; None for that of the checkpoint.
        max_memory: Limits of an automatic device map.
        offload_folder: Folder for the files of quantize on load.
        options: Options of `HfqConfig`.
    """
    arguments = {"dtype": dtype, "max_memory": max_memory, "offload_folder": offload_folder}
    given = {name: value for name, value in arguments.items() if value is not None}
    return cls.from_pretrained(path, quantization_config=HfqConfig(**options), device_map=device_map, **given)


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits of one forward pass without gradients.

    Args:
        model: A causal language model.
        tokens: [batch, length].
    """
    with torch.no_grad():
        return model(input_ids=tokens).logits


def finish_reads(model: Any) -> None:
    """Waits until the units read ahead are read and their copies have started; errors are not raised."""
    offloader = model.hf_quantizer.loading.offloader
    for index, unit in enumerate(offloader.units if offloader is not None else ()):
        ticket = offloader.buffers[unit.device].ticket_of(index)
        if ticket is not None:
            with contextlib.suppress(HfqError, RuntimeError):
                ticket.wait()
