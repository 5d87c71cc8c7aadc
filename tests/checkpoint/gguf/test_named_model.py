"""Names in the model: every tensor of a file has one, belongs to a further layer, or is an error."""

import pytest

from hfq import FormatError
from hfq.checkpoint.gguf.header import read_gguf_header
from hfq.checkpoint.gguf.named_model import name_tensors
from hfq.formats import detect_formats, tensors_by_module
from tests.support.checkpoint_files import refused
from tests.support.gguf_files import nbytes_of, write_gguf

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
}


def named(tmp_path, tensors, metadata=None, file="x.gguf"):
    """Returns the model of a file with these tensors: {name: (type, shape)}."""
    contents = {name: (kind, shape, bytes(nbytes_of(kind, shape))) for name, (kind, shape) in tensors.items()}
    path = write_gguf(tmp_path / file, LLAMA if metadata is None else metadata, contents)
    return name_tensors([read_gguf_header(path)])


def test_modules_keep_their_suffixes(tmp_path):
    tensors = {
        f"blk.1.attn_v.{suffix}": ("F32", (4, 8)) for suffix in ("weight", "bias", "scale", "input_scale")
    }
    model = named(tmp_path, {"token_embd.weight": ("Q8_0", (8, 32)), **tensors})
    assert list(model.tensors) == [
        "model.embed_tokens.weight",
        *(
            f"model.layers.1.self_attn.v_proj.{suffix}"
            for suffix in ("weight", "bias", "scale", "input_scale")
        ),
    ]
    assert all(info.name == name for name, info in model.tensors.items())


def test_experts_become_layers_of_their_own_with_their_scales(tmp_path):
    tensors = {
        "blk.0.ffn_down_exps.weight": ("NVFP4", (3, 8, 64)),
        "blk.0.ffn_down_exps.scale": ("F32", (3,)),
        "blk.0.ffn_gate_up_exps.weight": ("BF16", (3, 16, 8)),
    }
    modules = tensors_by_module(named(tmp_path, tensors).tensors)
    found = detect_formats(modules, {})
    assert {name: found[name].describe() for name in sorted(found)} == {
        **{f"model.layers.0.mlp.experts.{e}.down_proj": "gguf NVFP4" for e in range(3)},
        **{f"model.layers.0.mlp.experts.{e}.gate_up_proj": "gguf BF16" for e in range(3)},
    }
    last = modules["model.layers.0.mlp.experts.2.down_proj"]
    first = modules["model.layers.0.mlp.experts.0.down_proj"]
    assert last["weight"].range.offset - first["weight"].range.offset == 2 * 8 * 36
    assert (last["scale"].shape, last["scale"].range.offset) == ((), first["scale"].range.offset + 8)


def test_layers_that_predict_further_tokens_are_kept_apart(tmp_path):
    tensors = {f"blk.{layer}.attn_norm.weight": ("F32", (8,)) for layer in range(3)}
    tensors |= {"blk.2.nextn.eh_proj.weight": ("Q8_0", (8, 64)), "blk.2.unheard_of": ("F32", (1,))}
    keys = {**LLAMA, "llama.block_count": 3, "llama.nextn_predict_layers": 1}
    model = named(tmp_path, tensors, keys)
    assert list(model.tensors) == [f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)]
    assert list(model.kept) == ["blk.2.attn_norm.weight", "blk.2.nextn.eh_proj.weight", "blk.2.unheard_of"]


def test_frequencies_of_rope_are_checked_and_no_parameter(tmp_path):
    model = named(tmp_path, {"rope_freqs.weight": ("F32", (8,))})
    assert (model.tensors, list(model.checked)) == ({}, ["rope_freqs.weight"])


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.g_idx", "blk.0.attn_z.weight", "attn_q.weight", "v.blk.0.x", "output"]
)
def test_a_tensor_without_a_place_is_named(tmp_path, name):
    with refused(
        "holds tensors that llama does not have", f"- {name}\n", kind=FormatError, file=tmp_path / "x.gguf"
    ):
        named(tmp_path, {"output.weight": ("F32", (2, 2)), name: ("F32", (2, 2))})


def test_fused_experts_of_a_model_whose_channels_alternate_are_refused(tmp_path):
    keys = {"general.architecture": "gpt-oss", "gpt-oss.block_count": 1}
    tensors = {"blk.0.ffn_gate_up_exps.weight": ("BF16", (3, 16, 8))}
    with refused("holds tensors that gpt-oss does not have", kind=FormatError):
        named(tmp_path, tensors, keys)


def test_two_tensors_for_one_place_are_refused(tmp_path):
    tensors = {"blk.0.attn_norm.weight": ("F32", (2,)), "blk.00.attn_norm.weight": ("F32", (2,))}
    with refused("holds tensors that llama does not have", "blk.00.attn_norm.weight", kind=FormatError):
        named(tmp_path, tensors)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture='mamba'"),
        ({}, "general.architecture=None"),
        ({"general.architecture": 7}, "general.architecture=7"),
    ],
)
def test_another_architecture_is_named(tmp_path, keys, words):
    with refused(
        "does not read GGUF files of this architecture", words, "add_a_gguf_architecture.md", kind=FormatError
    ):
        named(tmp_path, {}, keys)


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_other_kinds_of_files_are_named(tmp_path, kind):
    with refused("is not a model", f"general.type='{kind}'", kind=FormatError, file=tmp_path / "x.gguf"):
        named(tmp_path, {}, {**LLAMA, "general.type": kind})


@pytest.mark.parametrize("value", [None, 0, -1, "two", True])
def test_a_missing_number_of_layers_is_named(tmp_path, value):
    keys = {"general.architecture": "llama", **({} if value is None else {"llama.block_count": value})}
    if value == -1:
        keys["llama.block_count"] = [1]
    with refused("lacks a number", "llama.block_count, a positive integer", kind=FormatError):
        named(tmp_path, {}, keys)
