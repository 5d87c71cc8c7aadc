"""Tests that LoRA on quantized modules is bit-identical to LoRA on the dequantized ones."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfq import HfqConfig
from hfq.integrations.peft.training import prepare_model
from hfq.modules.quantized_module import QuantizedModule
from tests.contract.cases import CASES as CONTRACT
from tests.support import lora_runs, tiny_models
from tests.support.code_models import CASES, LLAMA, T5, write
from tests.support.lora_runs import DISK, HALF, TOKENS, adapt, load, logits, train, unpack


@pytest.fixture(scope="module", params=lora_runs.PATHS)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def plain(path):
    """The reference run: PEFT's own layers on the dequantized weights."""
    return train(adapt(unpack(load(path))))


@pytest.mark.parametrize(
    "device_map", [None, {"": "cpu"}, HALF, DISK], ids=["resident", "cpu", "half", "disk"]
)
def test_a_run_is_that_of_the_dequantized_model_and_leaves_the_packed_bytes_alone(path, plain, device_map):
    model = load(path, device_map)
    before, stored = lora_runs.packed_bytes(model), tiny_models.digests(lora_runs.PATHS[path])
    run = train(adapt(model))
    assert run.is_equal(plain)
    assert len(run.adapters) == 2 * 28
    assert run.losses[-1] < 0.9 * run.losses[0]
    assert lora_runs.packed_bytes(run.model) == {
        f"base_model.model.{_inner(name)}": value for name, value in before.items()
    }
    assert tiny_models.digests(lora_runs.PATHS[path]) == stored


def _inner(name: str) -> str:
    module, _, local = name.rpartition(".")
    return f"{module}.base_layer.{local}"


@pytest.mark.parametrize(
    ("device_map", "use_reentrant"),
    [(None, True), (HALF, False), (DISK, True), (DISK, False)],
    ids=["resident, reentrant", "half", "disk, reentrant", "disk"],
)
def test_checkpointed_gradients_are_the_same(path, plain, device_map, use_reentrant):
    model = prepare_model(
        load(path, device_map), gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    run = train(adapt(model))
    assert any(getattr(module, "gradient_checkpointing", False) for module in run.model.modules())
    assert run.is_equal(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_of_half_precision_models_are_float32_and_agree(dtype):
    options = {
        "dtype": dtype,
        "kernel": "reference",
    }  # rounds each weight to the dtype, as in the unquantized model
    runs = [
        train(adapt(model))
        for model in (unpack(load(**options)), load(**options), load(device_map=DISK, **options))
    ]
    assert {tensor.dtype for tensor in runs[0].adapters.values()} == {torch.float32}
    assert all(run.is_equal(runs[0]) for run in runs)


OPTIONS = {
    "dora": {"use_dora": True},
    "dora, dropout": {"use_dora": True, "lora_dropout": 0.1},
    "rank-stabilised, dropout": {"use_rslora": True, "lora_dropout": 0.1},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "minor components": {"init_lora_weights": "mica"},
    "own bias": {"lora_bias": True},
    "activated": {"alora_invocation_tokens": [int(TOKENS[0, 3])]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "pattern": {"target_modules": r".*layers\.[02]\..*_proj"},
    "ranks": {
        "rank_pattern": {"q_proj": 2},
        "layers_to_transform": [1],
        "target_modules": ["q_proj", "up_proj"],
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_a_lora_config_mean_what_they_mean_on_dense_layers(options):
    runs = [
        train(adapt(model, **options), steps=2) for model in (unpack(load()), load(), load(device_map=DISK))
    ]
    assert all(run.is_equal(runs[0]) for run in runs)


GPT2 = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
SEQ2SEQ = {"input_ids": TOKENS % 96, "decoder_input_ids": TOKENS % 96}
MODELS = {
    "gpt2, with Conv1D": (AutoModelForCausalLM, "gpt2", GPT2, r"(c_attn|c_proj|c_fc)$", "all-linear"),
    "qwen2, with biases": (AutoModelForCausalLM, "qwen2", LLAMA, r"_proj$", "all-linear"),
    "packed embeddings": (
        AutoModelForCausalLM,
        "llama",
        LLAMA,
        r"_proj$|embed_tokens$",
        ["embed_tokens", "q_proj"],
    ),
    "t5, which reads weights": (
        AutoModelForSeq2SeqLM,
        "t5",
        {**T5, "dropout_rate": 0.0},
        r"\.(q|k|v|o|wi|wo)$",
        "all-linear",
    ),
    "mamba, which reads weights": (*CASES["mamba, which reads weight and bias"][:4], ["in_proj", "x_proj"]),
    "falcon, with own linear layers": (
        *CASES["falcon, whose linear layers have a forward of their own"][:4],
        "all-linear",
    ),
}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_other_models_agree_with_peft_on_the_dequantized_model(case, tmp_path):
    auto, kind, options, quantized, target_modules = case
    plain, folder = write(tmp_path, auto, kind, options, quantized)
    inputs = SEQ2SEQ if auto is AutoModelForSeq2SeqLM else {"input_ids": TOKENS % 96}

    def run(model):
        return train(adapt(model, target_modules, None), inputs=inputs)

    def loaded(device_map=None):
        config = HfqConfig(quantize_activations=False)
        return auto.from_pretrained(
            folder, quantization_config=config, dtype=torch.float32, device_map=device_map
        )

    expected, found = run(plain), run(loaded())
    if kind == "gpt2":  # Conv1D adds its bias inside the product, which rounds differently
        assert found.first_grads.keys() == expected.first_grads.keys()
        torch.testing.assert_close(found.first_grads, expected.first_grads, rtol=1e-4, atol=1e-6)
    else:
        assert found.is_equal(expected)
    if (
        kind != "t5"
    ):  # torch uses another attention kernel if T5's position bias needs no gradient: docs/explanation/design.md
        assert run(loaded(DISK)).is_equal(found)


FAMILIES = {type(case.format): case for case in CONTRACT}  # one case of each format


@pytest.mark.parametrize("case", FAMILIES.values(), ids=lambda case: case.id)
def test_every_format_carries_adapters(case, tmp_path):
    tensors = tiny_models.model_tensors(case.format)
    path = tiny_models.write_model(
        tmp_path, tensors, case.config, tiny_models.schemas(tensors, case.schema), case.kind
    )
    models = [load(path, device_map, quantize_activations=False) for device_map in (None, None, DISK)]
    inputs = {"input_ids": TOKENS % 96, "labels": TOKENS % 96}
    expected, resident, disk = (
        train(adapt(model, ["q_proj", "down_proj"], use_dora=True), 1, inputs)
        for model in (unpack(models[0]), *models[1:])
    )
    assert resident.is_equal(expected)
    assert disk.is_equal(expected)


def test_all_linear_names_what_peft_names_on_the_dequantized_model():
    configs = [LoraConfig(target_modules="all-linear") for _ in range(3)]
    for config, model in zip(configs, (unpack(load()), load(), load(device_map=DISK)), strict=True):
        get_peft_model(model, config)
    assert configs[0].target_modules == configs[1].target_modules == configs[2].target_modules
    assert configs[0].target_modules == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of adapters, their logits, their tokens, logits without them)."""
    model = train(adapt(load())).model
    folder = tmp_path_factory.mktemp("adapter")
    found = logits(model)
    model.save_pretrained(folder)
    with model.disable_adapter():
        base = logits(model)
    assert torch.equal(base, logits(load()))
    assert not torch.equal(base, found)
    return folder, found, generated(model), base


def generated(model):
    return model.eval().generate(input_ids=TOKENS[:1], max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("device_map", [None, "cpu", HALF, DISK], ids=["resident", "cpu", "half", "disk"])
def test_adapters_are_saved_alone_and_loaded_into_any_placement(trained, device_map):
    folder, expected, tokens, base = trained
    assert not any(child.name.startswith("model") for child in folder.iterdir())
    model = PeftModel.from_pretrained(load(device_map=device_map), folder)
    assert torch.equal(logits(model), expected)
    assert torch.equal(generated(model), tokens)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())  # accelerate did not place it
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model.unload()), base)
    empty = PeftModel.from_pretrained(load(device_map=device_map), folder, low_cpu_mem_usage=True)
    assert torch.equal(logits(empty), expected)


def test_adapters_of_a_packed_model_fit_the_unquantized_one(trained):
    folder, expected, _, _ = trained
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_models.DATA / "tiny-llama", dtype=torch.float32), folder
    )
    found = logits(plain)
    assert (found - expected).norm() < 0.5 * expected.norm()  # another base: 16 bits instead of 4
    torch.testing.assert_close(
        logits(plain.merge_and_unload()), found, rtol=1e-3, atol=1e-3
    )  # merging rounds


@pytest.mark.parametrize("device_map", [None, DISK], ids=["resident", "disk"])
def test_several_adapters_stand_beside_one_base(trained, device_map):
    folder, expected, _, base = trained
    model = PeftModel.from_pretrained(load(device_map=device_map), folder, adapter_name="first")
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("other")
    other = logits(model)
    assert not torch.equal(other, expected)
    model.set_adapter("first")
    assert torch.equal(logits(model), expected)
    with torch.no_grad():
        mixed = model.eval()(input_ids=TOKENS, adapter_names=["first", "__base__"]).logits
    torch.testing.assert_close(
        mixed, torch.stack([expected[0], base[1]])
    )  # rows are multiplied in other groups
    model.add_weighted_adapter(["first", "other"], [1.0, 1.0], "both", combination_type="cat")
    model.set_adapter("both")
    assert not torch.equal(logits(model), expected)
    model.delete_adapter("both")
    model.delete_adapter("other")
    model.set_adapter("first")
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("device_map", [None, HALF, DISK], ids=["resident", "half", "disk"])
def test_transformers_own_adapter_methods_work(trained, device_map, tmp_path):
    folder, expected, _, base = trained
    model = load(device_map=device_map)
    model.load_adapter(folder)
    assert torch.equal(logits(model), expected)
    model.disable_adapters()
    assert torch.equal(logits(model), base)
    assert torch.equal(logits(load(str(folder), device_map)), expected), "with its base in one call"
    model = load(device_map=device_map)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    again = load(device_map=device_map)
    again.load_adapter(tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_adapters_of_an_embedding_on_disk_are_saved_without_it(tmp_path):
    for name, device_map in (("resident", None), ("disk", DISK)):
        model = train(adapt(load(device_map=device_map), ["embed_tokens", "q_proj"])).model
        model.save_pretrained(tmp_path / name)
        again = PeftModel.from_pretrained(load(device_map=device_map), tmp_path / name)
        assert torch.equal(logits(again), logits(model))
    resident, disk = (
        set(load_file(tmp_path / name / "adapter_model.safetensors")) for name in ("resident", "disk")
    )
    assert resident - disk == {"base_model.model.model.embed_tokens.base_layer.weight"}
    assert len(disk) == 2 + 2 * 4


def test_a_copy_of_an_adapted_model_in_memory_computes_the_same():
    model = adapt(load(), init_lora_weights=False)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    assert sum(isinstance(module, QuantizedModule) for module in model.modules()) == 28
