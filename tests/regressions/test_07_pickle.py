"""Tests that no file or copy lacks offloaded weights: a pickle, a copy, or a save by other code is an error."""

import copy
import io
import pickle

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_model

from hfq.errors import HfqError, SetupError
from tests.support.models import load, logits

TOKENS = torch.arange(8)[None]
MAPS = {
    "layers": {"": "cpu", "model.layers": "disk"},
    "embedding": {"": "cpu", "model.embed_tokens": "disk"},
    "all": {"": "disk"},
}


def saved(thing):
    torch.save(thing, io.BytesIO())


WRITES = {
    "torch.save of the state": lambda model: saved(model.state_dict()),
    "torch.save of the parameters": lambda model: saved(dict(model.named_parameters())),
    "torch.save of the model": saved,
    "torch.save of a part": lambda model: saved(model.model),
    "pickle": pickle.dumps,
    "a copy": copy.deepcopy,
    "a copy of a part": lambda model: copy.deepcopy(model.model),
    "a save of a part": lambda model: model.model.save_pretrained("never"),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("placement", MAPS)
def test_offloaded_weights_are_not_left_out_silently(placement, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = load(device_map=MAPS[placement])
    with pytest.raises(SetupError, match="save_pretrained"):
        WRITES[write](model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", ["save_model", "save_state", "safetensors"])
def test_other_libraries_do_not_write_offloaded_weights(write, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(load(device_map=MAPS["layers"]))
    with pytest.raises(HfqError, match="is offloaded"):
        {
            "save_model": lambda: accelerator.save_model(model, tmp_path),
            "save_state": lambda: accelerator.save_state(tmp_path),
            "safetensors": lambda: save_model(model, str(tmp_path / "model.safetensors")),
        }[write]()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_state_dict_can_be_read_copied_and_saved_by_save_pretrained(tmp_path):
    model = load(device_map=MAPS["layers"])
    accelerator = Accelerator(cpu=True)
    state = accelerator.get_state_dict(accelerator.prepare(model))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in copy.deepcopy(state).items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in load().state_dict().items()
    }
    model.save_pretrained(tmp_path, state_dict=state)
    assert torch.equal(logits(load(tmp_path), TOKENS), logits(model, TOKENS))


def test_a_quantized_layer_on_disk_answers_with_its_execution_device():
    layer = load(device_map=MAPS["layers"]).model.layers[0].self_attn.q_proj
    assert {parameter.device for parameter in layer.parameters()} == {torch.device("cpu")}
    assert all(parameter.is_meta for parameter in layer.parameters())
