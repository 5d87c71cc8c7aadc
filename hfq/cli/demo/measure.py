"""Measurements of `hfq demo` for one load of its model."""

from __future__ import annotations

import hashlib
import time
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

# (its code is in memory before memory is measured)
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.utils import logging

from hfq import HfqConfig

__all__ = ["measure"]

_PROMPT_TOKENS, _NEW_TOKENS = 8, 8


def measure(path: Path, tool: str, max_memory: int | None) -> dict:
    """Loads the model in this process, and generates tokens.

    Args:
        path: The checkpoint.
        tool: `hfq`, or another word for plain transformers.
        max_memory: Bytes that hfq may use on the CPU; None for all.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    options: dict = {"quantization_config": HfqConfig(), "device_map": "cpu"} if tool == "hfq" else {}
    if max_memory is not None:
        options |= {"device_map": "auto", "max_memory": {"cpu": max_memory}}
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, trust_remote_code=False, **options
    )
    load_seconds = time.perf_counter() - started
    tokens = torch.arange(_PROMPT_TOKENS)[None] + 3
    with torch.no_grad():
        logits = model(tokens).logits.float()
    started = time.perf_counter()
    generated = model.generate(
        tokens, max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    seconds = time.perf_counter() - started
    loading = getattr(getattr(model, "hf_quantizer", None), "loading", None)
    by_device = loading.plan.nbytes_by_device() if loading else {}
    answer = logits.numpy().tobytes() + generated.numpy().tobytes()
    return {
        "disk_nbytes": by_device.get("disk", 0),
        "load_seconds": round(load_seconds, 3),
        "tokens_per_second": round(_NEW_TOKENS / seconds, 2),
        "new_tokens": generated[0, _PROMPT_TOKENS:].tolist(),
        "answer_sha256": hashlib.sha256(answer).hexdigest(),
    }
