"""Stored tensors as parameters, and errors for code that takes a float parameter out."""

import copy

import pytest
import torch
from torch import nn

from hfq.errors import SetupError
from hfq.modules.changes import changes
from hfq.modules.stored_parameters import StoredParameter, StoredParameters


def test_a_stored_parameter_is_a_frozen_parameter_over_the_same_memory():
    tensor = torch.arange(4, dtype=torch.int32)
    found = StoredParameter(tensor)
    assert isinstance(found, nn.Parameter)
    assert not found.requires_grad
    assert found.data_ptr() == tensor.data_ptr()
    assert found._is_hf_initialized
    assert torch.equal(copy.deepcopy(found), tensor)


def test_each_change_of_the_parameters_is_counted():
    parameters, seen = StoredParameters("layer"), [changes()]
    parameters["qweight"] = StoredParameter(torch.ones(1))
    seen.append(changes())
    del parameters["qweight"]
    seen.append(changes())
    parameters.clear()
    seen.append(changes())
    assert len(set(seen)) == 4


def test_a_float_weight_cannot_be_taken_out():
    parameters = StoredParameters("model.layer")
    with pytest.raises(SetupError, match=r"model\.layer is quantized and has no float parameter 'weight'"):
        parameters["weight"]
    with pytest.raises(SetupError, match=r"no float parameter 'weight'"):
        del parameters["weight"]
