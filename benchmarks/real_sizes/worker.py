"""Measuring process of `real_sizes`: loads one model with one runtime, and generates.

Run it as `python -m benchmarks.real_sizes.worker '{"runtime": …, "path": …, "group": …}'`. See
`worker_process.serve`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.real_sizes.memory_group import join_group
from hfq.machine_profile.worker_process import memory, serve

__all__ = ["RealSizeWorker"]

_START = 8  # tokens before those that are decoded
_LEAST_TOKENS = 3


class RealSizeWorker:
    """Answers `load`, `predict`, `prefill`, and `decode`.

    Args:
        runtime: A name of `RUNTIMES`.
        path: The checkpoint.
        threads: Number of threads.
        group: Cgroup to join before anything is loaded, or None.
        device_map: Device map of hfq.
        options: Options of `HfqConfig`.
        attention: Argument `attn_implementation` of `from_pretrained`; None for its default.
    """

    def __init__(
        self,
        runtime: str,
        path: str,
        threads: int,
        group: str | None = None,
        device_map: Any = None,
        options: Mapping[str, Any] | None = None,
        attention: str | None = None,
    ) -> None:
        join_group(group)
        from benchmarks.real_sizes.runtimes import RUNTIMES

        own = {"options": options or {}, "attention": attention} if runtime == "hfq" else {}
        self._runtime = RUNTIMES[runtime](path, threads, device_map, **own)
        self.commands = {name: getattr(self, name) for name in ("load", "predict", "prefill", "decode")}

    def load(self) -> dict:
        """Loads the model. Returns seconds, and bytes of the process's own memory."""
        found = self._measured(self._runtime.load)
        return found | {"anonymous": memory().get("anonymous", 0)}

    def predict(self, profile: str, recorded: int = 0) -> dict:
        """Predicts the seconds of a token.

        Args:
            profile: Machine profile as JSON.
            recorded: Number of tokens whose routing is recorded for it. 0 records nothing.
        """
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file:
            file.write(profile)
            file.flush()
            return {"seconds": self._runtime.predict(Path(file.name), _START, recorded)}

    def prefill(self, tokens: int) -> dict:
        """Runs a prompt in an empty context."""
        self._runtime.start()
        return self._measured(lambda: self._runtime.run(tokens))

    def decode(self, tokens: int, most_seconds: float = 60) -> dict:
        """Decodes tokens one by one. Returns the median of their seconds, and means of the rest.

        Args:
            tokens: Number of tokens.
            most_seconds: Seconds after which it stops early, with three tokens or more.
        """
        self._runtime.start()
        self._runtime.run(_START)
        self._runtime.run(1)
        seconds: list[float] = []
        before = self._runtime.counters()

        def run() -> None:
            for _ in range(tokens):
                if len(seconds) >= _LEAST_TOKENS and sum(seconds) > most_seconds:
                    return
                started = time.perf_counter()
                self._runtime.run(1)
                seconds.append(time.perf_counter() - started)

        found = self._measured(run)
        each = {key: found[key] / len(seconds) for key in ("cpu_seconds", "device_read")}
        each |= {"seconds": statistics.median(seconds), "mean": statistics.mean(seconds)}
        counted = {key: value - before[key] for key, value in self._runtime.counters().items()}
        if counted.get("lookups"):
            each["hit_rate"] = counted["hits"] / counted["lookups"]
        return each | ({"needed": counted["needed"] / len(seconds)} if counted.get("needed") else {})

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
