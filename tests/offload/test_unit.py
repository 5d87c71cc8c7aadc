"""Parameters of a unit tell their own names, also those of modules inside it."""

import pytest
import torch
from torch import nn

from hfq.errors import PlacementError
from hfq.modules.offloaded_parameter import OffloadedParameter
from hfq.offload.unit import OffloadUnit, UnquantizedParameter


@pytest.mark.parametrize(("path", "owner"), [("0.1", "model.layers.2.0.1"), ("", "model.layers.2")])
def test_a_parameter_is_named_by_the_module_that_owns_it(path, owner):
    module = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    parameter = OffloadedParameter(torch.empty(4, 4, device="meta"), requires_grad=False)
    module.get_submodule(path)._parameters["weight"] = parameter
    weight = UnquantizedParameter(module.get_submodule(path), "weight", None)
    OffloadUnit("model.layers.2", module, (), (weight,)).set_onload_device()
    with pytest.raises(PlacementError, match=rf"Fix: Call model\.{owner}\(x\)") as caught:
        _ = parameter.T
    assert caught.value.tensor == f"{owner}.weight"
