"""One of two processes that hold the same layers in cpu memory; see `worker_process.serve`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoding import Decoding, load
from hfq.machine_profile.worker_process import memory, serve

__all__ = ["OffloadWorker"]


class OffloadWorker:
    """Loads a model, decodes a token, and measures its memory."""

    def __init__(self, bench: str) -> None:
        self._bench = Bench.from_json(bench)
        self._decoding: Decoding | None = None
        self.commands = {"start": self._start, "load": self._load, "measure": memory}

    def _start(self) -> dict[str, int]:
        """Returns the memory once the device is in use."""
        torch.ones(1, device=self._bench.device).sum().item()
        return memory()

    def _load(self, path: str, placement: dict[str, Any]) -> dict[str, int]:
        self._decoding = Decoding(load(Path(path), placement)[0], self._bench.device)
        self._decoding.token()
        torch.accelerator.synchronize(self._bench.device)
        return memory()


if __name__ == "__main__":
    serve(OffloadWorker(**json.loads(sys.argv[1])).commands)
