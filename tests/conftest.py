"""No test waits for a compiler: the compiled kernel is switched off, but for the tests that take the fixture
`native`.
"""

import gc
import os

import hypothesis
import pytest

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

os.environ["HFQ_DISABLE_CPP"] = "1"
os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # read when Triton is first imported, by whomever; 0 where there is a GPU


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays to the end: Python's collector looks through it neither meanwhile
    nor afterwards.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def compiled():
    """The compiled part, built into the user's own cache unless it is there."""
    from hfq.kernels.cpp import library

    with library.use("cpp"):
        if library.library() is None:
            pytest.skip(f"no compiled kernel: {library.reason_missing()}")
        return library.library()


@pytest.fixture(scope="session")
def emulated(compiled, tmp_path_factory):
    """As `compiled`, with plain C++ in place of AVX-512 and of tiles, which can be tested anywhere."""
    import subprocess

    from hfq.kernels.cpp import build, library

    made = tmp_path_factory.mktemp("emulated") / "kernels.so"
    flags = [flag for flag in build.FLAGS if flag != "-O2"]
    subprocess.run(
        [*build.find_compiler(), "-DHFQ_EMULATE", "-O1", *flags, str(build.SOURCE), "-o", str(made)],
        check=True,
    )
    return library.load(made)


@pytest.fixture
def native(compiled):
    """The compiled part, in use for one test, at the best level of the processor."""
    from hfq.kernels.cpp import library

    with library.use(compiled):
        yield compiled
