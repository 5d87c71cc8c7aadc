"""Measuring process of `fms`: loads checkpoints with FMS alone or with hfq.

Run it as `python -m benchmarks.fms.fms_worker '{"loader": …}'`. See `worker_process.serve`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory_limits import touch
from hfq.machine_profile.worker_process import memory, reset_peak, serve

__all__ = ["LOADERS", "TOKENS", "FmsWorker"]

TOKENS = [[3, 5, 7, 11, 13, 2], [4, 9, 30, 31, 8, 6]]
"""6 tokens, because FMS confuses heads and tokens if their numbers are equal."""


def _plain(path: Path, dtype: torch.dtype | None) -> Any:
    """Loads with FMS alone: a config.json without quantization, and FMS's own CPU layers for GPTQ."""
    from fms.models import get_model

    with _plain(path) as (folder, quantization):
        gptq = {
            "linear_type": "gptq_cpu",
            "bits": quantization.get("bits"),
            "group_size": quantization.get("group_size"),
        }
        options = (
            {"linear_config": gptq, "fused_weights": False}
            if quantization.get("quant_method") == "gptq"
            else {}
        )
        return get_model(
            "hf_pretrained", model_path=str(folder), data_type=None if options else dtype, **options
        )


def _load(path: Path, dtype: torch.dtype | None) -> Any:
    import hfq

    return hfq.fms.load(path, data_type=dtype, distributed_strategy=_strategy())


def _registered(path: Path, dtype: torch.dtype | None) -> Any:
    from fms.models import get_model

    import hfq

    hfq.fms.register()
    return get_model("hf_pretrained", model_path=str(path), data_type=dtype, distributed_strategy=_strategy())


def _transformers(path: Path, dtype: torch.dtype | None) -> Any:
    from transformers import AutoModelForCausalLM

    from hfq import HfqConfig

    return AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), dtype=dtype or "auto")


LOADERS: dict[str, Callable[[Path, torch.dtype | None], Any]] = {
    "FMS": _plain,
    "hfq.fms.load": _load,
    "FMS with hfq.fms.register": _registered,
    "transformers with hfq": _transformers,
}


class FmsWorker:
    """Answers `logits` and `load`.

    Args:
        loader: A name of `LOADERS`.
        small: A small checkpoint that is loaded first, so that measurements include no imports. May be None.
        rank: Rank of this process.
        world: Number of processes that share each model. All receive the same questions.
        port: Port for their rendezvous on this machine.
    """

    def __init__(self, loader: str, small: str = "", rank: int = 0, world: int = 1, port: int = 0) -> None:
        self._rank, self._world, self._port = rank, world, port
        self._loader, self._loaded = LOADERS[loader], None
        if small:
            with contextlib.suppress(Exception):  # a later question reports the error
                self._loader(Path(small), None)
        gc.collect()
        self.commands: dict[str, Callable[..., dict]] = {
            "logits": self.logits,
            "load": self.load,
            "memory": memory,
        }

    def logits(self, path: str, loader: str | None = None) -> dict:
        """Returns a checkpoint's logits, flat float32, from this process's loader or another."""
        self._join()
        load = LOADERS[loader] if loader else self._loader
        model = load(Path(path), torch.float32).eval()
        with torch.no_grad():
            found = model(torch.tensor(TOKENS))
        return {"logits": getattr(found, "logits", found).float().flatten().tolist()}

    def _join(self) -> None:
        """Joins the other ranks, if any. Runs within a question, because gloo prints to stdout."""
        if self._world > 1 and not dist.is_initialized():
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            place = f"tcp://127.0.0.1:{self._port}"
            dist.init_process_group("gloo", init_method=place, rank=self._rank, world_size=self._world)

    def load(self, path: str) -> dict:
        """Loads with the file's dtypes and touches every page.

        Returns the seconds and the growth of memory in bytes.
        """
        self._loaded = None
        gc.collect()
        reset_peak()
        before, started = memory(), time.perf_counter()
        self._loaded = model = self._loader(Path(path), None)
        touch([*model.parameters(), *model.buffers()])
        seconds, after = time.perf_counter() - started, memory()
        grown = {key: after[key] - before[key] for key in ("anonymous", "rss") if key in after}
        return {"seconds": seconds, "peak_rss": after.get("peak_rss", 0) - before.get("rss", 0), **grown}


def _strategy() -> str | None:
    """Returns FMS's strategy: tensor parallelism if several processes share the model."""
    return "tp" if dist.is_initialized() else None


@contextlib.contextmanager
def _plain(path: Path) -> Iterator[tuple[Path, dict]]:
    """Yields a folder of links to a checkpoint with an unquantized config.json, and the quantization."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    quantization = config.pop("quantization_config", {})
    with tempfile.TemporaryDirectory() as folder:
        for file in path.glob("*.safetensors*"):
            os.symlink(file.resolve(), Path(folder, file.name))
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder), quantization


if __name__ == "__main__":
    serve(FmsWorker(**json.loads(sys.argv[1])).commands)
