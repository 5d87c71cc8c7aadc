"""Loads of models, and the measured tokens that the parts about models have in common."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.timing import capture, device_seconds, reset_peak
from hfq.loading.loaded_model import loader_of
from hfq.offload.spans import Span
from hfq.runtime.predicted_memory import predict_memory
from hfq.runtime.timeline import timeline

__all__ = [
    "Decoding",
    "busy_shares",
    "count_waits",
    "free",
    "load",
    "peak_over_plan",
    "prefill_seconds",
    "replay_seconds",
]


def load(path: Path, device_map: dict[str, Any], **options: Any) -> tuple[Any, float]:
    """Loads a checkpoint with hfq.

    Args:
        path: The checkpoint.
        device_map: Device by module.
        options: Options of `HfqConfig`.

    Returns:
        The model, and the seconds of its load.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hfq import HfqConfig

    logging.disable_progress_bar()
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=HfqConfig(**options), device_map=device_map, dtype="auto"
    )
    main = torch.device(loader_of(model).main)
    torch.accelerator.synchronize(main)
    return model.eval(), time.perf_counter() - started


WAITED_TOKENS = 3


class Decoding:
    """A model that decodes token by token; the host never waits for the device.

    Args:
        model: A causal language model.
        device: The device of the tokens.
        batch: Number of sequences.
        prompt: Tokens of each sequence before the first decoded one.
    """

    def __init__(self, model: Any, device: torch.device, batch: int = 1, prompt: int = 8) -> None:
        self.model, self.device, self.context = model, device, prompt
        with torch.inference_mode():
            tokens = torch.arange(batch * prompt, device=device).view(batch, prompt) % model.config.vocab_size
            self._out = model(tokens, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def token(self) -> None:
        """Decodes one token of each sequence."""
        chosen = self._out.logits[:, -1:].argmax(-1)
        self._out = self.model(chosen, past_key_values=self._out.past_key_values, use_cache=True)
        self.context += 1

    def seconds(self, tokens: int) -> float:
        """Returns the seconds of a token, from the host's clock around all of them."""
        self.token()
        torch.accelerator.synchronize(self.device)
        started = time.perf_counter()
        for _ in range(tokens):
            self.token()
        torch.accelerator.synchronize(self.device)
        return (time.perf_counter() - started) / tokens


def prefill_seconds(model: Any, device: torch.device, length: int) -> float:
    """Returns the median seconds of the forward pass of a prompt."""
    tokens = torch.arange(length, device=device)[None] % model.config.vocab_size
    with torch.inference_mode():
        return device_seconds(lambda: model(tokens, use_cache=True, logits_to_keep=1), device, times=3)


def replay_seconds(model: Any, device: torch.device, batch: int) -> float:
    """Returns the median seconds of a token that a graph decodes, with a static cache.

    Raises:
        NotAvailable: The device has no graphs.
        RuntimeError: The model cannot be captured.
    """
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=64)
    token = torch.ones(batch, 1, dtype=torch.long, device=device)
    position = torch.full((1, 1), 8, dtype=torch.long, device=device)
    with torch.inference_mode():

        def step() -> None:
            model(
                token,
                past_key_values=cache,
                position_ids=position,
                cache_position=position[0],
                use_cache=True,
            )

        return device_seconds(capture(step, device), device, times=9)


def count_waits(decoding: Decoding, tokens: int = WAITED_TOKENS) -> tuple[int, str]:
    """Returns how often the host waited for the device while it decoded some tokens, and where."""
    module = torch.get_device_module(decoding.device)
    if hasattr(module, "take_counts"):  # the simulated accelerator
        module.take_counts()
        for _ in range(tokens):
            decoding.token()
        counts = module.take_counts()
        names = ("waited", "device synchronizations", "stream synchronizations")
        found = {name: counts[name] for name in names if counts.get(name)}
        return sum(found.values()), ", ".join(f"{number} {name}" for name, number in found.items())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            for _ in range(tokens):
                decoding.token()
        finally:
            module.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchronizing" in str(each.message)]
    where = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in waits)
    return len(waits), ", ".join(f"{count} in {place}" for place, count in where.most_common(3))


def busy_shares(decoding: Decoding, tokens: int = 3) -> dict[str, float]:
    """Returns the shares of some recorded passes in which the device copies and computes units."""
    decoding.token()
    with timeline(decoding.model) as found:
        for _ in range(tokens):
            decoding.token()
    passes = [span for span in found.spans if span.track == "pass"]
    first, last = min(span.start for span in passes), max(span.end for span in passes)
    return {
        track: _covered((span for span in found.spans if span.track in tracks), first, last) / (last - first)
        for track, tracks in {"copy": {"copy"}, "compute": {"compute", "other"}}.items()
    }


def _covered(spans: Iterator[Span], first: float, last: float) -> float:
    """Returns the seconds between two times that at least one span covers."""
    covered, until = 0.0, first
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, until), min(span.end, last)
        if end > start:
            covered, until = covered + end - start, end
    return covered


def peak_over_plan(decoding: Decoding, batch: int = 1) -> dict[str, float]:
    """Returns the peak of the device's memory while a token is decoded, and what was planned, in bytes."""
    loading = loader_of(decoding.model)
    reset_peak(decoding.device)
    decoding.token()
    torch.accelerator.synchronize(decoding.device)
    peak = torch.get_device_module(decoding.device).max_memory_allocated(decoding.device)
    planned = predict_memory(loading, batch, batch * decoding.context)
    return {"peak": peak, "planned": planned.get(str(loading.main), 0)}


@contextlib.contextmanager
def free(device: torch.device) -> Iterator[None]:
    """Frees the memory of models that the context leaves behind."""
    try:
        yield
    finally:
        gc.collect()
        with contextlib.suppress(RuntimeError):
            reset_peak(device)
