"""Loads the compiled part, once for a process: whether it is there is settled before the first model is, and
never changes.

`HFQ_DISABLE_CPP=1` switches it off. The build begins in the background with the first `HfqConfig` and is
waited for where the first model chooses its kernels, so that all models of a process multiply alike.
`with use("torch")` (or `"cpp"`, or a loaded library) replaces it, for a comparison or a test.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from hfq.kernels.cpp.build import BuildError, build
from hfq.kernels.cpp.openmp_team import team

__all__ = ["ABI", "SWITCH", "Engine", "library", "load", "reason_missing", "restore_defaults", "start", "use"]

SWITCH = "HFQ_DISABLE_CPP"
"""The environment variable that switches the compiled part off: "1"."""

ABI = 7
"""What `hfq_abi` of src/kernels.cpp must return."""

Engine = Literal["auto", "cpp", "torch"]
"""What products use: the compiled part if the environment leaves it on, the compiled part, or torch alone."""

logger = logging.getLogger(__name__)


class _Choice:
    """The library that products use: chosen once, by the first thread that asks.

    Args:
        engine: As in `use`.
    """

    def __init__(self, engine: Engine | ctypes.CDLL = "auto") -> None:
        self.engine = engine
        self.lock = threading.RLock()
        self.thread: threading.Thread | None = None
        self.is_settled = False
        self.library: ctypes.CDLL | None = None
        self.reason: str | None = None

    @property
    def is_wanted(self) -> bool:
        return is_wanted() if self.engine == "auto" else self.engine != "torch"

    def settle(self) -> None:
        with self.lock:
            if self.is_settled:
                return
            try:
                self.library = self._find()
            except BuildError as error:
                self.reason = str(error)
                if self.is_wanted:
                    logger.warning(
                        "hfq multiplies in plain torch, which is slower: %s. (%s=1 silences this.)",
                        error,
                        SWITCH,
                    )
            self.is_settled = True

    def _find(self) -> ctypes.CDLL:
        if isinstance(self.engine, ctypes.CDLL):
            return self.engine
        if not self.is_wanted:
            raise BuildError(
                f"{SWITCH}={os.environ[SWITCH]}" if self.engine == "auto" else f"use({self.engine!r})"
            )
        if sys.byteorder != "little":
            raise BuildError("it reads little-endian words only")
        return load(build())


_choice = _Choice()


def start() -> None:
    """Begins to build in the background, where that is wanted and was not begun."""
    if _choice.is_settled or _choice.thread is not None or not _choice.is_wanted:
        return
    _choice.thread = threading.Thread(target=_choice.settle, name="hfq-build", daemon=True)
    _choice.thread.start()


def library() -> ctypes.CDLL | None:
    """The compiled part, waiting for it where it is being built; None where it cannot be had."""
    if not _choice.is_settled:
        _choice.settle()
    return _choice.library


def reason_missing() -> str | None:
    """Why there is no compiled part, or None where there is one."""
    library()
    return _choice.reason


@contextlib.contextmanager
def use(engine: Engine | ctypes.CDLL) -> Iterator[None]:
    """Replaces the library that all threads of this process multiply with, until the context ends.

    For tests and comparisons. Contexts may be nested. A library is built when it is first asked for; its
    settings (`hfq_use…`) are the defaults again at the end.

    Args:
        engine: `"cpp"`: the compiled part, built or found in the cache, whatever `HFQ_DISABLE_CPP` says.
            `"torch"`: none, as without a compiler. `"auto"`: what a new process would use. Or a library that
            `load` returned.
    """
    global _choice
    before, _choice = _choice, _Choice(engine)
    if isinstance(engine, ctypes.CDLL):
        _choice.settle()
    try:
        yield
    finally:
        if _choice.thread is not None:
            _choice.thread.join()
        if _choice.library is not None:
            restore_defaults(_choice.library)
        _choice = before


def restore_defaults(library: ctypes.CDLL) -> None:
    """Undoes every `hfq_use…` of a library: it multiplies as is best on this processor."""
    for setting in (library.hfq_use, library.hfq_use_subnormals, library.hfq_use_short, library.hfq_use_vnni):
        setting(-1)


def is_wanted() -> bool:
    """Whether the environment leaves it on."""
    return os.environ.get(SWITCH, "0") in ("", "0")


def load(path: Path) -> ctypes.CDLL:
    """Loads a library that was compiled from kernels.cpp.

    Raises:
        BuildError: It cannot be loaded, or speaks another version of the interface.
    """
    try:
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise BuildError(f"it was built and cannot be loaded: {error}") from error


def _forget() -> None:
    """In the child of a fork the thread is gone, and its lock may be held for ever."""
    global _choice
    if not _choice.is_settled:
        _choice = _Choice(_choice.engine)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    int64 = ctypes.c_int64
    int32 = ctypes.c_int32
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
