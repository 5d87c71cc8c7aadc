"""The C++ library, loaded once per process.

`HFQ_DISABLE_CPP=1` disables it. The first `HfqConfig` starts the build in the background. The first model
that chooses its kernels waits for the build, so that all models of a process use the same kernels. For
comparisons and tests, `with use("torch")` (or `"cpp"`, or a loaded library) replaces the library.
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

from hfq.kernels.cpp.build import BuildError, load_built
from hfq.kernels.cpp.openmp_team import team

__all__ = [
    "ABI",
    "SWITCH",
    "Engine",
    "declare",
    "library",
    "load",
    "reason_missing",
    "restore_defaults",
    "start",
    "use",
]

SWITCH = "HFQ_DISABLE_CPP"
"""The environment variable that disables the C++ library if set to "1"."""

ABI = 10
"""The value that `hfq_abi` of src/kernels.cpp must return."""

Engine = Literal["auto", "cpp", "torch"]
"""The choice of a library: `"auto"` is `"cpp"` unless disabled; `"torch"` is none."""

logger = logging.getLogger(__name__)


class _Choice:
    """The library that products use, chosen once by the first thread that requires it.

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
                        "hfq multiplies in plain torch, which is slower: %s. (%s=1 silences this warning.)",
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
            raise BuildError("it supports little-endian machines only")
        return declare(load_built())


_choice = _Choice()


def start() -> None:
    """Starts the build in the background, unless it is disabled or was started."""
    if _choice.is_settled or _choice.thread is not None or not _choice.is_wanted:
        return
    _choice.thread = threading.Thread(target=_choice.settle, name="hfq-build", daemon=True)
    _choice.thread.start()


def library() -> ctypes.CDLL | None:
    """Returns the C++ library, or None if it is unavailable; waits for the build."""
    if not _choice.is_settled:
        _choice.settle()
    return _choice.library


def reason_missing() -> str | None:
    """Returns why the C++ library is unavailable, or None; waits for the build."""
    library()
    return _choice.reason


@contextlib.contextmanager
def use(engine: Engine | ctypes.CDLL) -> Iterator[None]:
    """Replaces the library of all threads of this process, until the context ends.

    For tests and comparisons. Contexts may be nested. The library is built on first use. The end of the
    context restores its default settings (`hfq_use…`).

    Args:
        engine: `"cpp"` uses the C++ library, built or from the cache, and ignores `HFQ_DISABLE_CPP`.
            `"torch"` uses no library, as without a compiler. `"auto"` chooses as in a new process. A library
            that `load` returned is also valid.
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
    """Resets every `hfq_use…` setting of a library to the best choice for this processor."""
    for setting in (library.hfq_use, library.hfq_use_subnormals, library.hfq_use_short, library.hfq_use_vnni):
        setting(-1)


def is_wanted() -> bool:
    """Returns True if the environment does not disable the C++ library."""
    return os.environ.get(SWITCH, "0") in ("", "0")


def load(path: Path) -> ctypes.CDLL:
    """Loads a library compiled from kernels.cpp.

    Raises:
        BuildError: The library cannot be loaded, or has another version of the interface.
    """
    try:
        return declare(ctypes.CDLL(str(path)))
    except OSError as error:
        raise BuildError(f"the built library cannot be loaded: {error}") from error


def declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the interface of a library compiled from kernels.cpp, and returns it.

    Raises:
        BuildError: The library has another version of the interface.
    """
    try:
        return _declared(loaded)
    except AttributeError as error:
        raise BuildError(f"the built library cannot be loaded: {error}") from error


def _forget() -> None:
    """Resets the choice in the child of a fork.

    The child has no build thread, but its copy of the lock may be held.
    """
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
        raise BuildError(f"the cached library has interface version {loaded.hfq_abi()}, not {ABI}")
    for function in (loaded.hfq_most_rows, loaded.hfq_scratch):
        function.restype = int64
    loaded.hfq_scratch.argtypes = [pointer, int64]
    loaded.hfq_is_tiled.argtypes = [pointer, int64, int32]
    loaded.hfq_linear.argtypes = [ctypes.c_char_p]
    loaded.hfq_dense.argtypes = [ctypes.c_char_p]
    loaded.hfq_ternary.argtypes = [ctypes.c_char_p]
    for function in (loaded.hfq_experts_in, loaded.hfq_experts_out):
        function.argtypes, function.restype = [ctypes.c_char_p], int64
    loaded.hfq_dequantize.argtypes = [pointer, int64, int64, pointer, int32, ctypes.c_int]
    loaded.hfq_use_team.argtypes = [pointer]
    loaded.hfq_use_team(team())
    return loaded
