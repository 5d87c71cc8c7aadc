"""Fixed costs of layers, steps, offloaded units, and loads, from tiny models of two depths."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from hfq.machine_profile.probe_models import GPTQ4, Architecture, make_checkpoint

__all__ = ["DEPTHS", "Decoder", "DepthProbe", "load_model"]

DEPTHS = (2, 16)
_PROMPT, _LONGEST = 8, 64
_STEPS = 6
_PRODUCTS = 7
"""Number of linear layers in a decoder layer of Llama."""


def load_model(folder: Path, **options: Any) -> Any:
    """Loads the model of a folder with hfq.

    Args:
        folder: Folder of the checkpoint.
        options: Options of `from_pretrained`, and `disk_io` of `HfqConfig`.
    """
    from transformers import AutoModelForCausalLM

    from hfq import HfqConfig

    config = HfqConfig(disk_io=options.pop("disk_io", "auto"))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options).eval()


class Decoder:
    """Steps of one token after a short prompt.

    Args:
        model: The model, or the DeepSpeed engine around it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = None
        self._tokens = torch.tensor([[1]])

    def step(self) -> float:
        """Returns the seconds of a step. If the context is long, an untimed prompt starts a new one."""
        with torch.inference_mode():
            if self._cache is None or self._cache.get_seq_length() >= _LONGEST:
                prompt = torch.ones(1, _PROMPT, dtype=torch.long)
                self._cache = self._model(input_ids=prompt, use_cache=True).past_key_values
            started = time.perf_counter()
            self._cache = self._model(
                input_ids=self._tokens, past_key_values=self._cache, use_cache=True
            ).past_key_values
            return time.perf_counter() - started

    def steps(self, count: int = 2) -> list[float]:
        """Returns the seconds of several steps.

        The step before them is not measured, because it fills the caches.
        """
        self.step()
        return [self.step() for _ in range(count)]


class DepthProbe:
    """Tiny models: few and many layers in memory, and wider layers in memory and on disk.

    Args:
        folder: Folder for the checkpoints.
        quick: True to use the smallest models.
    """

    def __init__(self, folder: Path, quick: bool = False) -> None:
        self._few, self._many = (1, 2) if quick else DEPTHS
        shapes = {"few": Architecture(128, self._few), "many": Architecture(128, self._many)}
        wide = shapes["near"] = shapes["away"] = Architecture(128, 3) if quick else Architecture(512, 8)
        paths = {name: make_checkpoint(folder, shape, GPTQ4) for name, shape in shapes.items()}
        self._blocks = wide.layers
        empty, all_layers = (_nbytes(Architecture(wide.hidden, layers)) for layers in (0, wide.layers))
        self._offloaded = all_layers - empty
        load_model(paths["few"])  # imports everything that the timed loads need
        self._loads: dict[str, float] = {}
        self._decoders: dict[str, Decoder] = {}
        devices = {f"model.layers.{index}": "disk" for index in range(wide.layers)}
        for name, path in paths.items():
            started = time.perf_counter()
            model = load_model(
                path, device_map={"": "cpu", **(devices if name == "away" else {})}, disk_io="buffered"
            )
            self._loads[name], self._decoders[name] = time.perf_counter() - started, Decoder(model)
        self._samples: dict[str, list[float]] = {name: [] for name in self._decoders}

    def measure(self) -> None:
        """Adds samples of each model."""
        for name, decoder in self._decoders.items():
            self._samples[name] += decoder.steps(_STEPS)

    def forget(self) -> None:
        """Drops all samples of steps."""
        for samples in self._samples.values():
            samples.clear()

    def layer_seconds(self, call_seconds: float = 0.0) -> float:
        """Returns the seconds of a layer without its products, each of which costs `call_seconds`."""
        return max(self._slope() - _PRODUCTS * call_seconds, 0.0)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step without its layers."""
        return max(self._median("few") - self._few * self._slope(), 0.0)

    def block_seconds(self, rate: float) -> float:
        """Returns the seconds of onloading a unit, in addition to reading its bytes.

        Args:
            rate: Bytes per second of reads from the page cache.
        """
        moving = self._median("away") - self._median("near") - self._offloaded / rate
        return max(moving, 0.0) / self._blocks

    @property
    def load_seconds(self) -> tuple[float, float]:
        """(Seconds of a load without its layers, seconds per layer)."""
        each = max(self._loads["many"] - self._loads["few"], 0.0) / (self._many - self._few)
        return max(self._loads["few"] - self._few * each, 0.0), each

    def _slope(self) -> float:
        return max(self._median("many") - self._median("few"), 0.0) / (self._many - self._few)

    def _median(self, name: str) -> float:
        return statistics.median(self._samples[name])


def _nbytes(shape: Architecture) -> int:
    return sum(tensor.nbytes for tensor in shape.tensors(GPTQ4).values())
