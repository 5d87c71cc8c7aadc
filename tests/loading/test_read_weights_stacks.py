"""Small tensors of equal layers, which a load reads and checks together."""

import pytest
import torch

from hfq import FormatError
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from tests.support import moe_models
from tests.support.models import load, logits

EXPERTS = [f"model.layers.{layer}.mlp.experts" for layer in range(moe_models.LAYERS)]
PLACES = {
    "mapped": ({"": "cpu"}, {}),
    "private": ({"": "cpu"}, {"cpu_memory": "private"}),
    "disk": ({"": "cpu", **dict.fromkeys(EXPERTS, "disk")}, {}),
}


@pytest.fixture(scope="module")
def written():
    return moe_models.write(
        next(each for each in moe_models.SCHEMES if each.id == "mixtral of gptqmodel, gptq")
    )


@pytest.fixture
def count(monkeypatch):
    """Counts the layers that a format resolves by themselves."""

    def count(cls):
        resolve, resolved = cls.resolve, []

        def counted(self, module, tensors):
            if module:
                resolved.append(module)
            return resolve(self, module, tensors)

        monkeypatch.setattr(cls, "resolve", counted)
        return resolved

    return count


@pytest.mark.parametrize(("device_map", "options"), PLACES.values(), ids=PLACES)
def test_equal_layers_are_resolved_together(written, tmp_path, count, device_map, options):
    folder = written.save(tmp_path)
    resolved = count(Gptq)
    model = load(folder, device_map, **options)
    formats = {id(module.weight_format) for module in model.hf_quantizer.loading.quantized.values()}
    assert resolved == []
    assert len(formats) < 10
    expected = moe_models.plain_model("mixtral", written.plain)
    assert (logits(model, moe_models.IDS) - logits(expected, moe_models.IDS)).abs().max() < 1e-4


@pytest.mark.parametrize(("device_map", "options"), PLACES.values(), ids=PLACES)
def test_of_two_damaged_layers_the_first_in_the_file_is_named(written, tmp_path, device_map, options):
    tensors = dict(written.tensors)
    order = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # as `save` writes them
    names = [name for name, _ in order if "experts" in name and name.endswith("scales")]
    for name in (names[5], names[8]):
        tensors[name] = tensors[name].clone()
        tensors[name][1, 3] = torch.nan
    with pytest.raises(FormatError, match="A scale is not finite") as caught:
        load(written.save(tmp_path, tensors), device_map, **options)
    assert caught.value.tensor == names[5]
    assert caught.value.found == "nan at [1, 3], 1 in all"


def test_an_unexpected_bias_of_one_of_many_layers_is_named(written, tmp_path):
    tensors = dict(written.tensors)
    names = [name for name in tensors if name.endswith("q_proj.scales")]
    for name in names:
        tensors[name.replace("scales", "bias")] = torch.zeros(64, dtype=torch.float16)
    load(written.save(tmp_path, tensors))
    wrong = names[1].replace("scales", "bias")
    tensors[wrong] = torch.full((64,), 2.0, dtype=torch.float16)
    with pytest.raises(FormatError, match="stores a bias for a layer that has none") as caught:
        load(written.save(tmp_path / "wrong", tensors))
    assert caught.value.tensor == wrong


def test_a_mixture_of_experts_in_fp8_is_resolved_together(tmp_path, count):
    scheme = next(each for each in moe_models.SCHEMES if each.id == "deepseek v3, fp8 blocks")
    folder = moe_models.write(scheme).save(tmp_path)
    resolved = count(Fp8)
    model = load(folder)
    assert len(model.hf_quantizer.loading.quantized) > 20
    assert [name for name in resolved if "experts." in name] == []
