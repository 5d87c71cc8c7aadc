"""Several local ranks that are measured together: each a process of its own, all asked at once."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from concurrent.futures import ThreadPoolExecutor

from hfq.benchmarks.process import Worker
from hfq.errors import SetupError

__all__ = ["Ranks"]


class Ranks:
    """Processes of `ranks_worker` that form one run; a context manager.

    Args:
        count: How many.

    Raises:
        SetupError: DeepSpeed is not installed.
    """

    def __init__(self, count: int) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise SetupError(
                "Ranks under ZeRO-3 cannot be measured.", expected="deepspeed", found="it is not installed",
                fix="pip install deepspeed, or leave ZeRO-3 out",
            )  # fmt: skip
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._stack = contextlib.ExitStack()
        starting = (Worker("hfq.benchmarks.ranks_worker", rank=rank, world=count, port=port) for rank in range(count))
        self._workers = [self._stack.enter_context(worker) for worker in starting]
        self._threads = self._stack.enter_context(ThreadPoolExecutor(count))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def ask(self, question: str, **arguments: object) -> list[dict]:
        """The answers of all ranks, in their order.

        Raises:
            SetupError: A rank is gone, or failed.
        """
        answers = list(self._threads.map(lambda worker: worker.ask(question, **arguments), self._workers))
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise SetupError(
                    f"Rank {rank} of a run that is measured failed.", expected=f"an answer to {question!r}", found=answer["error"],
                    fix="read the error above; `hfq doctor` tells whether DeepSpeed works here",
                )  # fmt: skip
        return answers
