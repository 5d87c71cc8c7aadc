"""Tests that `experts_implementation` is an error where quantized experts would ignore it."""

import pytest
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.errors import SetupError
from tests.support import moe_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return moe_models.write(moe_models.BY_EXPERT).save(tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("asked", ["grouped_mm", "batched_mm"])
def test_an_implementation_of_quantized_experts_is_refused(asked, folder):
    with pytest.raises(SetupError, match=r"experts_implementation=…\) has no effect on quantized experts"):
        AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=HfqConfig(), experts_implementation=asked
        )


def test_eager_is_the_loop_that_quantized_experts_run(folder):
    AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=HfqConfig(), experts_implementation="eager"
    )
