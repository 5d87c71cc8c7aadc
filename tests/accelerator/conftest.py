"""Fixtures of the accelerator suite.

It runs in a process of its own, `pytest -m accelerator`, since torch has one kind of accelerator per process.
"""

import pytest

from tests.support import simulated_accelerator


@pytest.fixture(scope="session", autouse=True)
def sim():
    """Three simulated devices."""
    reason = simulated_accelerator.missing()
    if reason:
        pytest.skip(reason)
    return simulated_accelerator.start(count=3)
