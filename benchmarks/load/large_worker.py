"""Measuring process of `large`: plans or loads one large checkpoint.

Run it as `python -m benchmarks.load.large_worker '{"path": …, "small": …, "device": …}'`. See
`worker_process.serve`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

from hfq.machine_profile.worker_process import memory, reset_peak, serve

__all__ = ["LargeWorker"]


class LargeWorker:
    """Answers `plan`, `load`, and `objects`.

    Args:
        path: The measured checkpoint.
        small: The same model with few layers. It is planned and loaded first, so that measurements include no
            imports.
        device: Device of all weights.
    """

    def __init__(self, path: str, small: str, device: str) -> None:
        self._path, self._device = path, device
        self._model: Any = None
        _plan(small)
        _load(small, device)
        gc.collect()
        self.commands = {name: getattr(self, name) for name in ("plan", "load", "objects")}

    def plan(self) -> dict:
        """Makes the plan, as `hfq plan` does. Returns CPU seconds, and bytes of memory."""
        return _measured(lambda: _plan(self._path))

    def load(self) -> dict:
        """Loads the model. Returns CPU seconds, and bytes of memory."""
        return _measured(lambda: setattr(self, "_model", _load(self._path, self._device)))

    def objects(self) -> dict:
        """Loads the model. Returns the bytes of its Python objects, and how many modules and tensors it has."""
        tracemalloc.start()
        self._model = _load(self._path, self._device)
        gc.collect()
        found = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        loading = self._model.hf_quantizer.loading
        counts = {"modules": len(loading.quantized), "tensors": len(loading.checkpoint.tensors)}
        return {"objects": found, **counts}


def _measured(work: Callable[[], object]) -> dict:
    reset_peak()
    before, started = memory(), os.times()
    work()
    ended, after = os.times(), memory()
    grown = {"grown": after["anonymous"] - before["anonymous"]} if "anonymous" in after else {}
    system = ended.system - started.system
    seconds = {"cpu_seconds": ended.user - started.user + system, "system_seconds": system}
    return {**seconds, **grown, **{key: after[key] for key in ("peak_rss",) if key in after}}


def _plan(path: str) -> None:
    from hfq.cli import main

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main(["plan", path])
    except SystemExit as status:
        if status.code:
            raise RuntimeError(f"hfq plan ended with exit status {status.code}") from status


def _load(path: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hfq import HfqConfig

    logging.disable_progress_bar()
    config = HfqConfig()
    return AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", quantization_config=config, device_map={"": device}
    )


if __name__ == "__main__":
    serve(LargeWorker(**json.loads(sys.argv[1])).commands)
