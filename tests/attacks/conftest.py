"""Copies of the tiny checkpoints, for tests that damage them."""

import pytest

from tests.support.model_copies import copy_model


@pytest.fixture(params=["gptq", "fp8"])
def model(request, tmp_path):
    return copy_model(request.param, tmp_path)


@pytest.fixture
def gptq(tmp_path):
    return copy_model("gptq", tmp_path)


@pytest.fixture
def fp8(tmp_path):
    return copy_model("fp8", tmp_path)
