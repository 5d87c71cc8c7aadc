"""Rows of ggml's blocks as layers: detection, sizes, the orders of rows and columns, and scales."""

import pytest
import torch

from hfq import FormatError
from hfq.formats import detect_formats
from hfq.formats.codecs.ggml.blocks import decode_into
from hfq.formats.gguf.block_rows import Gguf, positions
from hfq.tensor_spec import Blocks, ByteRange, LayerSlice, StoredOrder, TensorInfo
from tests.support.checkpoint_files import refused
from tests.support.gguf_files import random_blocks

ROPE = StoredOrder(0, 2, 4, 2, 1)  # two heads of eight rows, stored in pairs
TILED = StoredOrder(4, 1, 3, 2, 2)


def info(name, dtype, shape, blocks=None, part_of=None):
    return TensorInfo(name, dtype, shape, ByteRange("x.gguf", 0, 0), part_of, blocks)


def weights(name, rows, columns, size=32):
    raw = torch.from_numpy(random_blocks(name, rows * columns // size)).view(rows, -1)
    values = torch.empty(rows, columns)
    decode_into(values, raw, name, raw.shape[1] * size // columns)
    return raw, values


@pytest.mark.parametrize(
    ("weight", "is_found"),
    [
        (info("m.weight", "U8", (4, 18), Blocks("Q4_0", is_layer=True)), True),
        (info("m.weight", "U8", (4, 18)), False),
        (info("m.weight", "U8", (2, 4, 18), Blocks("Q4_0", is_layer=True)), False),
        (info("m.weight", "BF16", (4, 32), Blocks("BF16")), False),
        (info("m.weight", "BF16", (16, 32), Blocks("BF16", rows=ROPE, is_layer=True)), True),
    ],
)
def test_layers_are_told_from_unquantized_weights(weight, is_found):
    assert Gguf.detect("m", {"weight": weight}, {}) == (Gguf(weight.blocks) if is_found else None)


def test_a_layer_with_a_scale_says_so():
    tensors = {
        "weight": info("m.weight", "U8", (4, 36), Blocks("NVFP4", is_layer=True)),
        "scale": info("m.scale", "F32", (1,), Blocks("F32")),
        "input_scale": info("m.input_scale", "F32", (1,), Blocks("F32")),
    }
    found = detect_formats({"m": tensors}, {})["m"]
    assert found == Gguf(Blocks("NVFP4", is_layer=True), (1,), (("input_scale", "F32", (1,)),))
    specs = {spec.name: spec for spec in found.tensor_specs(64, 4)}
    assert [str(specs[name]) for name in ("weight", "scale", "bias")] == [
        "U8 [4, 36]",
        "F32 [1]",
        "F16 or BF16 or F32 [4]",
    ]
    assert specs.keys() == {"weight", "scale", "input_scale", "bias"}
    assert (found.describe(), found.bits_per_code, found.codes_name) == ("gguf NVFP4", 4.5, "weight")


@pytest.mark.parametrize(
    ("type_name", "shape", "expected"),
    [
        ("Q4_K", (6, 288), (6, 512)),
        ("Q8_0", (6, 34), (6, 32)),
        ("BF16", (6, 40), (6, 40)),
        ("F32", (1, 1), (1, 1)),
    ],
)
def test_sizes_come_from_the_bytes_of_a_row(type_name, shape, expected):
    found = Gguf(Blocks(type_name))
    assert found.shape({"weight": torch.empty(shape)}) == expected
    assert next(iter(found.tensor_specs(*expected[::-1]))).shape == shape


def test_a_layer_whose_rows_are_no_whole_blocks_is_refused():
    with refused("Q4_K cannot hold a layer", "block=256", "100 input channels", kind=FormatError):
        Gguf(Blocks("Q4_K")).tensor_specs(100, 4)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [(Blocks("Q4_0", rows=ROPE), "expected: 8 rows"), (Blocks("Q4_0", columns=ROPE), "expected: 32 columns")],
)
def test_an_order_of_another_size_is_refused(blocks, words):
    with refused(words, "found: 16", kind=FormatError):
        Gguf(blocks).sized(32, 8)


def test_rows_of_attention_heads_are_in_the_order_of_the_model():
    raw, values = weights("Q4_0", 16, 64)
    # llama.cpp's converter: w.reshape(heads, 2, size / 2, columns).swapaxes(1, 2)
    model = values.reshape(2, 4, 2, 64).swapaxes(1, 2).reshape(16, 64)
    assert torch.equal(model.reshape(2, 2, 4, 64).swapaxes(1, 2).reshape(16, 64), values)
    found = Gguf(Blocks("Q4_0", rows=ROPE)).sized(64, 16)
    assert torch.equal(found.dequantize({"weight": raw}), model)
    panel = torch.empty(3, 64)
    found.dequantize_into(panel, {"weight": raw}, 5)
    assert torch.equal(panel, model[5:8])


@pytest.mark.parametrize("order", [ROPE, TILED])
def test_columns_and_rows_are_in_the_order_of_the_model(order):
    values = torch.arange(float(order.size**2)).view(order.size, order.size)
    columns = positions(order, torch.device("cpu"))
    assert sorted(columns.tolist()) == list(range(order.size))
    assert columns[: order.start].tolist() == list(range(order.start))
    found = Gguf(Blocks("F32", rows=order, columns=order))
    assert torch.equal(found.dequantize({"weight": values}), values[columns][:, columns])


def test_a_scale_multiplies_all_weights():
    raw, values = weights("NVFP4", 4, 128, 64)
    tensors = {"weight": raw, "scale": torch.tensor([0.37])}
    found = Gguf(Blocks("NVFP4"), (1,))
    assert torch.equal(found.dequantize(tensors), values * torch.tensor(0.37))
    assert found.resolve("m", tensors) is found
    for scale, words in (
        (torch.tensor([float("nan")]), "not finite"),
        (torch.ones(2), "more than one value"),
    ):
        with refused(words, kind=FormatError, tensor="m.scale"):
            found.resolve("m", {"weight": raw, "scale": scale})


@pytest.mark.parametrize("rows", [None, ROPE])
def test_reordered_rows_have_the_same_weights(rows):
    raw, _ = weights("Q5_K", 16, 256, 256)
    found = Gguf(Blocks("Q5_K", rows=rows))
    tensors = {"weight": raw, "bias": torch.arange(16.0)}
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    other, moved = found.reorder(tensors, order)
    assert torch.equal(other.dequantize(moved), found.dequantize(tensors)[order])
    assert torch.equal(moved["bias"], tensors["bias"][order])


def test_nothing_is_quantized_to_gguf():
    with refused("does not quantize to GGUF", kind=FormatError):
        Gguf(Blocks("Q4_0")).quantize(torch.zeros(1, 32))


def cut(tensors, cuts):
    """Returns the tensors of a slice."""
    return {
        local: tensors[local]
        if part is None
        else tensors[local].narrow(part.dim, part.start, part.stop - part.start)
        for local, part in cuts.items()
    }


@pytest.mark.parametrize(
    ("axis", "start", "stop"), [("out", 8, 16), ("out", 0, 8), ("in", 64, 128), ("in", 0, 32)]
)
@pytest.mark.parametrize("rows", [None, ROPE])
@pytest.mark.parametrize("kind", ["Q4_0", "F32"])
def test_slices_have_the_weights_of_the_whole_layer(kind, rows, axis, start, stop):
    raw = weights(kind, 16, 128, 32)[0] if kind == "Q4_0" else torch.arange(16.0 * 128).view(16, 128)
    tensors = {"weight": raw, "bias": torch.arange(16.0)}
    found = Gguf(Blocks(kind, rows=rows))
    infos = {local: info(f"m.{local}", "U8", tuple(tensor.shape)) for local, tensor in tensors.items()}
    part = LayerSlice(axis, start, stop, 16 if axis == "out" else 128)
    sliced, cuts = found.shard(part, infos, {})
    whole = found.dequantize(tensors)
    expected = whole[start:stop] if axis == "out" else whole[:, start:stop]
    assert torch.equal(sliced.dequantize(cut(tensors, cuts)), expected)
    bias = cut(tensors, cuts).get("bias")
    assert (bias is None) == (axis == "in" and start > 0)
    assert bias is None or torch.equal(
        bias, tensors["bias"][start:stop] if axis == "out" else tensors["bias"]
    )


@pytest.mark.parametrize(
    ("blocks", "part", "words"),
    [
        (Blocks("Q4_0"), LayerSlice("in", 16, 64, 128), "a cut between blocks of 32 weights"),
        (Blocks("Q4_0", rows=ROPE), LayerSlice("out", 4, 8, 16), "a cut between heads of 8 rows"),
        (
            Blocks("Q4_0", rows=TILED),
            LayerSlice("out", 0, 8, 16),
            "a format that supports tensor parallelism",
        ),
        (
            Blocks("Q4_0", columns=TILED),
            LayerSlice("in", 0, 64, 128),
            "a format that supports tensor parallelism",
        ),
    ],
)
def test_slices_elsewhere_are_refused(blocks, part, words):
    with refused(words, kind=FormatError):
        Gguf(blocks).shard(part, {"weight": info("m.weight", "U8", (16, 72))}, {})
