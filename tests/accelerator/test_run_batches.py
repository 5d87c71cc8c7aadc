"""Tests that layer-major runs on accelerators give the bits of separate passes, in every stream."""

import contextlib

import pytest
import torch

from hfq import run_batches
from tests.support.accelerator_maps import LAYERS, MIXED, ORDERS
from tests.support.models import GPTQ, finish_reads, load

pytestmark = pytest.mark.accelerator
BATCHES = [torch.arange(2, 2 + 2 * length).reshape(2, length) for length in (3, 7, 1)]
"""Token ids on the CPU: a model sends them to its first accelerator."""


@pytest.fixture(scope="module")
def expected(sim):
    model = load(GPTQ, {"": "sim:0"})
    with torch.no_grad():
        return [(logits(model, tokens), generate(model, tokens)) for tokens in BATCHES]


def logits(model, tokens) -> torch.Tensor:
    return model(tokens.to("sim:0")).logits.cpu()


def generate(model, tokens) -> torch.Tensor:
    return model.generate(tokens.to("sim:0"), max_new_tokens=3, do_sample=False, pad_token_id=0).cpu()


def streams_of(devices) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for device in devices:
        stack.enter_context(torch.Stream(device))
    return stack


STREAMS = {"default": [], "user's": ["sim:0"], "user's of both": ["sim:0", "sim:1"], "another's": ["sim:1"]}


@pytest.mark.parametrize("placement", MIXED)
@pytest.mark.parametrize("stream", STREAMS)
def test_results_are_those_of_separate_passes(sim, expected, placement, stream):
    with sim.streams(**ORDERS["lazy"]), torch.no_grad():
        model = load(GPTQ, MIXED[placement])
        with streams_of(STREAMS[stream]):
            outputs = run_batches(model, BATCHES)
            generated = run_batches(model, BATCHES, lambda tokens: generate(model, tokens))
            found = [output.logits.cpu() for output in outputs]
    assert all(torch.equal(one, both[0]) for one, both in zip(found, expected, strict=True))
    assert all(torch.equal(one, both[1]) for one, both in zip(generated, expected, strict=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MIXED)
def test_each_batch_may_have_streams_of_its_own(sim, expected, placement, order):
    def run(tokens):
        with streams_of(["sim:1", "sim:0"]):
            return logits(model, tokens)

    with sim.streams(**ORDERS[order]), torch.no_grad():
        model = load(GPTQ, MIXED[placement])
        found = [run_batches(model, BATCHES, run) for _ in range(2)]
    for results in found:
        assert all(torch.equal(one, both[0]) for one, both in zip(results, expected, strict=True))


def test_each_unit_is_copied_once_for_all_batches(sim):
    def copied(count: int) -> int:
        torch.accelerator.synchronize()
        sim.take_counts()
        with torch.no_grad():
            run_batches(model, [BATCHES[0].to("sim:0")] * count)
        finish_reads(model)
        torch.accelerator.synchronize()
        return sim.take_counts()["pinned copies"]

    model = load(GPTQ, {"": "sim:0"} | {layer: ("cpu", "disk")[at % 2] for at, layer in enumerate(LAYERS)})
    copied(2)
    assert copied(2) == copied(5) > 0
