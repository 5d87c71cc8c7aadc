"""Tests of `gate_up_proj` layers that are stored as gate_proj and up_proj.

gptqmodel writes those of Phi-3 and GLM in this way.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalAudioMLP,
    Phi4MultimodalMLP,
)

from hfq import FormatError
from hfq.errors import PlacementError
from hfq.loading.matching.target_modules import halves_of
from hfq.loading.tensor_parallel.slices import _axis
from hfq.modules.concat_linear import ConcatLinear
from tests.support import tiny_models
from tests.support.models import load, logits
from tests.support.moe_models import GPTQ, GPTQMODEL_CONFIG, PLACEMENTS

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 80,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
IDS = torch.tensor([[1, 5, 9, 60, 33, 2, 7]])
FUSED = "model.layers.1.mlp.gate_up_proj"


def plain_model(family):
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)).eval()


def write(family):
    """Returns (tensors of a quantized checkpoint, plain model with the same weights)."""
    model, tensors = plain_model(family), {}
    state = model.state_dict()
    for name, tensor in state.items():
        module, _, local = name.rpartition(".")
        if not module.endswith("_proj") or local != "weight":
            tensors[name] = tensor
            continue
        names = ["gate_proj", "up_proj"] if module.endswith("gate_up_proj") else [module.rpartition(".")[2]]
        parts = []
        for half, part in zip(names, tensor.chunk(len(names)), strict=True):
            path = f"{module.rpartition('.')[0]}.{half}"
            quantized = GPTQ.quantize(part)
            tensors |= {f"{path}.{key}": value for key, value in quantized.items()}
            parts.append(
                tiny_models.settled(GPTQ, quantized, GPTQMODEL_CONFIG, tuple(part.shape)).dequantize(
                    quantized
                )
            )
        tensor.copy_(torch.cat(parts))
    assert any("gate_proj.qweight" in name for name in tensors)
    return tensors, model


def save(folder, family, tensors):
    config = AutoConfig.for_model(family, **SIZES)
    config.architectures = [type(plain_model(family)).__name__]
    tiny_models.write_model(folder, tensors, GPTQMODEL_CONFIG)
    (folder / "config.json").write_text(
        json.dumps({**config.to_dict(), "quantization_config": GPTQMODEL_CONFIG})
    )
    return folder


@pytest.mark.parametrize("family", ["phi3", "glm", "glm4"])
def test_the_logits_are_those_of_the_fused_layer_and_a_save_keeps_the_halves(family, tmp_path):
    tensors, plain = write(family)
    path = save(tmp_path / "source", family, tensors)
    model = load(path)
    joined = model.get_submodule(FUSED)
    assert isinstance(joined, ConcatLinear)
    assert list(joined) == ["gate_proj", "up_proj"]
    found, expected = logits(model, IDS), logits(plain, IDS)
    # the weights are bit-identical, but the products may sum in another order
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert (found - logits(plain_model(family), IDS)).norm() > 1e-3 * expected.norm()
    model.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(path)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_gives_the_same_logits(placement, tmp_path):
    path = save(tmp_path, "phi3", write("phi3")[0])
    assert torch.equal(logits(load(path, PLACEMENTS[placement]), IDS), logits(load(path), IDS))


def test_a_fused_layer_that_the_model_holds_in_a_list_of_its_own_is_replaced_there_too(tmp_path, monkeypatch):
    path = save(tmp_path, "phi3", write("phi3")[0])
    expected, made = logits(load(path), IDS), Phi3MLP.__init__

    def init(self, config):
        made(self, config)
        self.held = [self.gate_up_proj]

    def forward(self, hidden_states):
        gate, up = self.held[0](hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))

    monkeypatch.setattr(Phi3MLP, "__init__", init)
    monkeypatch.setattr(Phi3MLP, "forward", forward)
    assert torch.equal(logits(load(path), IDS), expected)


def test_halves_may_be_dense(tmp_path):
    tensors, plain = write("phi3")
    kept = {
        name: tensor for name, tensor in tensors.items() if "layers.1.mlp." not in name or "down_proj" in name
    }
    gate, up = plain.get_submodule(FUSED).weight.chunk(2)
    kept |= {"model.layers.1.mlp.gate_proj.weight": gate, "model.layers.1.mlp.up_proj.weight": up}
    found = logits(load(save(tmp_path / "dense", "phi3", kept)), IDS)
    expected = logits(load(save(tmp_path / "packed", "phi3", tensors)), IDS)
    assert (
        found - expected
    ).norm() <= 1e-5 * expected.norm()  # torch's product with an unquantized weight may sum in another order


def test_a_half_that_is_missing_and_a_whole_beside_its_halves_are_refused(tmp_path):
    tensors, _ = write("phi3")
    half = {
        name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.1.mlp.up_proj")
    }
    with pytest.raises(FormatError, match=rf"(?s){FUSED}\.up_proj: missing"):
        load(save(tmp_path / "half", "phi3", half))
    whole = {f"{FUSED}.{key}": value for key, value in GPTQ.quantize(torch.ones(192, 64)).items()}
    with pytest.raises(FormatError, match=rf"{FUSED}: unexpected next to its halves"):
        load(save(tmp_path / "whole", "phi3", tensors | whole))
    with pytest.raises(FormatError, match=rf"(?s){FUSED}\.weight: stored a second time"):
        load(save(tmp_path / "dense", "phi3", {f"{FUSED}.weight": torch.ones(192, 64)} | tensors))


def test_the_audio_layers_of_phi_4_take_the_up_channels_first():
    """The second chunk of the output is the gate: gptqmodel's gate_proj is the second half.

    Its forward has `up_states, gate = up_states.chunk(2, dim=-1)`.
    """
    assert halves_of(Phi4MultimodalAudioMLP.__new__(Phi4MultimodalAudioMLP)) == ("up_proj", "gate_proj")
    assert halves_of(Phi4MultimodalMLP.__new__(Phi4MultimodalMLP)) == ("gate_proj", "up_proj")


def test_halves_are_not_cut_for_tensor_parallelism():
    plan = {"model.layers.*.mlp.gate_up_proj": "colwise"}
    with pytest.raises(PlacementError, match=r"(?s)quantized half of it"):
        _axis(f"{FUSED}.up_proj", SimpleNamespace(), plan, "half")
    assert _axis(f"{FUSED}.up_proj", SimpleNamespace(), {}, "half") is None
