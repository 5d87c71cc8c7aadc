"""Tests of the counts of a decoded token: waits, copies, bytes, and allocations."""

import threading

import pytest
import torch

from hfq.offload.copy_stream import AcceleratorCopyStream
from tests.support.accelerator_maps import LAYERS, MIXED
from tests.support.models import GPTQ, finish_reads, load

pytestmark = pytest.mark.accelerator

TOKENS = 4
MAPS = {
    "1+cpu": {"": "sim:0", **dict.fromkeys(LAYERS, "cpu")},
    "1+disk": {"": "sim:0", LAYERS[0]: "disk", LAYERS[1]: "disk", LAYERS[2]: "disk"},
    **MIXED,
}


def decode(sim, model) -> dict:
    """Returns the counts of some decoded tokens after a prefill and one token."""
    with torch.no_grad():
        state = model(torch.arange(8)[None].to("sim:0"), use_cache=True).past_key_values
        token = torch.tensor([[1]]).to("sim:0")
        model(token, past_key_values=state)
        finish_reads(model)
        sim.take_counts()
        for _ in range(TOKENS):
            model(token, past_key_values=state)
        finish_reads(model)
    return sim.take_counts()


@pytest.fixture(scope="module")
def resident(sim):
    """The counts of models without offloaded layers, by number of accelerators."""
    two = {"": "sim:0", LAYERS[2]: "sim:1", LAYERS[3]: "sim:1", "model.norm": "sim:1", "lm_head": "sim:1"}
    return {1: decode(sim, load(GPTQ, {"": "sim:0"})), 2: decode(sim, load(GPTQ, two))}


@pytest.mark.parametrize("placement", MAPS)
def test_a_decoded_token_waits_and_copies_only_what_is_offloaded(sim, monkeypatch, resident, placement):
    model, waits = load(GPTQ, MAPS[placement]), []
    for name in ("finish", "synchronize"):
        original = getattr(AcceleratorCopyStream, name)

        def noted(self, mark, original=original):
            waits.append(threading.current_thread().name)
            original(self, mark)

        monkeypatch.setattr(AcceleratorCopyStream, name, noted)
    found, expected = decode(sim, model), resident[2 if "sim:1" in MAPS[placement].values() else 1]
    assert all(name.startswith("hfq-reader") for name in waits)
    assert found["device synchronizations"] == found["stream synchronizations"] == 0
    assert found["event synchronizations"] <= len(waits)
    assert found["waited"] == expected["waited"]
    assert found["pageable copies"] == expected["pageable copies"]
    assert found["allocations"] <= expected["allocations"] + TOKENS * norms(model)
    units = model.hf_quantizer.loading.offloader.units
    devices = [unit.device for unit in units]
    # a buffer has room for two units, and keeps them
    infos = [info for unit in units if devices.count(unit.device) > 2 for info in unit.infos]
    copied = found["pinned bytes"] - expected["pinned bytes"]
    nbytes = TOKENS * sum(info.nbytes for info in infos)
    assert nbytes <= copied <= nbytes + TOKENS * 256 * len(infos)


def norms(model) -> int:
    """Returns the number of unquantized offloaded parameters, which are cast to the model's dtype."""
    return sum(len(unit.unquantized) for unit in model.hf_quantizer.loading.offloader.units)


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_looked_up_rows_come_from_pinned_memory(sim, device):
    model, expected = load(GPTQ, {"": "sim:0", "model.embed_tokens": device}), load(GPTQ, {"": "sim:0"})
    tokens = torch.tensor([[1, 5, 5, 2]]).to("sim:0")
    with torch.no_grad(), sim.streams(default="lazy", others="lazy"):
        model(tokens)  # the tied head stays in its buffer
        sim.take_counts()
        found = model(tokens).logits
        counts = sim.take_counts()
        assert torch.equal(found.cpu(), expected(tokens).logits.cpu())
    row = model.config.hidden_size * 2
    assert (counts["pageable copies"], counts["pinned bytes"]) == (0, 4 * row)
    assert counts["event synchronizations"] == 0
