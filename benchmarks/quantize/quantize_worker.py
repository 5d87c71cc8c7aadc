"""Measuring process of `quantize`: quantizes with hfq or gptqmodel.

Run it as `python -m benchmarks.quantize.quantize_worker '{"tool": …}'`. See `worker_process.serve`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hfq import Recipe
from hfq.machine_profile.worker_process import memory, serve

__all__ = ["TOOLS", "QuantizeWorker", "read_tokens", "write_tokens"]


class QuantizeWorker:
    """Answers `quantize`.

    Args:
        tool: A name of `TOOLS`. Its packages are imported before a measurement starts.
        threads: Number of torch's threads.
    """

    def __init__(self, tool: str, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._import: Callable[[], Callable[..., dict]] = functools.cache(
            TOOLS[tool]
        )  # text printed earlier would be read as an answer
        self.commands: dict[str, Callable[..., dict]] = {"quantize": self.quantize, "memory": memory}

    def quantize(self, **job: Any) -> dict:
        """Quantizes from one folder into another.

        Returns CPU and wall seconds, and memory in bytes, including imports.
        """
        run, imported = self._import(), memory()
        cpu, wall = time.process_time(), time.perf_counter()
        found = run(**job)
        seconds, wall = time.process_time() - cpu, time.perf_counter() - wall
        after, before = memory(), imported["peak_rss"]
        peak = max(after["peak_rss"], before)  # the system's values are a few pages off and may fall
        return {
            **after,
            "peak_rss": peak,
            "imports": before,
            "cpu_seconds": seconds,
            "wall_seconds": wall,
            **found,
        }


def write_tokens(tokens: torch.Tensor, file: Path) -> Path:
    """Saves token ids [samples, length] for `read_tokens`."""
    file.write_text(json.dumps(tokens.tolist()), encoding="utf-8")
    return file


def read_tokens(file: str) -> torch.Tensor:
    """Loads token ids, int64 [samples, length]."""
    return torch.tensor(json.loads(Path(file).read_text(encoding="utf-8")), dtype=torch.int64)


def _hfq() -> Callable[..., dict]:
    from hfq.quantization.driver import quantize
    from hfq.quantization.progress import Progress

    def run(path: str, output: str, tokens: str | None, recipe: dict, stop_after: int | None = None) -> dict:
        calibration = read_tokens(tokens) if tokens else torch.empty(1, 1)

        def stop(progress: Progress) -> None:
            if progress.done == stop_after:
                os.kill(os.getpid(), signal.SIGKILL)

        report = quantize(
            path,
            Recipe(**recipe),
            output_dir=output,
            dataset=list(calibration) if tokens else None,
            num_calibration_samples=calibration.shape[0],
            max_seq_length=calibration.shape[1],
            on_progress=stop,
        )
        return {"resumed": report.resumed}

    return run


def _gptqmodel() -> Callable[..., dict]:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it needs two
    from gptqmodel import GPTQModel, QuantizeConfig

    def run(path: str, output: str, tokens: str, recipe: dict) -> dict:
        calibration, source, target = read_tokens(tokens), Path(path).resolve(), Path(output).resolve()
        os.chdir(target.parent)  # it writes logs where it runs
        act_order = bool(recipe.get("desc_act"))
        config = QuantizeConfig(
            bits=recipe["bits"],
            group_size=recipe["group_size"],
            sym=recipe.get("sym", True),
            desc_act=act_order,
            act_group_aware=not act_order,
        )
        model = GPTQModel.load(str(source), config, device="cpu")
        rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration.tolist()]
        model.quantize(rows, batch_size=max(1, 2048 // calibration.shape[1]))
        model.save(str(target))
        return {}

    return run


TOOLS: dict[str, Callable[[], Callable[..., dict]]] = {"hfq": _hfq, "gptqmodel": _gptqmodel}

if __name__ == "__main__":
    serve(QuantizeWorker(**json.loads(sys.argv[1])).commands)
