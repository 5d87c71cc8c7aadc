"""Tests of the counted parameters and bytes of loaded models."""

import pytest
from transformers import AutoModelForCausalLM

from hfq.loading.model_size import is_loaded_by_hfq
from tests.support.models import load

DEVICE_MAPS = [{"": "cpu"}, {"": "disk"}, {"": "cpu", "model.layers.0": "disk"}]


@pytest.fixture(scope="module")
def unquantized():
    config = load().config
    del config.quantization_config
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("device_map", DEVICE_MAPS, ids=str)
def test_parameters_are_those_of_the_unquantized_model_wherever_weights_are_stored(unquantized, device_map):
    model = load(device_map=device_map, dtype=None)
    assert model.num_parameters() == unquantized.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == unquantized.num_parameters(
        exclude_embeddings=True
    )
    assert model.model.layers[1].self_attn.q_proj.weight.numel() == 128 * 128


@pytest.mark.parametrize("device_map", DEVICE_MAPS, ids=str)
def test_the_memory_footprint_is_the_sum_of_the_report(device_map):
    model = load(device_map=device_map, dtype=None)
    planned = sum(model.hf_quantizer.loading.plan.nbytes_by_device().values())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert model.get_memory_footprint(return_buffers=False) == planned
    assert model.get_memory_footprint() == planned + buffers


def test_other_models_are_counted_by_transformers(unquantized):
    assert not is_loaded_by_hfq(unquantized)
    assert unquantized.num_parameters() == sum(parameter.numel() for parameter in unquantized.parameters())
