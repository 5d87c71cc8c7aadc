"""What transformers sees of a model while hfq loads it."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, modeling_utils

from hfq import HfqConfig, SetupError
from hfq.modules.experts import QuantizedExperts
from hfq.modules.quantized_module import QuantizedModule
from tests.support import moe_models, tiny_models
from tests.support.models import load, logits

EXPERTS = "model.layers.1.mlp.experts"
MAPS = {
    "none": {},
    "disk": {"device_map": {"": "cpu", EXPERTS: "disk"}},
    "auto": {"device_map": "auto", "max_memory": {"cpu": 1 << 30}},
}


@pytest.fixture(scope="module")
def written():
    return moe_models.write(
        next(each for each in moe_models.SCHEMES if each.id == "mixtral of gptqmodel, gptq")
    )


@pytest.fixture
def seen(monkeypatch):
    """Stored tensors that transformers is handed, and the modules and the state that it finds then."""
    convert, found = modeling_utils.convert_and_load_state_dict_in_model, {}

    def noting(model, state_dict, *arguments, **options):
        found.update(stored=list(state_dict), modules=list(model.modules()), state=list(model.state_dict()))
        return convert(model, state_dict, *arguments, **options)

    monkeypatch.setattr(modeling_utils, "convert_and_load_state_dict_in_model", noting)
    return found


@pytest.mark.parametrize("options", MAPS.values(), ids=MAPS)
def test_transformers_is_handed_no_quantized_tensor(written, tmp_path, seen, options):
    model = load(written.save(tmp_path), **options)
    quantized = ("qweight", "qzeros", "scales", "g_idx")
    dense = [name for name in written.tensors if not name.endswith(quantized)]
    assert sorted(seen["stored"]) == sorted(seen["state"]) == sorted(dense)
    visible = [module for module in seen["modules"] if isinstance(module, QuantizedModule)]
    experts = [module for module in seen["modules"] if isinstance(module, QuantizedExperts)]
    assert (len(visible), len(experts)) == (4 * moe_models.LAYERS, moe_models.LAYERS)
    layers = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    assert len(layers) == moe_models.LAYERS * (4 + 3 * moe_models.EXPERTS)
    assert not any(module.training for module in model.modules())
    expected = moe_models.plain_model("mixtral", written.plain)
    assert (logits(model, moe_models.IDS) - logits(expected, moe_models.IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("owner", [AutoModelForCausalLM, transformers.LlamaForCausalLM])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-gptq"])
def test_the_class_in_place_of_a_config_is_an_error(owner, name):
    with pytest.raises(SetupError, match="the class HfqConfig") as error:
        owner.from_pretrained(tiny_models.DATA / name, quantization_config=HfqConfig)
    assert str(error.value).endswith("Fix: Pass quantization_config=HfqConfig().")


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers 5.17 keeps the stored size where a quantizer loads",
)
def test_a_tensor_of_another_size_is_still_initialized_by_transformers(written, tmp_path, seen):
    narrow = {"lm_head.weight": written.tensors["lm_head.weight"][:8].clone()}
    folder = written.save(tmp_path, written.tensors | narrow)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=HfqConfig(), ignore_mismatched_sizes=True, dtype=torch.float32
    )
    assert "lm_head.weight" in seen["stored"]
    assert model.lm_head.weight.shape[0] == moe_models.TOKENS
