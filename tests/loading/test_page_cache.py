"""Tests of early reads into the page cache, which only fully mapped checkpoints get."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig, PlacementError
from hfq.checkpoint import Checkpoint
from hfq.checkpoint.shared_memory import SharedMemory
from hfq.loading import page_cache
from hfq.loading.context import load_context
from tests.support import tiny_models

GPTQ = tiny_models.DATA / "tiny-llama-gptq"


@pytest.mark.parametrize(
    ("device_map", "cpu_memory", "reads"),
    [
        (None, "auto", True),
        ("cpu", "auto", True),
        (torch.device("cpu"), "auto", True),
        ({"": "cpu"}, "mmap", True),
        (0, "auto", False),
        ("auto", "auto", False),
        ({"": 0}, "auto", False),
        ({"": "cpu", "model.layers.1": "disk"}, "auto", False),
        (None, "private", False),
        (None, "shared", False),
    ],
)
def test_only_a_checkpoint_that_is_mapped_whole_is_read_early(monkeypatch, device_map, cpu_memory, reads):
    monkeypatch.setattr(page_cache, "_SMALL", 0)
    with page_cache.filling_page_cache(Checkpoint.open(GPTQ), device_map, cpu_memory):
        assert (load_context().page_cache_reads is not None) == reads
    assert load_context().page_cache_reads is None


def test_shared_memory_that_was_asked_for_and_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(SharedMemory, "open", lambda *_, **__: None)
    with pytest.raises(PlacementError, match="do not fit in shared memory"):
        AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=HfqConfig(cpu_memory="shared"))
