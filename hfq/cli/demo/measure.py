"""Measurements of `hfq demo` for one checkpoint in one placement."""

from __future__ import annotations

import hashlib
import resource
import time
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# (its code is in memory before memory is measured)
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.utils import logging

from hfq import HfqConfig
from hfq.evaluation.perplexity import perplexity

__all__ = ["measure"]

PROMPT = "Return a list of the"
_EVALUATION_TOKENS = 8192


def measure(path: Path, text: Path, placement: str) -> dict:
    """Loads and measures one checkpoint in one placement, in this process."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = (
        {}
        if placement == "plain transformers"
        else {"quantization_config": HfqConfig(), "device_map": _device_map(placement)}
    )
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, **options
    )
    load_seconds = time.perf_counter() - started
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = model(**prompt).logits
    started = time.perf_counter()
    generated = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    seconds = time.perf_counter() - started
    new_tokens = generated.shape[1] - prompt["input_ids"].shape[1]
    tokens = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0][
        :_EVALUATION_TOKENS
    ]
    score = perplexity(model, tokens)
    loading = getattr(getattr(model, "hf_quantizer", None), "loading", None)
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "placement": placement,
        "file_nbytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "resident_nbytes": loading.plan.resident_nbytes() if loading else dense,
        "peak_rss_growth_nbytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
        "load_seconds": round(load_seconds, 3),
        "perplexity": round(score, 4),
        "tokens_per_second": round(new_tokens / seconds, 1),
        "logits_sha256": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "text": tokenizer.decode(generated[0]),
    }


def _device_map(placement: str) -> dict[str, str]:
    if placement == "half on disk":
        return {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}
    return {"": "disk"} if placement == "all on disk" else {"": "cpu"}
