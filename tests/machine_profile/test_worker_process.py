"""Tests of workers: answers only, with exceptions as answers, and dead workers as errors."""

import pytest

from hfq import SetupError
from hfq.machine_profile.worker_process import Worker, memory, reset_peak
from tests.support import programs


@pytest.fixture
def worker(monkeypatch):
    folder = programs.path("answer_requests").parent
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    with Worker("answer_requests", option=7) as worker:
        yield worker


def test_answers_are_apart_from_what_is_printed(worker):
    assert worker.ask("add", first=1, second=2) == {"sum": 3, "options": {"option": 7}}
    assert worker.ask("add", first=3, second=4)["sum"] == 7


def test_an_exception_is_an_answer_with_its_causes(worker):
    assert worker.ask("fail") == {"error": "ValueError: first line; from KeyError: 'the cause'"}
    assert worker.ask("add", first=1, second=1)["sum"] == 2


def test_a_death_is_an_error_that_tells_the_reason(worker):
    with pytest.raises(SetupError, match="the reason"):
        worker.ask("die")


def test_a_worker_tells_its_memory(worker):
    found = worker.ask("memory")
    assert all(value >= 0 for value in found.values())
    if "peak_rss" in found:
        assert found["peak_rss"] >= found["rss"] >= found["anonymous"]


def test_the_peak_starts_anew():
    if "peak_rss" not in memory():
        pytest.skip("the system does not tell the peak")
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    high = memory()["peak_rss"]
    del block
    reset_peak()
    assert memory()["peak_rss"] < high - (32 << 20)
