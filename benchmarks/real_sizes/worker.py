"""Measuring process of `real_sizes`: loads one model with one runtime, and generates.

Run it as `python -m benchmarks.real_sizes.worker '{"runtime": …, "path": …, "group": …}'`. See
`worker_process.serve`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.real_sizes.memory_group import join_group
from hfq.machine_profile.worker_process import memory, serve

__all__ = ["RealSizeWorker"]

_START = 8  # tokens before those that are decoded


class RealSizeWorker:
    """Answers `load`, `prefill`, and `decode`.

    Args:
        runtime: A name of `RUNTIMES`.
        path: The checkpoint.
        threads: Number of threads.
        group: Cgroup to join before anything is loaded, or None.
        device_map: Device map of hfq.
    """

    def __init__(
        self, runtime: str, path: str, threads: int, group: str | None = None, device_map: Any = None
    ) -> None:
        join_group(group)
        from benchmarks.real_sizes.runtimes import RUNTIMES

        self._runtime = RUNTIMES[runtime](path, threads, device_map)
        self.commands = {name: getattr(self, name) for name in ("load", "prefill", "decode")}

    def load(self) -> dict:
        """Loads the model. Returns seconds, and bytes of the process's own memory."""
        found = self._measured(self._runtime.load)
        return found | {"anonymous": memory().get("anonymous", 0)}

    def prefill(self, tokens: int) -> dict:
        """Runs a prompt in an empty context."""
        self._runtime.start()
        return self._measured(lambda: self._runtime.run(tokens))

    def decode(self, tokens: int) -> dict:
        """Decodes tokens one by one. Returns the median of their seconds, and means of the rest."""
        self._runtime.start()
        self._runtime.run(_START)
        self._runtime.run(1)
        seconds: list[float] = []
        hits = self._runtime.hits()

        def run() -> None:
            for _ in range(tokens):
                started = time.perf_counter()
                self._runtime.run(1)
                seconds.append(time.perf_counter() - started)

        found = self._measured(run)
        kept, looked_up = (now - before for now, before in zip(self._runtime.hits(), hits, strict=True))
        each = {key: found[key] / tokens for key in ("cpu_seconds", "device_read")}
        return {"seconds": statistics.median(seconds), "mean": statistics.mean(seconds), **each} | (
            {"hit_rate": kept / looked_up} if looked_up else {}
        )

    def _measured(self, work: Callable[[], object]) -> dict:
        read, cpu, started = memory().get("device_read", 0), os.times(), time.perf_counter()
        work()
        seconds, ended = time.perf_counter() - started, os.times()
        used = ended.user - cpu.user + ended.system - cpu.system
        return {
            "seconds": seconds,
            "cpu_seconds": used,
            "device_read": memory().get("device_read", 0) - read,
        }


if __name__ == "__main__":
    serve(RealSizeWorker(**json.loads(sys.argv[1])).commands)
