"""hfq and llama.cpp as contenders: each loads a model, and runs random tokens in contexts."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["RUNTIMES", "Hfq", "LlamaCpp"]

_CONTEXT = 1024


class Hfq:
    """hfq in transformers.

    Args:
        path: The checkpoint.
        threads: Number of threads.
        device_map: Argument of `from_pretrained`.
    """

    def __init__(self, path: str, threads: int, device_map: Any = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from hfq import HfqConfig

        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._load = lambda: AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=HfqConfig(), device_map=device_map or {"": "cpu"}
        )
        self._cache: Any = None

    def load(self) -> None:
        """Loads the model."""
        self.model = self._load()
        self._tokens = random.Random(0)

    def start(self) -> None:
        """Starts an empty context."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self.model.config)

    def run(self, count: int) -> None:
        """Runs `count` random tokens behind the context."""
        import torch

        size = self.model.config.vocab_size
        tokens = torch.tensor([[self._tokens.randrange(size) for _ in range(count)]])
        with torch.inference_mode():
            found = self.model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        found.logits[0, -1, 0].item()

    def hits(self) -> tuple[int, int]:
        """Returns the routed experts so far that were cached, and all of them."""
        import hfq

        report = hfq.report(self.model).offload
        if report is None:
            return 0, 0
        return report.expert_hits, report.expert_hits + report.expert_misses


class LlamaCpp:
    """llama.cpp by the package llama_cpp, with mapped weights that are not repacked.

    Args:
        path: The GGUF file.
        threads: Number of threads.
        device_map: Ignored; its weights are mapped.
    """

    def __init__(self, path: str, threads: int, device_map: Any = None) -> None:
        import llama_cpp

        self._lib, self._path, self._threads = llama_cpp, path.encode(), threads
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()

    def load(self) -> None:
        """Loads the model and makes its context."""
        lib = self._lib
        options = lib.llama_model_default_params()
        options.use_extra_bufts = False
        self._model = lib.llama_model_load_from_file(self._path, options)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the model")
        sizes = lib.llama_context_default_params()
        sizes.n_ctx, sizes.n_batch, sizes.n_ubatch = _CONTEXT, 512, 512
        sizes.n_threads = sizes.n_threads_batch = self._threads
        self._context = lib.llama_init_from_model(self._model, sizes)
        self._size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._tokens = random.Random(0)

    def start(self) -> None:
        """Starts an empty context."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def run(self, count: int) -> None:
        """Runs `count` random tokens behind the context."""
        lib = self._lib
        tokens = (lib.llama_token * count)(*[self._tokens.randrange(self._size) for _ in range(count)])
        if status := lib.llama_decode(self._context, lib.llama_batch_get_one(tokens, count)):
            raise RuntimeError(f"llama_decode returned {status}")
        lib.llama_get_logits_ith(self._context, -1)

    def hits(self) -> tuple[int, int]:
        """Returns zeros: the kernel's page cache decides."""
        return 0, 0


RUNTIMES = {"hfq": Hfq, "llama.cpp": LlamaCpp}
"""Contenders, by name."""
