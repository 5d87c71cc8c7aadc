"""`kv_b_proj` of DeepSeek, from its two stored tensors."""

import pytest
import torch

from hfq import FormatError
from hfq.formats import detect_formats
from hfq.formats.codecs.ggml.blocks import decode_into
from hfq.formats.gguf.key_value import GgufKeyValue
from hfq.tensor_spec import Blocks, ByteRange, TensorInfo
from tests.support.checkpoint_files import refused
from tests.support.gguf_files import random_blocks

HEADS, KEY, VALUE, RANK = 3, 64, 16, 32


def stored():
    """Returns the tensors of a layer, and the values of both."""
    keys = torch.from_numpy(random_blocks("Q8_0", HEADS * RANK * KEY // 32)).view(HEADS, RANK, -1)
    values = torch.from_numpy(random_blocks("Q4_0", HEADS * VALUE * RANK // 32)).view(HEADS, VALUE, -1)
    decoded = torch.empty(HEADS * RANK, KEY), torch.empty(HEADS * VALUE, RANK)
    decode_into(decoded[0], keys.flatten(0, 1), "Q8_0", 34)
    decode_into(decoded[1], values.flatten(0, 1), "Q4_0", 18)
    return (
        {"k_b": keys, "v_b": values},
        decoded[0].view(HEADS, RANK, KEY),
        decoded[1].view(HEADS, VALUE, RANK),
    )


def found_format():
    tensors, _, _ = stored()
    types = {"k_b": "Q8_0", "v_b": "Q4_0"}
    infos = {
        local: TensorInfo(
            f"m.{local}", "U8", tuple(tensor.shape), ByteRange("x", 0, 0), None, Blocks(types[local])
        )
        for local, tensor in tensors.items()
    }
    return detect_formats({"m": infos}, {})["m"]


def test_it_is_told_by_both_tensors():
    found = found_format()
    assert found == GgufKeyValue("Q8_0", "Q4_0", HEADS, KEY, VALUE, RANK)
    assert found.sized(RANK, HEADS * (KEY + VALUE)) is found
    assert [spec.shape for spec in found.tensor_specs(RANK, HEADS * (KEY + VALUE))[:2]] == [
        (HEADS, RANK, 68),
        (HEADS, VALUE, 18),
    ]
    with refused("other sizes", "3 heads of 64 and 16 rows of 32 channels", kind=FormatError):
        found.sized(RANK, HEADS * (KEY + VALUE) + 1)


@pytest.mark.parametrize("panel_heads", [1, 2, 3])
def test_the_rows_of_each_head_are_keys_then_values(panel_heads):
    tensors, keys, values = stored()
    expected = torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
    found = found_format()
    assert torch.equal(found.dequantize(tensors), expected)
    step = panel_heads * found.row_multiple
    for start in range(0, len(expected), step):
        panel = torch.full((min(step, len(expected) - start), RANK), float("nan"))
        found.dequantize_into(panel, tensors, start)
        assert torch.equal(panel, expected[start : start + step])
