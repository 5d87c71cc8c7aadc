"""Limit on the whole time of a request.

A timeout of an HTTP client limits the wait for the next bytes, so that a server that sends one byte at a time
is never late.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

__all__ = ["within_deadline"]

Result = TypeVar("Result")


def within_deadline(seconds: float, request: Callable[[], Result]) -> Result:
    """Returns the result of a request, or raises its error.

    Args:
        seconds: Limit on the whole time.
        request: The request. After the deadline it goes on in a thread that does not keep the process alive.

    Raises:
        TimeoutError: The request was not complete at the deadline.
    """
    done: Future[Result] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            done.set_result(context.run(request))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="hfq-hub-request", daemon=True).start()
    if not wait([done], seconds).done:
        raise TimeoutError(f"no complete response within {seconds:.0f} s")
    return done.result()
