"""Layouts: what the metadata say of the order of rows and columns, and what contradicts them."""

import pytest

from hfq import FormatError
from hfq.tensor_spec import Blocks, StoredOrder
from tests.checkpoint.gguf.test_named_model import LLAMA, named
from tests.support.checkpoint_files import refused

QWEN = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 1,
    "qwen35.ssm.group_count": 2,
    "qwen35.ssm.time_step_rank": 6,
    "qwen35.ssm.inner_size": 192,
}
VALUES = StoredOrder(0, 1, 3, 2, 32)


def test_rows_of_heads_alternate_between_halves(tmp_path):
    tensors = {"blk.1.attn_q.weight": ("Q8_0", (64, 32)), "blk.1.attn_k.bias": ("F32", (32,))}
    found = named(tmp_path, tensors).tensors
    assert found["model.layers.1.self_attn.q_proj.weight"].blocks == Blocks(
        "Q8_0", StoredOrder(0, 2, 16, 2, 1), is_layer=True
    )
    bias = found["model.layers.1.self_attn.k_proj.bias"].blocks
    assert bias == Blocks("F32", StoredOrder(0, 1, 16, 2, 1))
    assert bias.is_converted


def test_a_scale_has_no_rows(tmp_path):
    found = named(tmp_path, {"blk.1.attn_q.scale": ("F32", (1,))}).tensors
    assert found["model.layers.1.self_attn.q_proj.scale"].blocks == Blocks("F32")


@pytest.mark.parametrize(("values", "expected"), [([2, 4], 8), ([2], None), ([2, 0], None)])
def test_layers_may_have_different_numbers_of_heads(tmp_path, values, expected):
    keys = {**LLAMA, "llama.attention.head_count": values}
    tensors = {"blk.1.attn_q.weight": ("F32", (64, 32))}
    if expected is None:
        with refused("lacks a number", "llama.attention.head_count", kind=FormatError):
            named(tmp_path, tensors, keys)
    else:
        rows = named(tmp_path, tensors, keys).tensors["model.layers.1.self_attn.q_proj.weight"].blocks.rows
        assert rows == StoredOrder(0, 4, expected, 2, 1)


@pytest.mark.parametrize(
    ("local", "shape", "blocks"),
    [
        ("ssm_alpha.weight", (6, 32), Blocks("F32", StoredOrder(0, 1, 3, 2, 1), is_layer=True)),
        ("attn_gate.weight", (192, 32), Blocks("F32", VALUES, is_layer=True)),
        ("attn_qkv.weight", (320, 32), Blocks("F32", StoredOrder(128, 1, 3, 2, 32), is_layer=True)),
        ("ssm_conv1d.weight", (320, 4), Blocks("F32", StoredOrder(128, 1, 3, 2, 32))),
        ("ssm_out.weight", (32, 192), Blocks("F32", None, VALUES, is_layer=True)),
        ("ssm_a", (6,), Blocks("F32", StoredOrder(0, 1, 3, 2, 1), function="minus exponential")),
        ("attn_norm.weight", (32,), Blocks("F32", function="plus one")),
        ("ssm_norm.weight", (32,), Blocks("F32")),
    ],
)
def test_value_heads_are_numbered_across_key_heads(tmp_path, local, shape, blocks):
    (info,) = named(tmp_path, {f"blk.0.{local}": ("F32", shape)}, QWEN).tensors.values()
    assert info.blocks == blocks
    assert info.shape == ((320, 1, 4) if "conv1d" in local else shape)


def test_one_value_head_per_key_head_has_no_order(tmp_path):
    keys = {**QWEN, "qwen35.ssm.time_step_rank": 2}
    tensors = {"blk.0.attn_gate.weight": ("F32", (64, 32)), "blk.0.ssm_out.weight": ("F32", (32, 64))}
    found = named(tmp_path, tensors, keys).tensors.values()
    assert {(info.blocks.rows, info.blocks.columns) for info in found} == {(None, None)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blk.0.attn_gate.weight": ("F32", (191, 32))}, "expected: a multiple of 6"),
        ({"blk.0.attn_qkv.weight": ("F32", (64, 32))}, "expected: at least 192 rows"),
        ({"blk.0.ssm_out.weight": ("F32", (32, 32))}, "expected: a multiple of 6"),
        ({"blk.0.attn_norm.weight": ("Q8_0", (1, 32))}, "expected: F32 or F16 or BF16"),
    ],
)
def test_shapes_that_contradict_the_metadata_are_named(tmp_path, tensors, words):
    name = next(iter(tensors))
    with refused("does not fit its metadata", words, kind=FormatError, tensor=name):
        named(tmp_path, tensors, QWEN)


def test_a_row_without_its_dimension_gets_it(tmp_path):
    keys = {"general.architecture": "qwen2moe", "qwen2moe.block_count": 1}
    (info,) = named(tmp_path, {"blk.0.ffn_gate_inp_shexp.weight": ("F32", (32,))}, keys).tensors.values()
    assert (info.name, info.shape) == ("model.layers.0.mlp.shared_expert_gate.weight", (1, 32))
