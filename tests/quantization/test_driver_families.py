"""Tests of other architectures: biases, Conv1D, two kinds of attention, and mixtures of experts."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hfq
from hfq import Recipe, SetupError
from hfq.checkpoint import Checkpoint
from tests.support.models import load

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GATED = {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "opt": {**COMMON, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_neox": {**COMMON, "intermediate_size": 128},
    "qwen2": {**COMMON, **GATED},
    "gemma3_text": {
        **COMMON,
        **GATED,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {**COMMON, **GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
FUSED = {
    "gpt_oss": {**COMMON, **GATED, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
}
IDS = torch.arange(24)[None] * 3 % 96


@pytest.fixture
def source(tmp_path, kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**MODELS, **FUSED}[kind], tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(tmp_path / "floats")
    return tmp_path / "floats"


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_calibrated_through_its_own_blocks(source, kind, tmp_path):
    tokens = [
        torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(index)) for index in range(30)
    ]
    recipe = Recipe("gptq", bits=8, group_size=32, desc_act=kind == "qwen2")
    report = hfq.quantize(
        source,
        recipe,
        output_dir=tmp_path / "gptq",
        dataset=tokens,
        num_calibration_samples=30,
        max_seq_length=40,
    )
    linears = {"opt": 6, "gpt2": 4, "gpt_neox": 4, "mixtral": 4 + 4 * 3}.get(kind, 7)
    assert len(report.layers) == 2 * linears
    assert {layer.method for layer in report.layers} == {"gptq"}
    model, floats = load(tmp_path / "gptq"), load(source)
    with torch.no_grad():
        found, exact = model(IDS).logits, floats(IDS).logits
    assert (found - exact).norm() < 0.05 * exact.norm()
    written, before = Checkpoint.open(tmp_path / "gptq").tensors, Checkpoint.open(source).tensors
    quantized = {name.removesuffix(".qweight") for name in written if name.endswith(".qweight")}
    assert quantized == {name.removesuffix(".weight") for name in before.keys() - written.keys()}
    if kind == "mixtral":
        routed = [layer.tokens for layer in report.layers if "experts" in layer.name]
        assert sum(routed) == 2 * 3 * 2 * 30 * 40  # layers, projections, experts of each token
        assert "experts.0" in next(iter(sorted(name for name in quantized if "experts" in name)))


@pytest.mark.parametrize("kind", FUSED)
def test_experts_that_are_stored_as_one_tensor_stay_floats_where_that_is_asked_for_alone(
    source, kind, tmp_path
):
    options, out = {"method": "rtn", "group_size": 32}, tmp_path / "out"
    with pytest.raises(
        SetupError,
        match=r"(?s)experts, in one tensor.*gate_up_proj.*modules_to_not_convert=\['mlp.experts'\]",
    ):
        hfq.quantize(source, Recipe(**options), output_dir=out)
    assert [entry.name for entry in tmp_path.iterdir()] == ["floats"]
    report = hfq.quantize(source, Recipe(**options), output_dir=out, modules_to_not_convert=["mlp.experts"])
    assert {layer.name.rpartition(".")[2] for layer in report.layers} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


@pytest.mark.parametrize("kind", ["mixtral"])
def test_experts_that_no_token_reaches_are_rounded_and_reported(source, kind, tmp_path, caplog):
    recipe = Recipe("gptq", bits=8, group_size=32)
    report = hfq.quantize(
        source,
        recipe,
        output_dir=tmp_path / "gptq",
        dataset=[torch.zeros(1, 4, dtype=torch.int64)],
        num_calibration_samples=1,
        max_seq_length=4,
    )
    nearest = [layer.name for layer in report.layers if layer.method == "rtn"]
    assert nearest
    assert all("experts" in name for name in nearest)
    assert "rounded to nearest" in caplog.text
    assert "Rounded to nearest: model.layers" in (tmp_path / "gptq" / "README.md").read_text()
    assert torch.isfinite(load(tmp_path / "gptq")(IDS).logits).all()
