"""Compilation of kernels.cpp and int8.cpp on first use.

Libraries are stored in the user's cache, keyed by source, headers, compiler, and flags. If many ranks start
together, one compiles under a file lock, and the others wait. A complete library is renamed into the cache,
next to its checksum. A truncated file is therefore built again and never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

__all__ = ["BuildError", "CompilerNotFoundError", "FLAGS", "SOURCE", "build", "cache_folder", "find_compiler"]

SOURCE = Path(__file__).parent / "src" / "kernels.cpp"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w")
_NAMES = ("c++", "g++", "clang++")
SECONDS = 300.0
"""Seconds to wait for the compiler, or for another process that compiles."""


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
    source, compiler = source or SOURCE, find_compiler()
    try:
        folder = cache_folder()
        target = folder / f"{source.stem}-{_key(compiler, source)}.so"
        if not _is_whole(target):
            with _locked(target.with_suffix(".lock")):
                if not _is_whole(target):
                    _compile(compiler, source, target)
    except OSError as error:
        raise BuildError(f"the cache cannot be used: {error}") from error
    return target


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

    Only the user may write to the folder, since its libraries are run.

    Raises:
        BuildError: Another user can write to the folder, or the user has no home directory.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without an entry in passwd, such as in containers, and no $HOME
        raise BuildError("there is no home directory for a cache: set XDG_CACHE_HOME") from error
    folder = caches / "hfq" / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        raise BuildError(f"other users can write to {folder}")
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


def _is_whole(target: Path) -> bool:
    """Returns True if the library exists and matches its checksum."""
    try:
        return target.with_suffix(".sha256").read_text() == _checksum(target)
    except (OSError, ValueError):
        return False


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
        checksum.write_text(_checksum(made))
        os.replace(made, target)
        os.replace(checksum, target.with_suffix(".sha256"))


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
