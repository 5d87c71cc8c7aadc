"""Tests that a copy or an allocation that fails gives a named error, and leaves the model right or gone."""

import gc
import time

import pytest
import torch

from hfq.errors import HfqError, PlacementError, SetupError
from hfq.loading import model_loader
from tests.support.accelerator_maps import MIXED
from tests.support.models import GPTQ, finish_reads, load

pytestmark = pytest.mark.accelerator

MAPS = {"1": {"": "sim:0"}, **MIXED}
PLACEMENTS = [pytest.param(name, marks=pytest.mark.slow if name == "1" else ()) for name in MAPS]
KINDS = {"copy": SetupError, "allocation": PlacementError}


@pytest.fixture(scope="module")
def tokens(sim):
    return torch.arange(8)[None].to("sim:0")


@pytest.fixture(scope="module")
def expected(tokens):
    return logits(load(GPTQ, {"": "sim:0"}), tokens)


def logits(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits.cpu()


def held(sim) -> list[int]:
    """Returns the bytes on each device after the readers of dropped models have ended their last jobs."""
    found: list[list[int]] = []
    while len(found) < 5 or found[-5:] != found[-1:] * 5:
        gc.collect()
        torch.accelerator.synchronize()
        found.append([sim.memory_allocated(index) for index in range(3)])
        time.sleep(0.02)
    return found[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_load_that_fails_is_named_and_leaves_no_bytes(sim, tokens, expected, placement, kind):
    logits(load(GPTQ, MAPS[placement]), tokens)  # the scratch memory of the kernels
    before, failures = held(sim), []
    for count in range(1, 51):
        sim.fail(**{kind: count})
        try:
            model = load(GPTQ, MAPS[placement])
        except HfqError as error:
            failures.append((type(error), error.message))
            continue
        finally:
            sim.fail()
        assert torch.equal(logits(model, tokens), expected)
        del model
        break
    assert {found for found, _ in failures} == {KINDS[kind]}
    assert all("accelerator" in message for _, message in failures)
    assert held(sim) == before


def test_the_error_of_a_device_that_fills_up_during_a_load_names_its_bytes(sim, tokens, monkeypatch):
    monkeypatch.setattr(model_loader, "check_room", lambda *_: None)  # another process may take the memory
    sim.set_capacity(1, sim.memory_allocated(1) + 50_000)
    try:
        with pytest.raises(PlacementError) as caught:
            load(GPTQ, MAPS["2+cpu+disk"])
    finally:
        sim.set_capacity(1, 1 << 30)
    assert "sim:1" in caught.value.expected
    assert "B of weights planned" in caught.value.expected
    assert "B held" in caught.value.found
    assert "device 1 is out of memory" in caught.value.found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_forward_pass_that_fails_raises_and_the_next_is_right(sim, tokens, expected, placement, kind):
    model, failures = load(GPTQ, MAPS[placement]), []
    for count in range(1, 51):
        sim.fail(**{kind: count})
        try:
            assert torch.equal(logits(model, tokens), expected)
        except (HfqError, RuntimeError) as error:  # torch's errors of devices are RuntimeErrors
            failures.append(str(error))
        finally:
            finish_reads(model)  # a late reader would mark a failed copy after it is forgiven
            sim.fail()
        assert torch.equal(logits(model, tokens), expected)
    assert failures
    assert all("simulated accelerator" in text for text in failures)
