"""Tests of Kimi-K2, whose files quantize experts alone and store the sizes of layers as int32."""

import dataclasses

import pytest
import torch

from hfq.formats.compressed_tensors import PackQuantized
from tests.support import moe_models, tiny_models
from tests.support.models import load

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}


class Grouped(PackQuantized):
    """Groups of 32 channels, also in layers of different sizes."""

    def quantize(self, weight):
        return PackQuantized(num_bits=4, scale_shape=(1, weight.shape[1] // 32)).quantize(weight)


KIMI = moe_models.Scheme("kimi", "deepseek-v3", Grouped(), CONFIG)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    made = moe_models.write(KIMI, is_quantized=lambda _: False)
    tensors = {
        name: tensor.to(torch.int32) if name.endswith("weight_shape") else tensor
        for name, tensor in made.tensors.items()
    }
    assert {name.rpartition(".experts.")[1] for name in tensors if "weight_packed" in name} == {".experts."}
    return dataclasses.replace(made, tensors=tensors), made.save(tmp_path_factory.mktemp("kimi"), tensors)


def test_logits_are_those_of_the_plain_model_in_every_placement(written):
    made, path = written
    expected = moe_models.logits(moe_models.plain_model("deepseek-v3", made.plain))
    resident = moe_models.logits(load(path))
    assert (resident - expected).norm() <= 1e-5 * expected.norm()
    for device_map in ({"": "cpu", "model.layers.1": "disk"}, {"": "disk"}):
        assert torch.equal(moe_models.logits(load(path, device_map)), resident)


def test_a_save_has_the_bytes_of_the_file(written, tmp_path):
    _, path = written
    load(path, {"": "disk"}).save_pretrained(tmp_path)
    assert tiny_models.digests(tmp_path) == tiny_models.digests(path)
