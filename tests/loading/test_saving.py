"""Tests of the dtypes of saved tensors that transformers keeps in float32."""

import pytest
import torch
from transformers import LlamaPreTrainedModel

from tests.support import tiny_models
from tests.support.models import GPTQ, load

NORM = "model.norm.weight"


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(LlamaPreTrainedModel, "_keep_in_fp32_modules_strict", {"norm"})


def dtype_of(folder) -> str:
    return tiny_models.digests(folder)[NORM][0]


@pytest.mark.parametrize("device_map", [None, {"": "disk"}], ids=["cpu", "disk"])
def test_they_are_saved_as_they_were_stored(kept, device_map, tmp_path):
    model = load(device_map=device_map, dtype=torch.bfloat16)
    assert model.get_parameter(NORM).dtype == torch.float32
    model.save_pretrained(tmp_path)
    assert tiny_models.digests(tmp_path)[NORM] == tiny_models.digests(GPTQ)[NORM]


def test_changed_values_are_saved_in_float32(kept, tmp_path):
    model = load(dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_parameter(NORM).add_(2.0**-20)
    model.save_pretrained(tmp_path)
    assert dtype_of(tmp_path) == "F32"


def test_a_model_in_float32_is_saved_in_float32(kept, tmp_path):
    load(dtype=torch.float32).save_pretrained(tmp_path)
    assert dtype_of(tmp_path) == "F32"
