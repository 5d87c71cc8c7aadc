"""Process of `hfq bench` that loads one model with one number of threads, and runs it.

Run as `python -m hfq.cli.bench.bench_worker '{"folder": …, …}'`; see `worker_process.serve`.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hfq.errors import HfqError, SetupError
from hfq.loading.loaded_model import loader_of
from hfq.loading.model_loader import ModelLoader
from hfq.machine_profile.machine_limits import cached_share
from hfq.machine_profile.worker_process import memory, reset_peak, serve
from hfq.placement.accelerators import list_accelerators
from hfq.placement.estimate.profile import Profile, read_profile
from hfq.placement.estimate.roofline import TERMS
from hfq.runtime.host_time import host_seconds_per_layer
from hfq.runtime.predicted_memory import predict_memory
from hfq.runtime.predicted_speed import predict_step, takes_tokens

__all__ = ["BenchWorker"]

_SEED = 0


class BenchWorker:
    """Answers the steps of a run, such as `load` and `decode`.

    Args:
        folder: The checkpoint's folder.
        device_map: As in `from_pretrained`.
        max_memory: Bytes by device, for an automatic device map; None for no limits.
        dtype: Dtype of activations, or `auto`.
        threads: Threads of the CPU; None for torch's own number.
        n_prompt: Tokens of a prompt.
        n_gen: Tokens to generate.
        is_compiled: True to also generate with `torch.compile`.
    """

    def __init__(
        self,
        folder: str,
        device_map: Any,
        max_memory: dict[str, int] | None,
        dtype: str,
        threads: int | None,
        n_prompt: int,
        n_gen: int,
        is_compiled: bool = False,
    ) -> None:
        self._folder = folder
        self._device_map = device_map
        self._dtype = dtype
        self._max_memory = (
            None if max_memory is None else {_as_key(key): size for key, size in max_memory.items()}
        )
        self._n_prompt, self._n_gen, self._is_compiled = n_prompt, n_gen, is_compiled and n_gen > 0
        if threads is not None:
            torch.set_num_threads(threads)
        self._model: Any = None
        self._before = 0
        steps = (
            self.load,
            self.warm_up,
            self.prefill,
            self.decode,
            self.host,
            self.compile,
            self.decode_generate,
            self.decode_compiled,
            self.memory,
        )
        self.commands = {step.__name__: _telling_errors(step) for step in steps}

    def load(self) -> dict[str, Any]:
        """Loads the model: seconds, bytes by device, and predictions.

        Raises:
            SetupError: The model does not take tokens, or is to be compiled and a part of it is offloaded.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from hfq import HfqConfig
        from hfq.evaluation.placed_models import DTYPES

        logging.disable_progress_bar()
        share = cached_share(sorted(Path(self._folder).glob("*.safetensors")))
        self._before = memory().get("rss", 0)
        reset_peak()
        options: dict[str, Any] = {
            "device_map": self._device_map,
            "dtype": DTYPES.get(self._dtype, self._dtype),
        }
        if self._max_memory is not None:
            options["max_memory"] = self._max_memory
        started = time.perf_counter()
        loaded = AutoModelForCausalLM.from_pretrained(
            self._folder, quantization_config=HfqConfig(), **options
        )
        seconds = time.perf_counter() - started
        self._model = loaded.eval()
        self._check_model()
        loading = loader_of(self._model)
        return {
            "class": type(self._model).__name__,
            "formats": loading.describe_formats(),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "file_nbytes": loading.checkpoint.nbytes,
            "devices": loading.plan.nbytes_by_device(),
            "execution_device": loading.main,
            "threads": torch.get_num_threads(),
            "cached_share": share,
            "load_seconds": seconds,
            "load_nbytes": loading.plan.resident_nbytes(),
            "predicted": self._predict(loading, share),
        }

    def _check_model(self) -> None:
        """Checks that all later steps can run, before any of them is measured."""
        if not takes_tokens(self._model):
            raise SetupError(
                f"hfq bench cannot run {type(self._model).__name__}.",
                expected="a causal language model that takes tokens alone",
                found=type(self._model).__name__,
                fix="Measure the language model by itself.",
            )
        if self._is_compiled and not self._model.hf_quantizer.is_compileable:
            raise SetupError(
                "hfq bench --compile needs a model whose weights stay in memory.",
                expected="no offloaded weights",
                found=", ".join(loader_of(self._model).plan.nbytes_by_device()),
                fix="Pass --device-map cpu or --device-map cuda:0, or omit --compile.",
            )

    def warm_up(self) -> dict[str, Any]:
        """Runs the prompt and one token, so that no first call is measured."""
        if self._n_prompt:
            self.prefill()
        self._generate(min(self._n_gen, 1))
        return {}

    def prefill(self) -> dict[str, Any]:
        """Runs the prompt: seconds."""
        tokens = self._random_tokens(self._n_prompt)
        started = time.perf_counter()
        with torch.inference_mode():
            self._wait(self._model(tokens, use_cache=True, **self._last_logits()))
        return {"seconds": time.perf_counter() - started}

    def decode(self) -> dict[str, Any]:
        """Generates tokens one by one behind an empty cache: seconds."""
        started = time.perf_counter()
        self._generate(self._n_gen)
        return {"seconds": time.perf_counter() - started}

    def host(self) -> dict[str, Any]:
        """Measures the time of the interpreter for one call of a layer: seconds, or None."""
        return {"host_seconds_per_layer": host_seconds_per_layer(self._model)}

    def compile(self) -> dict[str, Any]:
        """Generates with `torch.compile` for the first time: seconds."""
        return {"compile_seconds": self.decode_compiled()["seconds"]}

    def decode_generate(self) -> dict[str, Any]:
        """Generates the same tokens with a static cache, without `torch.compile`: seconds."""
        return self._generate_static(disable_compile=True)

    def decode_compiled(self) -> dict[str, Any]:
        """Generates tokens with `torch.compile` and a static cache: seconds."""
        from transformers import CompileConfig

        compiling = CompileConfig()
        compiling._compile_all_devices = True
        return self._generate_static(compile_config=compiling)

    def _generate_static(self, **options: Any) -> dict[str, Any]:
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=self._n_gen,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            **options,
        )
        started = time.perf_counter()
        self._model.generate(self._random_tokens(1), config)
        return {"seconds": time.perf_counter() - started}

    def memory(self) -> dict[str, Any]:
        """Peak growth of the process since before the load, and peak memory of the accelerators."""
        peak = memory().get("peak_rss")
        on_devices = {
            device: torch.accelerator.max_memory_allocated(device) for device in list_accelerators()
        }
        return {
            "peak_memory_nbytes": None if peak is None else max(peak - self._before, 0),
            "peak_device_memory_nbytes": {device: nbytes for device, nbytes in on_devices.items() if nbytes},
        }

    def _generate(self, count: int) -> None:
        """Feeds tokens one by one, as llama-bench does: their values do not change the work."""
        cache = None
        with torch.inference_mode():
            for token in self._random_tokens(count).split(1, dim=1) if count else ():
                out = self._model(token, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                self._wait(out)

    def _random_tokens(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED)
        vocabulary = self._model.config.get_text_config(decoder=True).vocab_size
        tokens = torch.randint(0, vocabulary, (1, count), generator=generator)
        return tokens.to(loader_of(self._model).main)

    def _last_logits(self) -> dict[str, int]:
        """Asks for the logits of the last token alone, if the model can."""
        return (
            {"logits_to_keep": 1}
            if "logits_to_keep" in inspect.signature(self._model.forward).parameters
            else {}
        )

    @staticmethod
    def _wait(out: Any) -> None:
        float(out.logits[0, -1, 0])  # an accelerator computes asynchronously

    def _predict(self, loading: ModelLoader, share: float | None) -> dict[str, Any] | None:
        """Returns predictions in the form of the measurements, or None if ranks share the model."""
        if type(loading) is not ModelLoader:
            return None
        profile = read_profile()
        load = predict_step(loading, _from_cache(profile, share or 0.0)).load_seconds
        decode = predict_step(loading, profile, context=self._n_gen // 2)
        prefill = None
        # without a measured profile of the CPU, products of many rows have no known rate
        if self._n_prompt and profile.is_measured and loading.main == "cpu":
            prefill = predict_step(loading, profile, rows=self._n_prompt).tokens_per_second
        nbytes = predict_memory(loading, max(self._n_prompt, 1), max(self._n_prompt, self._n_gen))
        threads = profile.machine.get("threads")
        return {
            "source": decode.source,
            "profile_threads": int(threads) if profile.is_measured and threads else None,
            "load_seconds": load,
            "peak_memory_nbytes": nbytes.pop("cpu", 0),
            "peak_device_memory_nbytes": nbytes,
            "prefill_tokens_per_second": prefill,
            "decode_tokens_per_second": decode.tokens_per_second if self._n_gen else None,
            "decode_dominant_term": TERMS[decode.dominant],
        }


def _from_cache(profile: Profile, share: float) -> Profile:
    """Returns the profile of a disk of which the page cache has this share of the files."""
    return replace(profile, disk=1 / (share / profile.page_cache + (1 - share) / profile.disk))


def _as_key(device: str) -> int | str:
    """Returns a device as a key of `max_memory`: an accelerator by its number."""
    number = device.rpartition(":")[2]
    return int(number) if number.isdigit() else device


def _telling_errors(step: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Wraps a step so that an HfqError is answered with all of its fields."""

    def answer() -> dict[str, Any]:
        try:
            return step()
        except HfqError as error:
            fields = ("message", "fix", "tensor", "rank", "problems")
            texts = {
                name: value
                for name in ("file", "expected", "found")
                if (value := getattr(error, name)) is not None
            }
            told = {name: getattr(error, name) for name in fields} | {
                name: str(text) for name, text in texts.items()
            }
            return {"hfq_error": type(error).__name__, "fields": told}

    return answer


if __name__ == "__main__":
    serve(BenchWorker(**json.loads(sys.argv[1])).commands)
