"""Measuring process of `load`: loads one checkpoint with one loader.

Run it as `python -m benchmarks.load.load_worker '{"loader": …, "path": …, "small": …}'`. See
`worker_process.serve`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import checkpoint_files
from benchmarks.memory_limits import touch
from hfq.checkpoint import Checkpoint, Reader
from hfq.machine_profile.worker_process import memory, reset_peak, serve
from hfq.modules.flat_buffer import read_tensor

__all__ = ["LOADERS", "LoadWorker"]

Loaded = tuple[Any, Iterable[torch.Tensor]]
"""An object that keeps the loaded tensors alive, and the tensors."""


def _hfq(path: str, device: str = "cpu") -> Loaded:
    from hfq import HfqConfig

    return _from_pretrained(path, quantization_config=HfqConfig(), device_map={"": device})


def _plain(path: str) -> Loaded:
    return _from_pretrained(path, device_map={"": "cpu"})


def _from_pretrained(path: str, **options: Any) -> Loaded:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)
    return model, [*model.parameters(), *model.buffers()]


def _safetensors(path: str) -> Loaded:
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint_files(Path(path)):
        with safe_open(file, "pt") as stream:
            tensors |= {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118  (no mapping)
    return tensors, tensors.values()


LOADERS: dict[str, Callable[..., Loaded]] = {"hfq": _hfq, "transformers": _plain, "safetensors": _safetensors}


class LoadWorker:
    """Answers `load`, `memory`, `verify`, and `load_on_disk`.

    Args:
        loader: A name of `LOADERS`.
        path: The measured checkpoint.
        small: A small checkpoint of the same format. It is loaded first, so that measurements include no
            imports.
    """

    def __init__(self, loader: str, path: str, small: str) -> None:
        self._loader, self._path = LOADERS[loader], path
        self._loaded: Loaded | None = None
        with contextlib.suppress(Exception):  # `load` reports the same error
            self._loader(small)
        gc.collect()
        self.commands = {name: getattr(self, name) for name in ("load", "memory", "verify", "load_on_disk")}

    def load(self) -> dict:
        """Loads and touches every page. Returns the seconds and the growth of memory in bytes."""
        reset_peak()
        before = memory()
        started = time.perf_counter()
        self._loaded = self._loader(self._path)
        loaded = time.perf_counter()
        touch(self._loaded[1])
        touched = time.perf_counter()
        after = memory()
        grown = {key: after[key] - before[key] for key in after if key in before}
        peak = {"peak_rss": after["peak_rss"] - before["rss"]} if "peak_rss" in after else {}
        return {"load_seconds": loaded - started, "seconds": touched - started, **grown, **peak}

    def memory(self) -> dict:
        """Returns the current memory of the process."""
        return memory()

    def verify(self) -> dict:
        """Compares the SHA-256 of every loaded tensor with that of its bytes in the file."""
        checkpoint = Checkpoint.open(self._path)
        reader, state = Reader(checkpoint), self._loaded[0].state_dict()  # type: ignore[index]
        equal = [
            name
            for name, info in checkpoint.tensors.items()
            if _digest(state[name]) == _digest(read_tensor(reader, info))
        ]
        return {"tensors": len(checkpoint.tensors), "equal": len(equal)}

    def load_on_disk(self) -> dict:
        """Loads with every weight on disk (hfq only). Returns the bytes read, and their upper bound."""
        before = memory()
        self._loaded = _hfq(self._path, "disk")
        after = memory()
        loading = self._loaded[0].hf_quantizer.loading
        headers = sum(header.data_start for header in loading.checkpoint.headers.values())
        quantized = sum(
            info.nbytes for module in loading.quantized.values() for info in module.infos.values()
        )
        tensors = sum(info.nbytes for info in loading.checkpoint.tensors.values())
        return {
            "read": headers + loading.reader.counters.bytes_read,
            "bound": headers + tensors - quantized,
            "packed": quantized,
            "lazy_device_read": after.get("device_read", 0) - before.get("device_read", 0),
        }


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(memoryview(flat.numpy())).hexdigest()}"  # type: ignore[arg-type]


if __name__ == "__main__":
    serve(LoadWorker(**json.loads(sys.argv[1])).commands)
