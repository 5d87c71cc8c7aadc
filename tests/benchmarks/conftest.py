"""Workers without processes of their own, for tests of what is measured and not of how long it takes."""

import pytest


class InProcess:
    """Stands in for `worker_process.Worker`: the same questions, answered here."""

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
    """Makes a factory like `Worker` out of a worker's class."""
    return lambda cls: lambda module, **options: InProcess(cls(**options))
