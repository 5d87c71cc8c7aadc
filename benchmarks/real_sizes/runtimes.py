"""Contenders: each loads a model, and runs random tokens in contexts."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["RUNTIMES", "Accelerate", "Hfq", "LlamaCpp", "Transformers"]

_CONTEXT = 1024
_ENDS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


class Transformers:
    """A model in plain transformers.

    Args:
        path: The checkpoint.
        threads: Number of threads.
        device_map: Argument of `from_pretrained`.
    """

    def __init__(self, path: str, threads: int, device_map: Any = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._from_pretrained = AutoModelForCausalLM.from_pretrained  # imported before a load is timed
        self._path, self._device_map = path, device_map or {"": "cpu"}
        self._cache: Any = None

    def load(self) -> None:
        """Loads the model."""
        import torch

        self.model = self._from_pretrained(
            self._path, dtype=torch.bfloat16, device_map=self._device_map, **self._options()
        )
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

    def counters(self) -> dict[str, int]:
        """Returns counts so far; none are known."""
        return {}

    def _options(self) -> dict[str, Any]:
        return {}


class Hfq(Transformers):
    """hfq in transformers.

    Args:
        path: The checkpoint.
        threads: Number of threads.
        device_map: Argument of `from_pretrained`.
        options: Options of `HfqConfig`.
        attention: Argument `attn_implementation` of `from_pretrained`; None for its default.
    """

    def __init__(
        self,
        path: str,
        threads: int,
        device_map: Any = None,
        options: Mapping[str, Any] | None = None,
        attention: str | None = None,
    ) -> None:
        super().__init__(path, threads, device_map)
        self._config, self._attention = options or {}, attention

    def counters(self) -> dict[str, int]:
        """Returns routed experts so far, those that were cached, and bytes needed from disk.

        An expert that a guess began to read counts as cached, and its bytes as needed.
        """
        import hfq
        from hfq.loading.loaded_model import loader_of

        report = hfq.report(self.model).offload
        if report is None:
            return {}
        experts = loader_of(self.model).offloader.experts.experts
        nbytes = sum(info.nbytes for expert in experts for info in expert.infos) // max(len(experts), 1)
        read = report.expert_misses + report.expert_guesses_used
        return {
            "hits": report.expert_hits,
            "lookups": report.expert_hits + report.expert_misses,
            "needed": report.passes * report.pass_nbytes + read * nbytes,
        }

    def predict(self, profile: Path, context: int, recorded: int = 0) -> float:
        """Returns the predicted seconds of a token.

        Args:
            profile: Machine profile.
            context: Number of tokens before it.
            recorded: Number of random tokens that run first, in an empty context, and whose routing tells the
                hits of the expert cache. 0 predicts them as `hfq.report` does.
        """
        import hfq
        from hfq.loading.loaded_model import loader_of
        from hfq.placement.estimate.profile import read_profile
        from hfq.runtime.predicted_speed import predict_step

        routing = None
        if recorded:
            with hfq.record_routing(self.model) as routing:
                self.start()
                self.run(recorded)
        loader, rates = loader_of(self.model), read_profile(profile)
        return predict_step(loader, rates, context=context, routing=routing).step_seconds

    def _options(self) -> dict[str, Any]:
        from hfq import HfqConfig

        more = {} if self._attention is None else {"attn_implementation": self._attention}
        return {"quantization_config": HfqConfig(**self._config), **more}


class Accelerate(Transformers):
    """Plain transformers with accelerate's disk offload of all layers.

    Args:
        path: The checkpoint.
        threads: Number of threads.
        device_map: Ignored; accelerate's must name each module in memory.
    """

    def __init__(self, path: str, threads: int, device_map: Any = None) -> None:
        super().__init__(path, threads, dict.fromkeys(_ENDS, "cpu") | {"model.layers": "disk"})

    def _options(self) -> dict[str, Any]:
        self._folder = tempfile.TemporaryDirectory(dir=Path(self._path).parent)
        return {"offload_folder": self._folder.name}


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

    def counters(self) -> dict[str, int]:
        """Returns counts so far; none are known, since the kernel's page cache decides."""
        return {}


RUNTIMES = {"hfq": Hfq, "transformers": Transformers, "accelerate": Accelerate, "llama.cpp": LlamaCpp}
"""Contenders, by name."""
