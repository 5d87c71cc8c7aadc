"""Tests of adapters of PEFT other than LoRA: each works, or is an error that names it."""

import peft
import pytest
import torch

from hfq.errors import SetupError
from tests.support.models import load

KINDS = {"VERA": "VeraConfig", "RANDLORA": "RandLoraConfig", "PVERA": "PveraConfig", "FROD": "FrodConfig"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device_map", [None, {"": "cpu", "model.layers": "disk"}])
@pytest.mark.parametrize("target", [["q_proj"], "all-linear", None])
def test_an_adapter_that_measures_weights_first_is_refused_by_name(target, device_map, kind):
    model = load(device_map=device_map)
    with pytest.raises(SetupError, match=f"{kind} adapters do not support quantized modules"):
        peft.get_peft_model(model, getattr(peft, KINDS[kind])(target_modules=target))


def test_an_adaption_prompt_is_made_where_layers_on_disk_compute():
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    outputs = []
    for device_map in (None, {"": "cpu", "model.layers": "disk"}):
        torch.manual_seed(0)
        model = peft.get_peft_model(load(device_map=device_map), config)
        assert not any(parameter.is_meta for parameter in model.parameters() if parameter.requires_grad)
        outputs.append(model(torch.arange(8)[None]).logits)
    assert torch.equal(*outputs)
