"""Measuring process of `stream`: forward passes of one model with layers on a cold disk.

Run it as `python -m benchmarks.stream.stream_worker '{"mover": …, "path": …, "stand_in": …, "on_disk": …}'`.
See `worker_process.serve`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.checkpoints import checkpoint_files
from benchmarks.stream.contenders import IN_MEMORY, MOVERS, ON_DISK, Compute, Mover, layer_nbytes, standing_in
from hfq.machine_profile.machine_limits import drop_cache
from hfq.machine_profile.worker_process import serve

__all__ = ["StreamWorker"]

_BATCH = torch.ones(1, 8, dtype=torch.long)
_PROMPT = torch.arange(3, 11).unsqueeze(0)


class StreamWorker:
    """Answers `passes`, `micro_batches`, and `decode`.

    Args:
        mover: A name of `MOVERS`.
        path: The checkpoint.
        stand_in: True if layers read their weights and sleep instead of computing.
        on_disk: True if the layers are on disk. Otherwise, everything is in memory.
    """

    def __init__(self, mover: str, path: str, stand_in: bool = True, on_disk: bool = True) -> None:
        self._stack = contextlib.ExitStack()
        if stand_in:
            self._stack.enter_context(standing_in())
        self._files, self._nbytes = checkpoint_files(Path(path)), layer_nbytes(Path(path))[1]
        self._load = lambda: MOVERS[mover](Path(path), ON_DISK if on_disk else IN_MEMORY)
        self._is_cold, self._is_stand_in = on_disk, stand_in
        self.commands = {name: getattr(self, name) for name in ("load", "passes", "micro_batches", "decode")}

    def close(self) -> None:
        """Restores the forwards of transformers' classes."""
        self._stack.close()

    def load(self) -> dict:
        """Loads the model. With simulated compute, also runs one pass, which may show the layer order."""
        logging.disable_progress_bar()  # only in this process
        self._mover: Mover = self._load()
        if self._is_stand_in:
            self._mover.forward(_BATCH)
        return {}

    def passes(self, count: int, compute: float) -> dict:
        """Runs `count` passes with a cold page cache, in which each layer computes for `compute` s.

        See `_measured` for the result.
        """
        Compute.seconds = compute
        return self._measured([lambda: self._mover.forward(_BATCH)] * count)

    def micro_batches(self, count: int, compute: float, repeats: int) -> dict:
        """Runs `count` micro-batches several times, together or each in its own pass."""
        Compute.seconds = compute
        if self._mover.shares_reads:
            return self._measured([lambda: self._mover.forward_all([_BATCH] * count)] * repeats)
        answer = self._measured([lambda: self._mover.forward(_BATCH)] * (count * repeats))
        return answer | {"steps": repeats}

    def decode(self, tokens: int) -> dict:
        """Decodes greedily with a cold page cache. Returns the tokens and the seconds of each."""
        dropped = 0.0

        def drop(*_: object) -> None:
            nonlocal dropped
            started = time.perf_counter()
            drop_cache([*self._files, *self._mover.files()])
            dropped += time.perf_counter() - started

        model = self._mover.model
        hook = model.register_forward_pre_hook(drop) if self._is_cold else contextlib.nullcontext()
        with hook:
            started = time.perf_counter()
            generated = model.generate(
                _PROMPT,
                attention_mask=torch.ones_like(_PROMPT),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
            seconds = time.perf_counter() - started - dropped
        return {"tokens": generated[0, _PROMPT.shape[1] :].tolist(), "seconds": seconds / tokens}

    def _measured(self, steps: list[Callable[[], None]]) -> dict:
        """Runs steps that need all layers once, each from a cold page cache.

        Reads between two steps are neither timed nor counted.

        Args:
            steps: The steps.

        Returns:
            steps: Number of steps.
            seconds: Seconds of all steps, without dropping the page cache.
            expected: Bytes of the layers that the steps need.
            moved: Bytes of them that were read while the clock ran. The others had been prefetched.
            waited: Seconds in which a forward pass waited for its layers, if counted.
        """
        mover, seconds, read = self._mover, 0.0, 0
        waited = mover.waited() if mover.waited else 0.0
        for step in steps:
            drop_cache([*self._files, *mover.files()])
            before = mover.bytes_read() if mover.bytes_read else 0
            started = time.perf_counter()
            step()
            seconds += time.perf_counter() - started
            read += mover.bytes_read() - before if mover.bytes_read else 0
        expected = self._nbytes * len(steps)
        moved = min(expected, read) if mover.bytes_read else expected
        answer = {"steps": len(steps), "seconds": seconds, "expected": expected, "moved": moved}
        return answer | ({"waited": mover.waited() - waited} if mover.waited else {})


if __name__ == "__main__":
    serve(StreamWorker(**json.loads(sys.argv[1])).commands)
