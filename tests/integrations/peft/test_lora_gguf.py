"""LoRA on GGUF files: the same steps in memory and with a layer on disk, also next to a scaled embedding."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.loading.gguf.test_stored_floats import TOKENS, load
from tests.support.gguf_models import make_model, write_model
from tests.support.models import logits

TARGETS = ["q_proj", "v_proj", "down_proj", "embed_tokens"]


def train(folder, device_map):
    """Returns the losses of three steps, and the model."""
    torch.manual_seed(0)
    model = get_peft_model(
        load(folder, device_map), LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
    )
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("name", ["llama-biased", "gemma3"])
def test_training_is_the_same_in_memory_and_from_disk(tmp_path, name):
    folder = write_model(tmp_path / "model", name, make_model(name))
    device_map = {"": "cpu", "model.layers.1": "disk"}
    resident, model = train(folder, None)
    assert resident[0] > resident[1] > resident[2]
    assert train(folder, device_map)[0] == resident
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(folder, device_map), tmp_path / "adapter")
    assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))
