"""The compiled kernel, built once into the user's own cache; its tests are skipped where there is no compiler."""

import pytest

from hfq.kernels.native import library


@pytest.fixture(scope="session")
def compiled():
    """The settled state of a process that wants the compiled part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.SWITCH, "1")
        once = library._Once()
        once.settle()
    if once.library is None:
        pytest.skip(f"no compiled kernel: {once.reason}")
    return once


@pytest.fixture
def native(compiled, monkeypatch):
    """The compiled part, in use for one test, at the best level of the processor."""
    monkeypatch.setattr(library, "_once", compiled)
    yield compiled.library
    compiled.library.hfq_use(-1)
