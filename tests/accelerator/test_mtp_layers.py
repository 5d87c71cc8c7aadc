"""Tests that layers which predict further tokens draft on the accelerator that computes the last layer."""

import pytest
import torch

from tests.support import mtp_models
from tests.support.models import load

pytestmark = pytest.mark.accelerator
PROMPT = torch.tensor([[1, 5, 9, 60, 33]])
PLACEMENTS = {
    "resident": {"": "sim:0"},
    "last layer on disk": {"": "sim:0", "model.layers.1": "disk"},
    "layers on cpu": {"": "sim:0", "model.layers": "cpu"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return mtp_models.write(tmp_path_factory.mktemp("mtp"), "deepseek_v3")[0]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tokens_are_those_of_greedy_search(sim, path, placement):
    model = load(path, PLACEMENTS[placement], kernel="reference")
    expected, found = (
        model.generate(PROMPT.to("sim:0"), max_new_tokens=6, do_sample=False, **options)
        for options in ({}, {"use_mtp": True})
    )
    assert torch.equal(found.cpu(), expected.cpu())
    layer = model.hf_quantizer.loading.mtp_model.layers[0]
    assert {str(parameter.device) for parameter in layer.parameters()} == {"sim:0"}
