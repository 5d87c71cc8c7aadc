"""Tests of bitsandbytes against loops over its bytes.

They include blocks across rows, odd sizes, nested scales, and a damaged state.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.bitsandbytes import Bnb4Bit, BnbInt8
from tests.support.tiny_models import described

STATE = "weight.quant_state.bitsandbytes__nf4"
SIZES = [(4, 128), (6, 48), (5, 96), (3, 7), (7, 3), (1, 1), (9, 65), (64, 2), (10, 33)]
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def random_layer(out_features: int, in_features: int, storage=torch.uint8, nested: bool = False, **state):
    """Returns random bytes with a random table of values."""
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    numel = out_features * in_features
    blocks, nbytes = -(-numel // 64), -(-numel // 2)
    item = torch.empty(0, dtype=storage).element_size()
    codes = torch.randint(0, 256, (-(-nbytes // item) * item,), dtype=torch.uint8, generator=generator)
    written = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [out_features, in_features],
    }
    tensors = {
        "weight": codes.view(storage).view(-1, 1),
        "weight.quant_map": torch.randn(16, generator=generator),
        "weight.absmax": torch.rand(blocks, generator=generator),
    }
    if nested:
        tensors["weight.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8, generator=generator)
        tensors["weight.nested_absmax"] = torch.rand(-(-blocks // 256), generator=generator)
        tensors["weight.nested_quant_map"] = torch.randn(256, generator=generator)
        written |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625 + 1e-9}
    return tensors | {STATE: as_state({**written, **state})}


def as_state(state) -> torch.Tensor:
    text = state if isinstance(state, bytes) else json.dumps(state).encode()
    return torch.tensor(list(text), dtype=torch.uint8)


def dequantize_by_hand(tensors, out_features: int, in_features: int) -> torch.Tensor:
    """Computes W.flat[i] = quant_map[code[i]] * absmax[i // 64] with float32 in each step.

    The code of an even i is in the high nibble.
    """
    packed = tensors["weight"].contiguous().view(-1).view(torch.uint8).tolist()
    values, absmax = tensors["weight.quant_map"].numpy(), tensors["weight.absmax"].numpy()
    state = json.loads(bytes(tensors[STATE].tolist()))
    if absmax.dtype == np.uint8:
        table, scales = tensors["weight.nested_quant_map"].numpy(), tensors["weight.nested_absmax"].numpy()
        offset = np.float32(state["nested_offset"])
        absmax = [table[stored] * scales[j // 256] + offset for j, stored in enumerate(absmax)]
    flat = []
    for i in range(out_features * in_features):
        code = packed[i // 2] >> 4 if i % 2 == 0 else packed[i // 2] & 15
        flat.append(values[code] * absmax[i // 64])
    return torch.from_numpy(np.array(flat, dtype=np.float32).reshape(out_features, in_features))


def detected(tensors, size, config=CONFIG) -> Bnb4Bit:
    found = Bnb4Bit.detect("m", described("m", tensors), config)
    return found.sized(size[1], size[0]).resolve("m", tensors)


def check_specs(weight_format, tensors, size) -> None:
    specs = {spec.name: spec for spec in weight_format.tensor_specs(size[1], size[0])}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name].shape for name in tensors
    }


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_weight_is_that_of_the_loops(size, nested):
    tensors = random_layer(*size, nested=nested)
    found = detected(tensors, size)
    check_specs(found, tensors, size)
    assert torch.equal(found.dequantize(tensors), dequantize_by_hand(tensors, *size))


def test_more_scales_than_one_nested_block_holds_have_a_scale_each():
    size = (65, 257)
    tensors = random_layer(*size, nested=True)
    assert tensors["weight.nested_absmax"].numel() == 2
    found = detected(tensors, size)
    check_specs(found, tensors, size)
    assert torch.equal(found.dequantize(tensors), dequantize_by_hand(tensors, *size))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_dtype_that_the_bytes_are_stored_as_does_not_matter(size, storage):
    tensors = random_layer(*size, storage=storage)
    found = detected(tensors, size)
    check_specs(found, tensors, size)
    assert torch.equal(found.dequantize(tensors), dequantize_by_hand(tensors, *size))


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("size", [(12, 48), (13, 31), (16, 65), (300, 129)], ids=str)
def test_a_panel_at_any_start_is_made_of_rows_of_the_whole(size, nested):
    tensors = random_layer(*size, nested=nested)
    found = detected(tensors, size)
    whole = dequantize_by_hand(tensors, *size)
    assert found.row_multiple in (1, 2)
    for start in range(0, size[0], found.row_multiple if size[0] < 100 else 26):
        for rows in (1, 2, 3, size[0] - start):
            panel = torch.full((min(rows, size[0] - start), size[1]), float("nan"))
            found.dequantize_into(panel, tensors, start)
            assert torch.equal(panel, whole[start : start + rows]), (start, rows)


def test_the_table_in_the_file_wins_over_the_usual_one():
    tensors = Bnb4Bit().quantize(torch.randn(4, 64))
    tensors["weight.quant_map"] = tensors["weight.quant_map"].flip(0)
    found = detected(tensors, (4, 64))
    assert torch.equal(found.dequantize(tensors), dequantize_by_hand(tensors, 4, 64))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_nested": True}, {"storage": "F32"}], ids=str)
def test_quantizing_an_odd_size_gives_what_is_read_back(size, options):
    weight = torch.randn(*size, generator=torch.Generator().manual_seed(1))
    tensors = Bnb4Bit(**options).quantize(weight)
    found = detected(tensors, size)
    check_specs(found, tensors, size)
    assert torch.equal(found.dequantize(tensors), dequantize_by_hand(tensors, *size))
    # nf4's widest gap between values is 0.31 of a block's amplitude; nesting adds an error of some percent
    assert (found.dequantize(tensors) - weight).abs().max() <= 0.2 * weight.abs().max()


GOOD = {
    "quant_type": "nf4",
    "blocksize": 64,
    "dtype": "bfloat16",
    "shape": [4, 64],
    "nested_blocksize": 256,
    "nested_offset": 0.1,
}
UNREADABLE = {
    "empty": b"",
    "no utf-8": b"\xff\xfe{}",
    "cut off": json.dumps(GOOD).encode()[:-1],
    "trailing bytes": json.dumps(GOOD).encode() + b"\x00",
    "nul bytes": b"\x00" * 40,
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "a text": b'"nf4"',
    "deeply nested lists": b"[" * 100_000,
    "deeply nested objects": b'{"shape":' * 100_000,
    "a number of too many digits": b'{"blocksize":' + b"9" * 5000 + b"}",
}
CONTRADICTING = {
    "no keys": {"quant_type": None, "blocksize": None, "shape": None, "nested_blocksize": None},
    "the other type": {"quant_type": "fp4"},
    "a type of another type": {"quant_type": ["nf4"]},
    "another blocksize": {"blocksize": 128},
    "a blocksize in words": {"blocksize": "64"},
    "the shape transposed": {"shape": [64, 4]},
    "a flat shape": {"shape": [256]},
    "a shape of words": {"shape": ["4", "64"]},
    "a shape that is no list": {"shape": 256},
    "a shape with a name": {"shape": {"out": 4, "in": 64}},
    "another nested blocksize": {"nested_blocksize": 128},
    "an offset of NaN": {"nested_offset": float("nan")},
    "an infinite offset": {"nested_offset": float("-inf")},
    "an offset out of range": {"nested_offset": 10**400},
    "an offset in words": {"nested_offset": "0.1"},
    "an offset of true": {"nested_offset": True},
    "an offset in a list": {"nested_offset": [0.1]},
    "no offset at all": {"nested_offset": None},
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_a_state_that_is_no_json_object_is_refused(text):
    tensors = random_layer(4, 64) | {STATE: as_state(text)}
    with pytest.raises(FormatError, match=rf"(?s)cannot be read. Nothing was loaded.*m\.{STATE}"):
        detected(tensors, (4, 64))


@pytest.mark.parametrize("change", CONTRADICTING.values(), ids=CONTRADICTING)
def test_a_state_that_contradicts_the_tensors_is_refused(change):
    tensors = random_layer(4, 64, nested=True) | {STATE: as_state({**GOOD, **change})}
    with pytest.raises(FormatError, match=r"contradicts its tensors. Nothing was loaded") as caught:
        detected(tensors, (4, 64))
    assert all(f"{key}: expected" in str(caught.value) for key in change)


def test_a_state_with_more_keys_than_hfq_knows_is_read():
    tensors = random_layer(4, 64, offset="\ud800", future={"a": [1]})
    assert torch.equal(detected(tensors, (4, 64)).dequantize(tensors), dequantize_by_hand(tensors, 4, 64))


@pytest.mark.parametrize(
    "name", ["weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"]
)
def test_a_table_or_scale_that_is_not_finite_is_refused_by_name(name):
    nested = "nested" in name
    tensors = random_layer(4, 64, nested=nested)
    tensors[name][-1] = float("inf")
    with pytest.raises(FormatError, match=rf"(?s)not finite. Nothing was loaded.*m\.{name}"):
        detected(tensors, (4, 64))


def test_a_config_of_the_other_type_is_a_contradiction():
    tensors = random_layer(4, 64)
    with pytest.raises(
        FormatError, match=r"(?s)contradicts the tensors of m. Nothing was loaded.*bnb_4bit_quant_type"
    ):
        Bnb4Bit.detect("m", described("m", tensors), CONFIG | {"bnb_4bit_quant_type": "fp4"})


def test_a_type_that_is_neither_is_refused():
    tensors = random_layer(4, 64)
    tensors["weight.quant_state.bitsandbytes__int5"] = tensors.pop(STATE)
    with pytest.raises(FormatError, match=r"(?s)Nothing was loaded.*nf4 or fp4"):
        Bnb4Bit.detect("m", described("m", tensors), {})


def test_the_nested_offset_is_settled_by_the_state():
    found = detected(random_layer(4, 64, nested=True), (4, 64))
    assert found.nested_offset == 0.0625 + 1e-9
    assert dataclasses.replace(found, nested_offset=0.0) != found


def random_int8(out_features: int = 5, in_features: int = 33):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (out_features, in_features), generator=generator).to(torch.int8)
    return {
        "weight": codes,
        "SCB": torch.rand(out_features, generator=generator) * 3,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def test_an_int8_row_is_scaled_by_its_amplitude_over_127():
    tensors = random_int8()
    found = BnbInt8.detect("m", described("m", tensors), {}).resolve("m", tensors)
    expected = tensors["weight"].double() * tensors["SCB"].double()[:, None] / 127
    # the loop rounds to float32 three times, hfq once
    assert torch.allclose(found.dequantize(tensors).double(), expected, rtol=3e-7, atol=0)
    for start in range(5):
        panel = torch.full((1, 33), float("nan"))
        found.dequantize_into(panel, tensors, start)
        assert torch.equal(panel[0], found.dequantize(tensors)[start])


@pytest.mark.parametrize("layout", [1, 2, 3, 255])
def test_an_int8_weight_in_tiles_is_refused(layout):
    tensors = random_int8() | {"weight_format": torch.tensor(layout, dtype=torch.uint8)}
    found = BnbInt8.detect("m", described("m", tensors), {})
    with pytest.raises(FormatError, match=rf"(?s)tiles.*Nothing was loaded.*m.weight_format.*{layout} "):
        found.resolve("m", tensors)


def test_an_int8_weight_without_its_layout_lies_in_rows():
    tensors = random_int8()
    whole = BnbInt8.detect("m", described("m", tensors), {}).dequantize(tensors)
    del tensors["weight_format"]
    found = BnbInt8.detect("m", described("m", tensors), {}).resolve("m", tensors)
    assert torch.equal(found.dequantize(tensors), whole)
