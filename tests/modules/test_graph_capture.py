"""Modules whose weights a CUDA graph cannot hold refuse to be recorded, by name."""

import pytest
import torch

import hfq
from hfq.formats.codecs.thread_buffers import release_buffers, thread_buffer
from tests.support.models import GPTQ, load


@pytest.fixture
def recording(monkeypatch):
    """A CUDA graph that seems to record the current stream."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_an_offloaded_layer_names_itself_and_the_model_stays_usable(recording, monkeypatch):
    model = load(GPTQ, {"": "cpu", "model.layers.2": "disk"})
    tokens = torch.arange(4)[None]
    with torch.no_grad(), pytest.raises(hfq.SetupError, match=r"model\.layers\.2.*CUDA graph.*offloaded"):
        model(tokens)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, load(GPTQ)(tokens).logits)


def test_resident_layers_may_be_recorded(recording):
    with torch.no_grad():
        assert load(GPTQ)(torch.arange(4)[None]).logits.isfinite().all()


def test_buffers_of_a_recorded_graph_are_not_kept(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: torch.Stream.__new__(torch.Stream))
    release_buffers()
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "empty", lambda numel, dtype, device: torch.zeros(numel, dtype=dtype))
    first = thread_buffer("test", torch.float32, device, 4)
    assert thread_buffer("test", torch.float32, device, 4).data_ptr() != first.data_ptr()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kept = thread_buffer("test", torch.float32, device, 4)
    assert thread_buffer("test", torch.float32, device, 4).data_ptr() == kept.data_ptr()
    release_buffers()
