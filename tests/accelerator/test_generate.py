"""Tests that generation on accelerators with cpu and disk gives the tokens of one accelerator, with each cache."""

import pytest
import torch

from tests.support.accelerator_maps import MIXED, ORDERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator
TOKENS = torch.tensor([[0, 0, 7, 8, 9], [0, 4, 3, 2, 60], [5, 6, 7, 8, 9]])
BATCH = {"input_ids": TOKENS, "attention_mask": (TOKENS != 0).long()}
"""Prompts that are padded on the left."""
OPTIONS = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "no cache": {"use_cache": False},
}


def generate(model, options, device) -> list[torch.Tensor]:
    """Returns the tokens of a batch, and their scores."""
    batch = {name: tensor.to(device) for name, tensor in BATCH.items()}
    found = model.generate(
        **batch,
        **OPTIONS[options],
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [tensor.cpu() for tensor in (found.sequences, *found.logits)]


@pytest.fixture(scope="module", params=OPTIONS)
def expected(sim, request):
    return request.param, generate(load(GPTQ, {"": "sim:0"}), request.param, "sim:0")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MIXED)
def test_tokens_and_logits_are_those_of_one_accelerator(sim, expected, placement, order):
    options, tensors = expected
    with sim.streams(**ORDERS[order]):
        model = load(GPTQ, MIXED[placement])
        found = generate(model, options, "sim:0")
    assert len(found) == 7
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


@pytest.mark.parametrize("placement", MIXED)
@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_prompts_may_be_on_any_device(sim, expected, placement, device):
    options, tensors = expected
    found = generate(load(GPTQ, MIXED[placement]), options, device)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
