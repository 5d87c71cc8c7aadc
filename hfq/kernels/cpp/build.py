"""Compilation of kernels.cpp and int8.cpp on first use.

Libraries are stored in the user's cache, keyed by source, headers, compiler, and flags. If many ranks start
together, one compiles under a file lock, and the others wait. A library that can be loaded is renamed into
the cache, next to its checksum. A truncated file is therefore built again and never loaded.

Only this user and root may be able to change the cache, since its libraries are run. A library is loaded from
the descriptor whose owner, mode, and bytes were checked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import io
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hfq.checkpoint.private_folder import check_own, private_folder, user_cache
from hfq.errors import SetupError

__all__ = [
    "BuildError",
    "CompilerNotFoundError",
    "FLAGS",
    "SOURCE",
    "build",
    "cache_folder",
    "find_compiler",
    "load_built",
]

SOURCE = Path(__file__).parent / "src" / "kernels.cpp"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w")
_NAMES = ("c++", "g++", "clang++")
SECONDS = 300.0
"""Seconds to wait for the compiler, or for another process that compiles."""

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """The C++ library is unavailable; the message is the reason."""


class CompilerNotFoundError(BuildError):
    """This machine has no C++ compiler, neither of the system nor of the package ziglang."""


def build(source: Path | None = None) -> Path:
    """Returns the path of the compiled library, and builds it unless it is in the cache.

    Args:
        source: The source file; None for kernels.cpp.

    Raises:
        BuildError: There is no compiler, it failed, or the cache cannot be used.
    """
    with _built(source or SOURCE) as (target, _):
        return target


def load_built(source: Path | None = None) -> ctypes.CDLL:
    """Loads the compiled library, which is built unless it is in the cache.

    Args:
        source: The source file; None for kernels.cpp.

    Raises:
        BuildError: As `build`, or the library cannot be loaded.
    """
    with _built(source or SOURCE) as (target, library):
        descriptor = os.dup(library.fileno())  # stays open: the linker knows a loaded library by its path
    checked = f"/proc/self/fd/{descriptor}"
    try:
        return ctypes.CDLL(checked if os.path.exists(checked) else str(target))
    except OSError as error:
        os.close(descriptor)
        raise BuildError(f"the built library cannot be loaded: {error}") from error


@contextlib.contextmanager
def _built(source: Path) -> Iterator[tuple[Path, io.BufferedReader]]:
    """Yields the path of a library and the open file that was checked."""
    compiler = find_compiler()
    with contextlib.ExitStack() as opened:
        try:
            target = cache_folder() / f"{source.stem}-{_key(compiler, source)}.so"
            library = _open_whole(target)
            if library is None:
                with _locked(target.with_suffix(".lock")):
                    library = _open_whole(target)
                    if library is None:
                        _compile(compiler, source, target)
                        library = _open_whole(target)
        except OSError as error:
            raise BuildError(f"the cache cannot be used: {error}") from error
        if library is None:
            raise BuildError(f"{target} changed while it was built")
        yield target, opened.enter_context(library)


def find_compiler() -> list[str]:
    """Returns the C++ compiler, as the first words of a command.

    The first of these that exists: `$CXX`, a compiler with a usual name, and that of the package ziglang.

    Raises:
        CompilerNotFoundError: There is no C++ compiler.
        BuildError: `$CXX` names a program that does not exist.
    """
    wanted = os.environ.get("CXX", "")
    try:
        words = shlex.split(wanted)  # `ccache g++`, `g++ -m64`
    except ValueError as error:
        raise BuildError(f"CXX={wanted!r} is not a command: {error}") from error
    for program, *arguments in [words] if words else [[name] for name in _NAMES]:
        found = shutil.which(program)
        if found is not None:
            return [found, *arguments]
    if words:
        raise BuildError(f"CXX={wanted!r} names a compiler that is not there")
    if (zig := _find_zig()) is None:
        raise CompilerNotFoundError(
            "there is no C++ compiler (install g++ or clang++, or pip install 'hfq[compiler]')"
        )
    return [
        zig,
        "c++",
        "-mcpu=baseline",
    ]  # the default is this processor, but several machines may share the cache


def _find_zig() -> str | None:
    """Returns the path of Zig, or None.

    Zig is a complete clang that pip installs: https://pypi.org/project/ziglang.
    """
    try:
        spec = importlib.util.find_spec("ziglang")
    except ValueError:  # a module without `__spec__` is imported in its place
        return None
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next(filter(None, (shutil.which("zig", path=folder) for folder in folders)), None)


def cache_folder() -> Path:
    """Returns `hfq/native` in the user's cache folder, and creates it.

    If another user can change it, or if it cannot be used, the folder is a temporary one of this process, and
    a warning says why.
    """
    try:
        folder = private_folder(user_cache() / "native")
        if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise OSError(f"the file system of {folder} does not run programs (noexec)")
        return folder
    except (OSError, SetupError) as error:
        return _temporary_folder(error.message.rstrip(".") if isinstance(error, SetupError) else str(error))


@functools.cache
def _temporary_folder(reason: str) -> Path:
    folder = private_folder(tempfile.mkdtemp(prefix="hfq-native-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    logger.warning(
        "hfq compiles its kernels in each process, since the cache cannot be used: %s. (Set XDG_CACHE_HOME "
        "to a folder that only you can write to.)",
        reason,
    )
    return folder


def _key(compiler: Sequence[str], source: Path) -> str:
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{' '.join(compiler)} --version failed: {error}") from error
    parts = (
        source.read_bytes(),
        *[header.read_bytes() for header in sorted(source.parent.glob("*.h"))],
        "\0".join(compiler).encode(),
        version,
        " ".join(FLAGS).encode(),
        platform.machine().encode(),
        sys.platform.encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _open_whole(target: Path) -> io.BufferedReader | None:
    """Opens a library; None if another user can change it, or it misses its checksum."""
    with contextlib.ExitStack() as undo:
        try:
            descriptor = os.open(target, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            library = undo.enter_context(os.fdopen(descriptor, "rb"))
            status = os.fstat(descriptor)
            check_own(status, target)
            expected = target.with_suffix(".sha256").read_text(encoding="ascii")
            if not stat.S_ISREG(status.st_mode) or _checksum(library) != expected:
                return None
        except (OSError, ValueError):
            return None
        undo.pop_all()
    return library


def _checksum(file: io.BufferedReader) -> str:
    return hashlib.sha256(file.read()).hexdigest()


def _compile(compiler: Sequence[str], source: Path, target: Path) -> None:
    for left in target.parent.glob(
        f"{target.stem}.*.tmp"
    ):  # left by a process that ended while it compiled; this process holds the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.stem}.", suffix=".tmp") as work:
        made, checksum = Path(work) / target.name, Path(work) / "sha256"
        with _start([*compiler, *FLAGS, str(source), "-o", str(made)]) as process:
            try:
                _, errors = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise BuildError(f"{' '.join(compiler)} took longer than {SECONDS:g} s") from error
        if process.returncode:
            first = next((line for line in errors.splitlines() if "error" in line), "without a message")
            raise BuildError(f"{' '.join(compiler)} failed: {first}")
        _check_loads(compiler, made)
        made.chmod(0o700)
        with made.open("rb") as library:
            checksum.write_text(_checksum(library), encoding="ascii")
        os.replace(made, target)
        os.replace(checksum, target.with_suffix(".sha256"))


def _check_loads(compiler: Sequence[str], made: Path) -> None:
    """Raises an error if a compiler that reported success made no library."""
    try:
        ctypes.CDLL(str(made))
    except OSError as error:
        raise BuildError(f"{' '.join(compiler)} made a library that cannot be loaded: {error}") from error


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a compiler while no thread of this process forks.

    A forked child would inherit an end of the compiler's pipes and keep it open while it waits for the build
    lock. The holder of the lock would wait for the end of the pipe: a deadlock.
    """
    with _starting:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


_starting = threading.RLock()
"""Held by a thread that forks or starts a compiler."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release
    )


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds an exclusive file lock of the system, which ends with the process.

    A child that is forked meanwhile inherits the open file and thereby the lock, so the child closes it. The
    lock is also released explicitly, since a child may be forked before the file is in `_open_locks`.
    """
    try:
        import fcntl
    except ImportError as error:
        raise BuildError("this system does not support fcntl file locks") from error
    with file.open("wb", buffering=0) as held:
        _open_locks.add(held)
        try:
            _wait_for(lambda: fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB))
            yield
        finally:
            _open_locks.discard(held)
            fcntl.flock(held, fcntl.LOCK_UN)


def _wait_for(lock: Callable[[], None]) -> None:
    until = time.monotonic() + SECONDS
    while True:
        try:
            return lock()
        except BlockingIOError:
            if time.monotonic() > until:
                raise BuildError(f"another process has been compiling for {SECONDS:g} s") from None
            time.sleep(0.05)


_open_locks: set[io.FileIO] = set()


def _close_locks() -> None:
    """Closes the lock files in the child of a fork, where no thread holds them."""
    for file in _open_locks:
        file.close()
    _open_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)
