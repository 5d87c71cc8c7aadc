"""Tests of errors for adapters that would write quantized weights or cannot be trained."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM

from hfq import HfqConfig, PlacementError, SetupError
from tests.support import moe_models
from tests.support.code_models import LLAMA, write
from tests.support.lora_runs import DISK, adapt, load, logits, packed_bytes

Q, EXPERTS = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def resident():
    return load()


@pytest.fixture(scope="module")
def disk():
    return load(device_map=DISK)


def refuses(model, config, *expected: str) -> None:
    """Checks that `get_peft_model` raises an error with these words, and adds no adapter."""
    with pytest.raises(SetupError) as caught:
        get_peft_model(model, config)
    for words in (*expected, "No adapter was added", "Fix:"):
        assert words in str(caught.value)
    assert not any(isinstance(module, BaseTunerLayer) for module in model.modules())


@pytest.mark.parametrize("name", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga"])
def test_an_initialisation_that_rewrites_the_base(resident, name):
    refuses(
        resident,
        LoraConfig(target_modules=["q_proj"], init_lora_weights=name),
        f"init_lora_weights={name!r}",
        Q,
    )


@pytest.mark.parametrize("name", ["q_proj", "mlp"])
def test_packed_modules_to_save(resident, name):
    refuses(
        resident,
        LoraConfig(target_modules=["v_proj"], modules_to_save=[name]),
        f"{name} cannot be trained completely",
    )


def test_dense_modules_on_disk_to_save(disk):
    refuses(
        disk,
        LoraConfig(target_modules=["v_proj"], modules_to_save=["lm_head"]),
        "lm_head cannot be trained completely",
    )
    refuses(
        disk,
        LoraConfig(target_modules=["v_proj"], trainable_token_indices=[1]),
        "model.embed_tokens cannot be trained completely",
    )
    refuses(
        disk,
        LoraConfig(target_modules=["v_proj"], trainable_token_indices={"embed_tokens": [1]}),
        "model.embed_tokens",
    )


def test_they_are_trained_where_they_rest_in_memory(resident):
    model = adapt(load(), ["v_proj"], modules_to_save=["lm_head"])
    model(input_ids=torch.tensor([[5, 6]])).logits.sum().backward()
    assert model.get_parameter("base_model.model.lm_head.modules_to_save.default.weight").grad.abs().sum() > 0


@pytest.mark.parametrize("asked", ["q_proj.qweight", "self_attn.q_proj.weight"])
def test_parameters_of_packed_modules(resident, asked):
    refuses(
        resident,
        LoraConfig(target_modules=["v_proj"], target_parameters=[asked]),
        f"target_parameters names {asked!r}",
        Q,
    )


def test_other_kinds_of_adapters(resident):
    refuses(resident, IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "IA3 adapters", Q)


def test_replicated_layers(resident, disk):
    for model in (resident, disk):
        refuses(
            model,
            LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 3)]),
            "layer_replication",
        )
        assert len(model.model.layers) == 4


def test_options_that_peft_would_pass_over(resident):
    refuses(resident, LoraConfig(target_modules=["q_proj"], use_qalora=True), "use_qalora", Q)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_within_packed_rows(tmp_path, bias):
    _, folder = write(tmp_path, AutoModelForCausalLM, "qwen2", LLAMA, r"_proj$")
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=HfqConfig(quantize_activations=False)
    )
    refuses(model, LoraConfig(target_modules=["q_proj"], bias=bias), f"bias={bias!r}", Q)


@pytest.mark.parametrize("device_map", [None, DISK], ids=["resident", "disk"])
def test_merging_and_before_it_changes_any_layer(device_map):
    model = adapt(load(device_map=device_map), ["q_proj", "lm_head"], init_lora_weights=False)
    before, bytes_before, head = logits(model), packed_bytes(model), model.base_model.model.lm_head
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    for merge in (model.merge_and_unload, model.merge_adapter, layer.merge, layer.unmerge):
        with pytest.raises(
            SetupError, match=r"(?s)Adapters cannot be merged into quantized or offloaded weights.*Fix:"
        ):
            merge()
    assert not head.merged
    assert packed_bytes(model) == bytes_before
    assert torch.equal(logits(model), before)


@pytest.fixture(
    scope="module",
    params=["mixtral of gptqmodel, gptq", "qwen3 by expert, pack-quantized", "qwen3 fused, fp8"],
)
def mixture(request, tmp_path_factory):
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == request.param)
    path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path_factory.mktemp("mixture"))
    return moe_models.load(path), moe_models.load(path, DISK)


def test_experts(mixture):
    for model in mixture:
        refuses(model, LoraConfig(target_modules=r".*experts\.1\.down_proj"), "experts", "LoRA on")
        refuses(
            model,
            LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
            f"{EXPERTS}.down_proj",
        )
        refuses(model, LoraConfig(target_modules="all-linear"), '"all-linear"', EXPERTS)


def test_the_attention_layers_of_a_mixture_are_adapted(mixture):
    losses = []
    for model in mixture:
        adapted = adapt(model, ["q_proj", "v_proj"], None)
        loss = adapted(input_ids=moe_models.IDS, labels=moe_models.IDS).loss
        loss.backward()
        grads = [parameter.grad for parameter in adapted.parameters() if parameter.requires_grad]
        losses.append((loss.item(), [grad.abs().sum().item() for grad in grads]))
        adapted.unload()
    assert losses[0] == losses[1]
    assert max(losses[0][1]) > 0


def test_moving_a_model_to_where_it_is_streamed_leaves_it_and_elsewhere_is_refused(disk):
    expected = logits(disk)
    assert disk.to("cpu") is disk
    assert disk.cpu() is disk
    assert torch.equal(logits(disk), expected)
    assert all(parameter.is_meta for parameter in disk.parameters())
    with pytest.raises(PlacementError, match=r"(?s)cannot be moved.*expected: cpu.*found: cuda.*Fix:"):
        disk.model.embed_tokens.to("cuda")
