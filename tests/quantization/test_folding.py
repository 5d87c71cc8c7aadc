"""Tests of finding modules that absorb a scale, without a change of the outputs."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfq.loading.matching.quantizable_layers import find_decoder_layers, find_linears
from hfq.quantization.folding import find_fold, scale_columns, trace
from hfq.quantization.layer_inputs import capture, run_decoder_layer
from tests.quantization.test_driver_families import COMMON, GATED, MODELS

NORM, ATTENTION, MLP = "input_layernorm", "self_attn.v_proj", "post_attention_layernorm"
NEOX = {"query_key_value": NORM, "dense_h_to_4h": MLP, "dense_4h_to_h": None}
LLAMA = {"q_proj": NORM, "o_proj": ATTENTION, "gate_proj": MLP, "down_proj": "mlp.up_proj"}
OTHERS = {
    "llama": {**COMMON, **GATED, "num_key_value_heads": 4},
    "phi3": {**COMMON, **GATED},
    "bloom": {**MODELS["gpt2"], "hidden_size": 64, "n_head": 4, "n_layer": 2},
    "phi": {**COMMON, "intermediate_size": 128},
}
EXPECTED = {
    "llama": LLAMA,
    "qwen2": LLAMA,  # two heads of values for four of queries, and biases
    "gemma3_text": {
        **LLAMA,
        "gate_proj": "pre_feedforward_layernorm",
    },  # norms that store their weight minus 1
    "opt": {
        "q_proj": "self_attn_layer_norm",
        "out_proj": ATTENTION,
        "fc1": "final_layer_norm",
        "fc2": "fc1",
    },  # ReLU
    "gpt2": {
        "attn.c_attn": "ln_1",
        "attn.c_proj": "attn.c_attn",
        "mlp.c_fc": "ln_2",
        "mlp.c_proj": None,
    },  # GELU
    "phi3": {
        "qkv_proj": NORM,
        "o_proj": "self_attn.qkv_proj",
        "gate_up_proj": MLP,
        "down_proj": "mlp.gate_up_proj",
    },
    "gpt_neox": {**NEOX, "attention.dense": "attention.query_key_value"},
    "bloom": {**NEOX, "attention.dense": "self_attention.query_key_value"},
    "phi": {"q_proj": NORM, "dense": ATTENTION, "fc2": None},  # one norm before attention and fc1
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_scales_go_where_they_change_nothing(kind):
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**MODELS, **OTHERS}[kind]))
        .float()
        .eval()
    )
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    blocks = find_decoder_layers(model)
    (hidden,), calls = capture(model, blocks, [torch.randint(0, 96, (2, 24))])
    name, block = next(iter(blocks.items()))
    linears, call = find_linears(block, name), calls[name][0]
    seen = trace(block, linears, hidden, call)
    groups = {tuple(seen.readers(layer)) for layer in linears}
    if kind == "phi":
        assert {len(group) for group in groups} == {1, 4}
    before = {local: parameter.clone() for local, parameter in block.named_parameters()}
    folds = {group: find_fold(block, linears, group, seen, hidden, call, {}) for group in groups}
    assert all(torch.equal(parameter, before[local]) for local, parameter in block.named_parameters())
    for last, expected in EXPECTED[kind].items():
        (group,) = (group for group in groups if any(layer.endswith(last) for layer in group))
        found = folds[group]
        assert (found.name if found else None) == expected or found.name.endswith(f".{expected}")
    for group, fold in folds.items():
        if fold is None:
            continue
        scale = torch.ones(fold.out_features)
        scale[fold.channels] = (torch.rand(fold.out_features) * 4 + 0.1)[fold.channels]
        # a weight that is rounded to bfloat16 moves the scale, not the function; a bias would move
        dtype = (
            torch.float32
            if "bias" in fold.module._parameters and fold.module._parameters["bias"] is not None
            else torch.bfloat16
        )
        given, changed = fold.give(scale, lambda parameter, dtype=dtype: dtype)
        assert all(tensor.dtype == dtype for tensor in changed.values())
        for layer in group:
            scale_columns(linears[layer], given)
    output = run_decoder_layer(block, hidden, call)
    assert (output - seen.output).norm() < 2e-6 * (seen.output - hidden).norm()  # sums of float32


def test_a_norm_that_another_module_reads_takes_nothing():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **OTHERS["llama"])).float().eval()
    blocks = find_decoder_layers(model)
    (hidden,), calls = capture(model, blocks, [torch.randint(0, 96, (2, 24))])
    name, block = next(iter(blocks.items()))
    linears, call = find_linears(block, name, [f"{name}.self_attn.k_proj"]), calls[name][0]
    seen = trace(block, linears, hidden, call)
    group = seen.readers(f"{name}.self_attn.q_proj")
    assert len(group) == 2
    assert find_fold(block, linears, group, seen, hidden, call, {}) is None
