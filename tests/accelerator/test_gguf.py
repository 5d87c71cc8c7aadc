"""GGUF files on accelerators: blocks of every type have the bits of the CPU, in every placement."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.checkpoint.gguf.block_types import BLOCK_TYPES
from tests.support.accelerator_maps import MIXED
from tests.support.gguf_models import make_model, write_model, write_random_llama
from tests.support.models import logits

pytestmark = pytest.mark.accelerator

TOKENS = torch.tensor([[1, 5, 9, 33, 2, 7], [1, 4, 4, 17, 30, 3]])
KINDS = [kind.name for kind in BLOCK_TYPES.values() if kind.dtype == "U8"]


def load(folder, device_map):
    return AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=HfqConfig(kernel="reference"),
        device_map=device_map,
        dtype=torch.float32,
        attn_implementation="eager",  # torch's fused attention on a CPU rounds otherwise than on other devices
    )


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_every_type_give_the_bits_of_the_cpu(sim, kind, tmp_path):
    folder, tokens = write_random_llama(tmp_path, kind), TOKENS.to("sim:0")
    expected = logits(load(folder, None), TOKENS)
    for device_map in ({"": "sim:0", "model.layers.0": "cpu", "model.layers.1": "disk"}, {"": "sim:0"}):
        model = load(folder, device_map)
        assert torch.equal(logits(model, tokens).cpu(), expected)
        sim.take_counts()
        assert torch.equal(logits(model, tokens).cpu(), expected)
    assert sim.take_counts()["pageable copies"] == 0  # tables were copied by the first pass


@pytest.mark.parametrize("placement", MIXED)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_several_accelerators_with_cpu_and_disk_give_the_bits_of_the_cpu(kind, placement, tmp_path):
    folder = write_random_llama(tmp_path, kind, layers=4)
    expected = logits(load(folder, None), TOKENS)
    assert torch.equal(logits(load(folder, MIXED[placement]), TOKENS.to("sim:0")).cpu(), expected)


@pytest.mark.parametrize("name", ["llama-biased", "gemma3", "qwen3moe", "gpt-oss", "glm4moe", "deepseek3"])
def test_what_files_store_differently_reaches_accelerators(name, tmp_path):
    folder = write_model(tmp_path, name, make_model(name), ("Q8_0", "BF16"))
    expected = logits(load(folder, None), TOKENS)
    layer = "model.layers.1"
    for device_map in (
        {"": "sim:0"},
        {"": "sim:0", layer: "cpu"},
        {"": "sim:0", layer: "disk"},
        {"": "sim:1", layer: "sim:0"},
    ):
        found = logits(load(folder, device_map), TOKENS.to(device_map[""]))
        assert torch.equal(found.cpu(), expected), device_map
