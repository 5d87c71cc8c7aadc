"""Tests that LoRA steps with gradient checkpointing give the same bits in every placement on accelerators."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.support.accelerator_maps import MIXED
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator

ORDERS = {
    "eager": {},
    "lazy": {"default": "lazy", "others": "lazy"},
    "slow": {"default": 300, "others": 3000},
}


def train(device_map, is_checkpointed) -> list[torch.Tensor]:
    """Returns the losses of two steps, and the adapters after them."""
    model = load(GPTQ, device_map)
    torch.manual_seed(0)
    targets = ["q_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=0.1), []
    tokens = torch.arange(8)[None].to("sim:0")
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses + [parameter.detach().cpu() for parameter in trained]


@pytest.fixture(scope="module", params=[False, True], ids=["", "checkpointed"])
def expected(sim, request):
    return request.param, train({"": "sim:0"}, request.param)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MIXED)
def test_steps_are_equal_to_those_on_one_device(sim, expected, placement, order):
    is_checkpointed, values = expected
    with sim.streams(**ORDERS[order]):
        found = train(MIXED[placement], is_checkpointed)
    assert len(found) == len(values) > 10
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))
