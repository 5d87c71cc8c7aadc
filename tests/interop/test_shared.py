"""Tests of checkpoints from other projects' tools next to the repository, if present."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.loading.saving import SIDE_FILES
from tests.support import tiny_models

safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.skipif(
    not tiny_models.SHARED.is_dir(), reason="no ../shared/checkpoints next to the repository"
)

PLACEMENTS = {
    "cpu": {"": "cpu"},
    "half": {"": "cpu", "model.layers.1": "disk", "model.norm": "disk"},
    "disk": {"": "disk"},
}


def checkpoints() -> list[str]:
    return sorted(path.name for path in tiny_models.SHARED.iterdir()) if tiny_models.SHARED.is_dir() else []


READ = checkpoints()


def load(name, **options):
    config = HfqConfig(quantize_activations=options.pop("quantize_activations", False))
    path = tiny_models.SHARED / name
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, **{"dtype": torch.float32, **options}
    )


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", READ)
def test_the_logits_are_those_of_the_exactly_dequantized_weights_in_every_placement(name):
    reference = safetensors_torch.load_file(tiny_models.SHARED / name / "reference_weightonly.safetensors")
    expected, tokens = reference["logits_fp32_weightonly"], reference["input_ids"]
    found = {key: logits(load(name, device_map=device_map), tokens) for key, device_map in PLACEMENTS.items()}
    # float32 sums in another order than the reference allow 1e-5 relative L2.
    assert (found["cpu"] - expected).norm() <= 1e-5 * expected.norm()
    assert all(torch.equal(found["cpu"], other) for other in found.values())


@pytest.mark.parametrize(
    "placement", ["half", *(pytest.param(other, marks=pytest.mark.slow) for other in ("cpu", "disk"))]
)
@pytest.mark.parametrize("name", READ)
def test_saving_gives_back_every_byte_and_the_config(name, placement, tmp_path):
    model = load(name, device_map=PLACEMENTS[placement], dtype="auto")
    model.save_pretrained(tmp_path)
    assert tiny_models.digests(tmp_path) == tiny_models.digests(tiny_models.SHARED / name)
    source = json.loads((tiny_models.SHARED / name / "config.json").read_text())
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.get("quantization_config") == source.get("quantization_config")
    for side_file in SIDE_FILES:
        if (tiny_models.SHARED / name / side_file).is_file():
            assert (tmp_path / side_file).read_bytes() == (tiny_models.SHARED / name / side_file).read_bytes()


@pytest.mark.parametrize("name", READ)
def test_nothing_is_inflated(name):
    modules = load(name, device_map={"": "cpu"}).hf_quantizer.loading.quantized.values()
    held = sum(parameter.nbytes for module in modules for parameter in module.parameters())
    assert held <= 1.02 * sum(info.nbytes for module in modules for info in module.infos.values())
