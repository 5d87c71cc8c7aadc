"""Tests of checkpoints from other projects' tools next to the repository, if present."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.checkpoint import Checkpoint
from hfq.formats import detect_formats, tensors_by_module
from hfq.formats.configs.source_config import source_config
from hfq.formats.detection.unsupported import UnsupportedFormatError
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


def folders(is_read: bool = True) -> pytest.MarkDecorator:
    paths = tiny_models.shared_checkpoints(is_read)
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


def load(path, **options):
    config = HfqConfig(quantize_activations=options.pop("quantize_activations", False))
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, **{"dtype": torch.float32, **options}
    )


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


@folders()
def test_the_logits_are_those_of_the_exactly_dequantized_weights_in_every_placement(path):
    reference = safetensors_torch.load_file(path / "reference_weightonly.safetensors")
    expected, tokens = reference["logits_fp32_weightonly"], reference["input_ids"]
    found = {key: logits(load(path, device_map=device_map), tokens) for key, device_map in PLACEMENTS.items()}
    # float32 sums in another order than the reference allow 1e-5 relative L2.
    assert (found["cpu"] - expected).norm() <= 1e-5 * expected.norm()
    assert all(torch.equal(found["cpu"], other) for other in found.values())


@pytest.mark.parametrize(
    "placement", ["half", *(pytest.param(other, marks=pytest.mark.slow) for other in ("cpu", "disk"))]
)
@folders()
def test_saving_gives_back_every_byte_and_the_config(path, placement, tmp_path):
    model = load(path, device_map=PLACEMENTS[placement], dtype="auto")
    model.save_pretrained(tmp_path)
    assert tiny_models.digests(tmp_path) == tiny_models.digests(path)
    source = json.loads((path / "config.json").read_text())
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.get("quantization_config") == source.get("quantization_config")
    for side_file in SIDE_FILES:
        if (path / side_file).is_file():
            assert (tmp_path / side_file).read_bytes() == (path / side_file).read_bytes()


@folders()
def test_nothing_is_inflated(path):
    modules = load(path, device_map={"": "cpu"}).hf_quantizer.loading.quantized.values()
    held = sum(parameter.nbytes for module in modules for parameter in module.parameters())
    assert held <= 1.02 * sum(info.nbytes for module in modules for info in module.infos.values())


@folders(is_read=False)
def test_a_format_that_is_not_read_is_named(path):
    checkpoint = Checkpoint.open(path)
    with pytest.raises(UnsupportedFormatError, match=r"is not supported\. Nothing was loaded"):
        detect_formats(tensors_by_module(checkpoint.tensors), source_config(checkpoint))
