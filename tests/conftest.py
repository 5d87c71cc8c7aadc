"""Fixtures for all tests.

The compiled kernel is switched off, except for tests with the fixture `native`, so that no test waits for a
compiler.
"""

import gc
import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

os.environ["HFQ_DISABLE_CPP"] = "1"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read at the first import of Triton


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freezes all imported and collected objects, so that Python's garbage collector skips them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def compiled():
    """The compiled C++ part, built into the user's cache if it is missing."""
    from hfq.kernels.cpp import library

    with library.use("cpp"):
        if library.library() is None:
            pytest.skip(f"no compiled kernel: {library.reason_missing()}")
        return library.library()


@pytest.fixture(scope="session")
def emulated(compiled, tmp_path_factory):
    """Same as `compiled`, with plain C++ instead of AVX-512 and AMX tiles, for any machine.

    One test process builds it for all of them.
    """
    import subprocess

    from hfq.kernels.cpp import build, library
    from tests.support.zero_launch import once, shared_folder

    made = shared_folder(tmp_path_factory) / "emulated.so"
    flags = [flag for flag in build.FLAGS if flag != "-O2"]
    command = [*build.find_compiler(), "-DHFQ_EMULATE", "-O1", *flags, str(build.SOURCE), "-o", str(made)]
    once(tmp_path_factory, "emulated", lambda: subprocess.run(command, check=True).args)
    return library.load(made)


@pytest.fixture
def native(compiled):
    """The compiled C++ part, in use for one test, at the best level of the processor."""
    from hfq.kernels.cpp import library

    with library.use(compiled):
        yield compiled
