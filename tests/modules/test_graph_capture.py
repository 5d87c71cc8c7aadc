"""Modules whose weights a CUDA graph cannot hold refuse to be recorded, by name."""

import pytest
import torch

import hfq
from hfq.formats.codecs.thread_buffers import release_buffers, thread_buffer
from tests.support.models import GPTQ, load


def start_recording(monkeypatch) -> None:
    """Makes a CUDA graph seem to record the current stream."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_an_offloaded_layer_names_itself_and_the_model_stays_usable(monkeypatch):
    model, resident = load(GPTQ, {"": "cpu", "model.layers.2": "disk"}), load(GPTQ)
    tokens = torch.arange(4)[None]
    start_recording(monkeypatch)
    with torch.no_grad(), pytest.raises(hfq.SetupError, match=r"model\.layers\.2.*CUDA graph.*offloaded"):
        model(tokens)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, resident(tokens).logits)


def test_resident_layers_may_be_recorded(monkeypatch):
    model = load(GPTQ)
    start_recording(monkeypatch)
    with torch.no_grad():
        assert model(torch.arange(4)[None]).logits.isfinite().all()


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
