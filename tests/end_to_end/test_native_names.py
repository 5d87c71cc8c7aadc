"""Tests of DeepSeek-V4, whose files have names of their own, from in memory to disk and back."""

import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfq.formats.deepseek_v4 import DeepseekMxfp4
from hfq.formats.fp8 import Fp8
from tests.support import tiny_models
from tests.support.models import load, logits

pytest.importorskip("transformers.models.deepseek_v4")

IDS = torch.tensor([[1, 5, 9, 60, 33, 2, 7, 8, 40, 41]])
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "sliding_window": 8,
    "hc_mult": 2,
    "scoring_func": "sqrtsoftplus",
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "dtype": "float32",
}
QUANTIZATION = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
STORED = (
    (r"^model\.(embed)_tokens\.", r"\1."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.", "hc_head_"),
    (r"^model\.", ""),
    (r"_head_hc_", "_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.self_attn\.compressor\.indexer\.scorer\.", ".attn.indexer."),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.sinks", ".attn_sink"),
    (r"\.position_bias", ".ape"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.e_score_correction_bias", ".bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.(q_[ab]|o_[ab]|kv|gate)_proj\.", r".w\1."),
)
"""Patterns of names in the model, and their names in the file, applied in order."""


def named(name: str) -> str:
    for pattern, replacement in STORED:
        name = re.sub(pattern, replacement, name)
    return name


def quantized(weight_format, weight):
    """Returns the stored tensors of a weight, and its exact values."""
    stored = weight_format.quantize(weight)
    return stored, weight_format.dequantize(stored)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns the folder of a checkpoint, and the plain model with its exact weights."""
    torch.manual_seed(2)
    config = AutoConfig.for_model(**CONFIG)
    config.expert_dtype = None
    plain, tensors = AutoModelForCausalLM.from_config(config).eval(), {}
    fp8 = Fp8(strategy="block", block_structure=(32, 32), scale_name="scale", scale_dtype="F8_E8M0")
    for name, tensor in plain.state_dict().items():
        if name.endswith("tid2eid"):
            tensor.copy_(torch.randint(0, 4, tensor.shape))
        elif ".mlp.experts." in name:
            rows = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[name.rpartition(".")[2]]
            for expert, weights in enumerate(tensor):
                for local, weight in zip(rows, weights.chunk(len(rows)), strict=True):
                    stored, exact = quantized(DeepseekMxfp4(), weight)
                    weight.copy_(exact)
                    module = f"{named(name.rpartition('.')[0])}.{expert}.{local}"
                    tensors |= {f"{module}.{part}": value for part, value in stored.items()}
            continue
        elif re.search(r"self_attn\.\w+_proj\.weight|shared_experts", name):
            stored, exact = quantized(fp8, tensor)
            tensor.copy_(exact)
            module = named(name).removesuffix(".weight")
            tensors |= {f"{module}.{part}": value for part, value in stored.items()}
            continue
        tensors[named(name)] = tensor
    mtp = {"mtp.0.enorm.weight": torch.ones(64), "mtp.0.e_proj.weight": torch.ones(64, 64)}
    path = tiny_models.write_model(tmp_path_factory.mktemp("deepseek_v4"), tensors | mtp, None)
    (path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": QUANTIZATION, "expert_dtype": "fp4"})
    )
    return path, plain


def test_logits_are_those_of_the_plain_model_in_every_placement(written):
    path, plain = written
    expected, resident = logits(plain, IDS), logits(load(path), IDS)
    assert (resident - expected).norm() <= 1e-5 * expected.norm()
    for device_map in ({"": "cpu", "model.layers.1": "disk"}, {"": "disk"}):
        assert torch.equal(logits(load(path, device_map), IDS), resident)


def test_experts_that_token_ids_choose_are_read_before_their_layer_and_none_in_vain(written):
    path, _ = written
    expected = logits(load(path), IDS[:, :1])
    model = load(path, {"": "cpu", "model.layers.0.mlp.experts": "disk"}, expert_cache_size="1MB")
    experts = model.hf_quantizer.loading.offloader.experts
    experts._may_guess = lambda: True
    assert torch.equal(logits(model, IDS[:, :1]), expected)
    assert (experts.guesses.made, experts.guesses.used, experts.guesses.wasted_nbytes) == (2, 2, 0)
    assert experts.misses == 0
    logits(model, IDS)
    assert experts.guesses.made == experts.guesses.used == 4


def test_a_save_has_the_names_and_bytes_of_the_file_with_the_layers_that_predict(written, tmp_path):
    path, _ = written
    load(path, {"": "disk"}).save_pretrained(tmp_path)
    assert tiny_models.digests(tmp_path) == tiny_models.digests(path)
