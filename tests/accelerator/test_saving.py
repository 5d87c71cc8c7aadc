"""Tests that a model on accelerators with cpu and disk saves the bytes of its checkpoint."""

import shutil

import pytest
import torch

from tests.support import tiny_models
from tests.support.accelerator_maps import MIXED, ORDERS
from tests.support.models import load

pytestmark = pytest.mark.accelerator
TOKENS = torch.arange(8)[None]
MAPS = {"1": {"": "sim:0"}, **MIXED}


@pytest.fixture(scope="module", params=["gptq", "fp8"])
def checkpoint(sim, request):
    path = tiny_models.DATA / f"tiny-llama-{request.param}"
    return path, logits(load(path, {"": "sim:0"}))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS.to("sim:0")).logits.cpu()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MAPS)
def test_a_save_writes_the_bytes_of_the_checkpoint(sim, checkpoint, placement, order, tmp_path):
    path, expected = checkpoint
    with sim.streams(**ORDERS[order]):
        model = load(path, MAPS[placement], dtype=None)
        logits(model)
        model.save_pretrained(tmp_path / "saved")
        after = logits(model)
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(path)
    assert torch.equal(after, logits(model))
    assert torch.equal(logits(load(tmp_path / "saved", MAPS[placement])), expected)


@pytest.mark.parametrize("placement", MAPS)
def test_a_model_may_be_saved_over_the_folder_that_it_was_loaded_from(sim, checkpoint, placement, tmp_path):
    path, expected = checkpoint
    folder = shutil.copytree(path, tmp_path / "model")
    model = load(folder, MAPS[placement])
    model.save_pretrained(folder)
    assert torch.equal(logits(load(folder, MAPS[placement])), expected)


@pytest.mark.parametrize("placement", [*MAPS, "head on cpu", "head on disk"])
def test_a_rounded_head_has_one_result_and_is_saved_as_it_is_stored(sim, placement, tmp_path):
    place = placement.rpartition(" ")[2]
    device_map = {"": "sim:0", "lm_head": place} if placement.startswith("head") else MAPS[placement]
    path, options = tiny_models.DATA / "tiny-llama-gptq", {"quantize_output_head": "fp8"}
    expected = logits(load(path, {"": "sim:0"}, **options))
    model = load(path, device_map, offload_folder=tmp_path, dtype=None, **options)
    model.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(path)
    model = load(path, device_map, offload_folder=tmp_path, **options)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(expected, logits(load(path, {"": "sim:0"})))
