"""Local ranks for measurements, each in its own process."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hfq.errors import SetupError
from hfq.machine_profile.worker_process import Worker

__all__ = ["Ranks", "zero3_ranks"]


class Ranks:
    """Processes that form one run. Use it as a context manager.

    Args:
        module: Module that each process runs, as in `worker_process.Worker`. It also receives its `rank`, the
            `world` size, and the `port`.
        count: Number of ranks.
        options: Further options of the module, JSON-ready.
    """

    def __init__(self, module: str, count: int, **options: Any) -> None:
        self._stack = contextlib.ExitStack()
        kept = self._stack.enter_context(socket.socket())  # so no other program gets the port
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0, which sets it, too, may listen
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        starting = (Worker(module, rank=rank, world=count, port=port, **options) for rank in range(count))
        self._workers = [self._stack.enter_context(worker) for worker in starting]
        self._threads = self._stack.enter_context(ThreadPoolExecutor(count))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def answers(self, question: str, **arguments: object) -> list[dict]:
        """Returns the answers of all ranks in rank order, including errors.

        Raises:
            SetupError: A rank has ended.
        """
        return list(self._threads.map(lambda worker: worker.ask(question, **arguments), self._workers))

    def ask(self, question: str, **arguments: object) -> list[dict]:
        """Returns the answers of all ranks in rank order.

        Raises:
            SetupError: A rank has ended, or failed.
        """
        answers = self.answers(question, **arguments)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise SetupError(
                    f"Rank {rank} failed during the measurement.",
                    expected=f"an answer to {question!r}",
                    found=answer["error"],
                    fix="Run hfq doctor to check DeepSpeed on this machine.",
                )
        return answers


def zero3_ranks(count: int) -> Ranks:
    """Starts ranks under ZeRO-3.

    Raises:
        SetupError: DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise SetupError(
            "Ranks under ZeRO-3 cannot be measured.",
            expected="the package deepspeed",
            found="DeepSpeed is not installed",
            fix="Run pip install deepspeed, or measure without ZeRO-3.",
        )
    return Ranks("hfq.machine_profile.ranks_worker", count)
