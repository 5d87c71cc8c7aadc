"""Modules that replace those of a meta model: what layers of one kind share."""

from hfq.loading.matching import replace_modules
from hfq.modules.linear import QuantizedLinear
from tests.support import moe_models
from tests.support.models import load


def test_kernels_are_chosen_once_for_layers_of_one_kind(tmp_path, monkeypatch):
    choose, chosen = replace_modules.choose_kernel, []

    def counted(*arguments, **options):
        chosen.append(arguments)
        return choose(*arguments, **options)

    monkeypatch.setattr(replace_modules, "choose_kernel", counted)
    scheme = next(each for each in moe_models.SCHEMES if each.id == "mixtral of gptqmodel, gptq")
    model = load(moe_models.write(scheme).save(tmp_path))
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == moe_models.LAYERS * (4 + 3 * moe_models.EXPERTS)
    kinds = {(id(layer.weight_format), layer.in_features, layer.out_features) for layer in layers}
    assert len(chosen) <= len(kinds) < 10
    assert len({id(layer._attributes) for layer in layers}) == 1
    assert len({id(layer._kinds) for layer in layers}) == len(
        {(layer.in_features, layer.out_features) for layer in layers}
    )
