"""Workers in this process, for tests of measurements without timing."""

import pytest


class InProcess:
    """Replacement of `worker_process.Worker` that answers in this process."""

    def __init__(self, worker) -> None:
        self._worker = worker

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        getattr(self._worker, "close", lambda: None)()

    def ask(self, question: str, **arguments) -> dict:
        try:
            return self._worker.commands[question](**arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


@pytest.fixture
def in_process():
    """Returns a factory like `Worker` for a worker's class."""
    return lambda cls: lambda module, **options: InProcess(cls(**options))
