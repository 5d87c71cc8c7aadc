"""Tests of options that tensor parallelism excludes, and of loads with one rank."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.errors import PlacementError, SetupError
from hfq.loading.tensor_parallel.slices import _EXPERTS, _expert_axis, generic
from hfq.modules.linear import QuantizedLinear
from tests.support import tiny_models

pytest.importorskip(
    "transformers.distributed.mixin", reason="transformers before 5.23 cuts models in another way"
)
from transformers.distributed import DistributedConfig

GPTQ = tiny_models.DATA / "tiny-llama-gptq"


def load(options=None, **arguments):
    return AutoModelForCausalLM.from_pretrained(
        GPTQ, quantization_config=HfqConfig(**(options or {})), **arguments
    )


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"tp_plan": "auto", "device_map": {"": "cpu"}}, "device_map"),
        ({"tp_plan": "auto", "device_mesh": object()}, "device_mesh"),
        ({"tp_plan": "x"}, "'x'"),
        ({"tp_plan": "auto", "options": {"cpu_memory": "mmap"}}, 'HfqConfig(cpu_memory="mmap")'),
        ({"distributed_config": {"tp_size": 2, "fsdp_size": 2}}, "fsdp_size of distributed_config"),
        ({"distributed_config": DistributedConfig(tp_size=2, pp_size=2)}, "pp_size of distributed_config"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(arguments, found):
    with pytest.raises(SetupError, match=r"Nothing was loaded") as refusal:
        load(**arguments)
    assert f"found: {found}" in str(refusal.value)
    assert refusal.value.fix


def test_one_process_loads_the_model_whole_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("hfq"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="hfq"):
        model = load(distributed_config=DistributedConfig(tp_plan="auto"))
    layer = model.model.layers[0].mlp.up_proj
    assert isinstance(layer, QuantizedLinear)
    assert layer.local_in_features == layer.in_features
    assert "no effect with one rank" in caplog.text


def test_a_distributed_checkpoint_of_packed_layers_is_refused(tmp_path):
    with pytest.raises(SetupError, match=r"(?s)distributed_checkpoint=True.*Nothing was saved"):
        load().save_pretrained(tmp_path / "saved", distributed_checkpoint=True)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("is_halved", [False, True])
def test_experts_cut_across_gate_and_up_channels_are_not_cut_again(is_halved):
    """In gptqmodel's files of gpt-oss, the halves interleave gate and up channels.

    Rows of one half then differ from the matching columns of the down projection.
    """
    experts = "model.layers.0.mlp.experts"
    match = SimpleNamespace(experts={experts: SimpleNamespace(is_halved=is_halved)})
    plan = {f"{generic(experts)}.{local}": style for local, style in _EXPERTS.items()} | {
        generic(experts): "moe_tp_experts"
    }
    with (
        pytest.raises(PlacementError, match="interleaved gate and up")
        if is_halved
        else contextlib.nullcontext()
    ):
        assert _expert_axis(f"{experts}.3.gate_proj", plan, match) == "out"
