"""Loads the compiled part, once for a process: whether it is there is settled before the first model is, and
never changes.

`HFQ_DISABLE_CPP=1` switches it off. The build begins in the background with the first `HfqConfig` and is
waited for where the first model chooses its kernels, so that all models of a process multiply alike.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading

from hfq.kernels.cpp.build import BuildError, build
from hfq.kernels.cpp.openmp_team import team

__all__ = ["ABI", "SWITCH", "library", "reason_missing", "start"]

SWITCH = "HFQ_DISABLE_CPP"
"""The environment variable that switches the compiled part off: "1"."""

ABI = 7
"""What `hfq_abi` of src/kernels.cpp must return."""

logger = logging.getLogger(__name__)


class _Once:
    """The outcome, and the thread that works for it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread: threading.Thread | None = None
        self.is_settled = False
        self.library: ctypes.CDLL | None = None
        self.reason: str | None = None

    def settle(self) -> None:
        with self.lock:
            if self.is_settled:
                return
            try:
                self.library = _load()
            except BuildError as error:
                self.reason = str(error)
                if is_wanted():
                    logger.warning(
                        "hfq multiplies in plain torch, which is slower: %s. (%s=1 silences this.)",
                        error,
                        SWITCH,
                    )
            self.is_settled = True


_once = _Once()


def start() -> None:
    """Begins to build in the background, where that is wanted and was not begun."""
    if _once.is_settled or _once.thread is not None or not is_wanted():
        return
    _once.thread = threading.Thread(target=_once.settle, name="hfq-build", daemon=True)
    _once.thread.start()


def library() -> ctypes.CDLL | None:
    """The compiled part, waiting for it where it is being built; None where it cannot be had."""
    if not _once.is_settled:
        _once.settle()
    return _once.library


def reason_missing() -> str | None:
    """Why there is no compiled part, or None where there is one."""
    library()
    return _once.reason


def is_wanted() -> bool:
    """Whether the environment leaves it on."""
    return os.environ.get(SWITCH, "0") in ("", "0")


def _forget() -> None:
    """In the child of a fork the thread is gone, and its lock may be held for ever."""
    if not _once.is_settled:
        _once.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _load() -> ctypes.CDLL:
    if not is_wanted():
        raise BuildError(f"{SWITCH}={os.environ[SWITCH]}")
    if sys.byteorder != "little":
        raise BuildError("it reads little-endian words only")
    try:
        loaded = ctypes.CDLL(str(build()))
        return _declared(loaded)
    except (OSError, AttributeError) as error:
        raise BuildError(f"it was built and cannot be loaded: {error}") from error


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    if loaded.hfq_abi() != ABI:
        raise BuildError(f"the cached library speaks version {loaded.hfq_abi()}, not {ABI}")
    for function in (loaded.hfq_most_rows, loaded.hfq_scratch):
        function.restype = int64
    loaded.hfq_scratch.argtypes = [pointer, int64]
    loaded.hfq_is_tiled.argtypes = [pointer, int64, int32]
    loaded.hfq_linear.argtypes = [ctypes.c_char_p]
    loaded.hfq_grouped.argtypes = [
        pointer,
        pointer,
        int64,
        pointer,
        int32,
        int64,
        pointer,
        int32,
        int64,
        ctypes.c_int,
    ]
    loaded.hfq_dequantize.argtypes = [pointer, int64, int64, pointer, int32, ctypes.c_int]
    loaded.hfq_use_team.argtypes = [pointer]
    loaded.hfq_use_team(team())
    return loaded
