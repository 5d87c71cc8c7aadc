"""Tests of checkpoints next to the repository over two accelerators, the CPU, and disk, if present."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfq import HfqConfig
from tests.support import tiny_models
from tests.support.models import logits

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(
        not tiny_models.SHARED_2026.is_dir(), reason="no ../shared/checkpoints_2026 next to the repository"
    ),
]
MAPS = {
    "two accelerators": {"": "sim:0", "model.layers.1": "sim:1"},
    "with cpu and disk": {
        "": "sim:0",
        "model.layers.0": "disk",
        "model.layers.1": "sim:1",
        "model.norm": "cpu",
    },
}
STACKS = {
    "two accelerators": {"": "sim:0", "decoder": "sim:1"},
    "with cpu and disk": {
        "": "sim:0",
        "encoder.block.1": "disk",
        "decoder": "sim:1",
        "decoder.block.1": "disk",
        "decoder.final_layer_norm": "cpu",
    },
}
TOKENS = torch.arange(4, 36).view(1, 32)


def is_seq2seq(path):
    return (path / "reference_seq2seq.safetensors").is_file()


def load(path, device_map):
    return (AutoModelForSeq2SeqLM if is_seq2seq(path) else AutoModelForCausalLM).from_pretrained(
        path,
        quantization_config=HfqConfig(kernel="reference"),
        device_map=device_map,
        dtype=torch.float32,
        attn_implementation="eager",  # torch's fused attention on a CPU rounds otherwise than on other devices
    )


@pytest.mark.parametrize(
    "path",
    [path for path in tiny_models.shared_checkpoints() if path.parent == tiny_models.SHARED_2026],
    ids=lambda path: path.name,
)
def test_two_accelerators_give_the_bits_of_the_cpu(path):
    expected = compute(load(path, {"": "cpu"}), TOKENS)
    for name, device_map in (STACKS if is_seq2seq(path) else MAPS).items():
        assert torch.equal(compute(load(path, device_map), TOKENS.to("sim:0")).cpu(), expected), name


def compute(model, tokens):
    if not model.config.is_encoder_decoder:
        return logits(model, tokens)
    with torch.no_grad():
        return model(input_ids=tokens, decoder_input_ids=tokens[:, :8]).logits
