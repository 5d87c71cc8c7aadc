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
        not tiny_models.SHARED.is_dir(), reason="no ../shared/checkpoints next to the repository"
    ),
]
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


def maps(layers: int) -> dict[str, dict]:
    """Returns device maps; the disk holds the only layer, or the first one."""
    if layers == 1:
        rest = {"model.layers.0": "disk", "lm_head": "sim:1"}
        return {"with cpu and disk": {"": "sim:0", "model.norm": "cpu", **rest}}
    last = {f"model.layers.{layers - 1}": "sim:1"}
    rest = {"model.layers.0": "disk", "model.norm": "cpu"}
    return {"two accelerators": {"": "sim:0", **last}, "with cpu and disk": {"": "sim:0", **rest, **last}}


def load(path, device_map):
    return (AutoModelForSeq2SeqLM if is_seq2seq(path) else AutoModelForCausalLM).from_pretrained(
        path,
        quantization_config=HfqConfig(kernel="reference"),
        device_map=device_map,
        dtype=torch.float32,
        attn_implementation="eager",  # torch's fused attention on a CPU rounds otherwise than on other devices
    )


def folders():
    """Returns all folders; those of 2026 have all kinds of layers, and the others are slow."""
    for path in tiny_models.shared_checkpoints():
        slow = [] if path.parent == tiny_models.SHARED_2026 else [pytest.mark.slow]
        yield tiny_models.marked_by_needs(path, *slow)


@pytest.mark.parametrize("path", folders())
def test_two_accelerators_give_the_bits_of_the_cpu(path):
    model = load(path, {"": "cpu"})
    expected = compute(model, TOKENS)
    device_maps = STACKS if is_seq2seq(path) else maps(model.config.get_text_config().num_hidden_layers)
    for name, device_map in device_maps.items():
        assert torch.equal(compute(load(path, device_map), TOKENS.to("sim:0")).cpu(), expected), name


def compute(model, tokens):
    if not model.config.is_encoder_decoder:
        return logits(model, tokens)
    with torch.no_grad():
        return model(input_ids=tokens, decoder_input_ids=tokens[:, :8]).logits
