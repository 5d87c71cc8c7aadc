"""Tests of the models that a DeepSpeed engine supports.

tests/distributed/test_zero3.py creates real engines.
"""

import pytest
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.errors import SetupError
from hfq.integrations.deepspeed.private_api import _check_storage
from hfq.modules.quantized_module import QuantizedModule
from tests.support import tiny_models


def load(cpu_memory: str, **options):
    path = tiny_models.DATA / "tiny-llama-gptq"
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=HfqConfig(cpu_memory=cpu_memory), **options
    )


@pytest.fixture(scope="module")
def model():
    return load("private")


def test_rows_of_bytes_pass_where_every_rank_holds_the_model(model):
    _check_storage(model, is_stage_3=False)


def test_stage_3_wants_a_model_that_was_loaded_into_it(model):
    with pytest.raises(
        SetupError,
        match=r"(?s)Every rank has loaded the whole model.*layers.0.self_attn.q_proj.*zero3_init_flag: true",
    ):
        _check_storage(model, is_stage_3=True)


@pytest.mark.parametrize(
    ("options", "found"), [({}, "torch.int32 on cpu"), ({"device_map": {"": "disk"}}, "torch.int32 on disk")]
)
def test_tensors_one_by_one_are_refused(options, found):
    with pytest.raises(SetupError, match=rf"(?s)would cast quantized tensors.*{found}.*cpu_memory=.private"):
        _check_storage(load("auto", **options), is_stage_3=False)


def test_slices_of_tensor_parallelism_are_refused(model):
    layer = next(module for module in model.modules() if isinstance(module, QuantizedModule))
    layer._hf_quantized_needs_local_tp = True
    with pytest.raises(SetupError, match=r"(?s)slices.*Fix: Load the model without tp_plan"):
        _check_storage(model, is_stage_3=False)
    del layer._hf_quantized_needs_local_tp
