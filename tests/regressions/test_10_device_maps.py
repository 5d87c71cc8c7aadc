"""Tests that other libraries see the devices that compute, and never `cpu` or `disk` as storage."""

import pytest
import torch
import torch.nn.functional as F
from peft import PrefixTuningConfig, get_peft_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, pipeline

from hfq.errors import PlacementError
from tests.support.models import GPTQ, load

TOKENS = torch.arange(8)[None]
MAPS = [None, "auto", {"": "cpu"}, {"": "disk"}, {"model.embed_tokens": "disk", "": "cpu"}]
IDS = ["none", "auto", "cpu", "disk", "embedding on disk"]


@pytest.mark.parametrize("device_map", MAPS, ids=IDS)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_pipeline_takes_a_model_in_any_placement(device_map, device):
    model, tokenizer = load(GPTQ, device_map), AutoTokenizer.from_pretrained(GPTQ)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)
    assert generate.device == torch.device("cpu")
    assert generate("def", max_new_tokens=2, do_sample=False)[0]["generated_text"].startswith("def")


@pytest.mark.parametrize("device_map", MAPS, ids=IDS)
def test_prefix_tuning_works_in_any_placement(device_map):
    config = PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    outputs = []
    for placement in (None, device_map):
        torch.manual_seed(0)
        outputs.append(get_peft_model(load(GPTQ, placement), config)(TOKENS).logits)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("device_map", MAPS[1:], ids=IDS[1:])
def test_the_map_that_hfq_followed_is_kept(device_map):
    model = load(GPTQ, device_map)
    assert not hasattr(model, "hf_device_map")
    assert model.hfq_device_map == ({"": "cpu"} if device_map == "auto" else device_map)


def test_the_fix_for_a_tied_weight_works(tmp_path):
    """TRL multiplies with `lm_head.weight` without calling the head."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=32, tie_word_embeddings=True
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(PlacementError) as caught:
        F.linear(torch.ones(1, 64), load(tmp_path, {"": "disk"}).lm_head.weight)
    assert '{"model.embed_tokens": "cpu"}' in str(caught.value)
    model = load(tmp_path, {"": "disk", "model.embed_tokens": "cpu"})
    assert F.linear(torch.ones(1, 64), model.lm_head.weight).shape == (1, 32)
