"""Tests that a Hub which sends one byte at a time is not waited for without end."""

import threading
import time

import huggingface_hub.constants
import pytest

from hfq.errors import CheckpointError
from hfq.integrations.hub import fetch
from hfq.integrations.hub.deadline import within_deadline
from hfq.integrations.hub.find import find_checkpoint
from tests.support.fake_hub import FakeHub, running
from tests.support.tiny_models import DATA

NAME = "tests/tiny-llama-gptq"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with running(FakeHub({NAME: DATA / "tiny-llama-gptq"}), monkeypatch) as started:
        monkeypatch.setattr(fetch, "_deadline", lambda nbytes: 0.4)
        yield started


def drip(monkeypatch, hub, when):
    """Lets the server send its answers byte by byte, each within the timeout of the client."""
    handler = hub.server.RequestHandlerClass
    original = handler.do_GET

    def do_get(self):
        if not when(self.path):
            return original(self)
        raw, stop = self.connection, threading.Event()
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100000
        for byte in answer:
            try:
                raw.sendall(bytes([byte]))
            except OSError:
                return None
            if stop.wait(0.05):
                return None
        return None

    monkeypatch.setattr(handler, "do_GET", do_get)


@pytest.mark.parametrize(
    "part", ["/api/models/", "config.json", "model.safetensors"], ids=["files", "config", "header"]
)
def test_a_dripping_hub_ends_with_an_error(hub, monkeypatch, part):
    drip(monkeypatch, hub, lambda path: part in path)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match="cannot fetch the model") as caught, find_checkpoint(NAME):
        pass
    assert time.monotonic() - begin < 60  # the whole answer takes 5,000 s
    assert "no complete response within" in caught.value.found
    assert caught.value.fix


def test_results_and_errors_of_a_request_are_passed_on():
    assert within_deadline(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within_deadline(5, lambda: 1 / 0)

    def late():
        raise TimeoutError("of the socket")

    with pytest.raises(TimeoutError, match="of the socket"):
        within_deadline(5, late)


def test_a_deadline_grows_with_the_bytes():
    assert fetch._deadline(0) == 120
    assert fetch._deadline(256_000_000) == 1120
