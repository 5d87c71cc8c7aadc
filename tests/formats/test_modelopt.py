"""Tests of ModelOpt's integers against loops over nibbles, with and without input scales."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.modelopt.linear import ModeloptInt4, ModeloptInt8
from tests.support.tiny_models import described

AWQ = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
SQ = {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}


def random_int4(size: tuple[int, int], groups: int, has_columns: bool = False):
    generator = torch.Generator().manual_seed(groups)
    tensors = {
        "weight": torch.randint(0, 256, (size[0] // 2, size[1]), dtype=torch.uint8, generator=generator),
        "weight_scale": torch.randn(size[0], groups, generator=generator),
    }
    if has_columns:
        tensors["pre_quant_scale"] = torch.randn(size[1], generator=generator).bfloat16()
    return tensors


def int4_by_hand(tensors) -> torch.Tensor:
    """Unpacks rows 2r from low nibbles and rows 2r + 1 from high ones (two's complement)."""
    scale, pairs = tensors["weight_scale"].numpy(), tensors["weight"].tolist()
    columns = tensors["pre_quant_scale"].float().numpy() if "pre_quant_scale" in tensors else None
    weight = np.empty((2 * len(pairs), len(pairs[0])), dtype=np.float32)
    for n in range(len(weight)):
        for k, byte in enumerate(pairs[n // 2]):
            nibble = byte >> 4 if n % 2 else byte & 15
            code = nibble - 16 if nibble >= 8 else nibble
            value = np.float32(code) * scale[n, k * scale.shape[1] // len(pairs[0])]
            weight[n, k] = value if columns is None else value * columns[k]
    return torch.from_numpy(weight)


def check(found, tensors, expected) -> None:
    out_features, in_features = expected.shape
    specs = {spec.name: spec for spec in found.tensor_specs(in_features, out_features)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name].shape for name in tensors
    }
    resolved = found.resolve("m", tensors)
    assert torch.equal(resolved.dequantize(tensors), expected)
    for start in range(0, out_features, found.row_multiple):
        for rows in {1, 3, out_features - start}:
            panel = torch.full((min(rows, out_features - start), in_features), float("nan"))
            resolved.dequantize_into(panel, tensors, start)
            assert torch.equal(panel, expected[start : start + rows]), (start, rows)


@pytest.mark.parametrize("has_columns", [False, True])
@pytest.mark.parametrize(
    ("size", "groups"), [((8, 96), 3), ((2, 33), 1), ((6, 20), 20), ((10, 64), 2)], ids=str
)
def test_the_weight_is_that_of_the_loops(size, groups, has_columns):
    tensors = random_int4(size, groups, has_columns)
    found = ModeloptInt4.detect("m", described("m", tensors), AWQ)
    check(found, tensors, int4_by_hand(tensors))


def test_the_second_level_of_w4a8_is_stored_and_scales_no_weight():
    tensors = random_int4((8, 96), 3)
    expected = int4_by_hand(tensors)
    tensors |= {"weight_scale_2": torch.tensor(7.0), "input_scale": torch.tensor(0.5)}
    found = ModeloptInt4.detect("m", described("m", tensors), AWQ | {"quant_algo": "W4A8_AWQ"})
    check(found, tensors, expected)
    assert found.activation_scheme is not None


def test_every_nibble_is_twos_complement():
    tensors = {"weight": torch.arange(256, dtype=torch.uint8).view(1, 256), "weight_scale": torch.ones(2, 1)}
    found = ModeloptInt4.detect("m", described("m", tensors), AWQ).dequantize(tensors)
    signed = [*range(8), *range(-8, 0)]
    assert found[0].tolist() == [signed[byte & 15] for byte in range(256)]
    assert found[1].tolist() == [signed[byte >> 4] for byte in range(256)]


@pytest.mark.parametrize("scale", [(8, 5), (4, 3), (9, 1), (8, 0)], ids=str)
def test_scales_that_do_not_fit_the_weight_are_refused(scale):
    tensors = random_int4((8, 96), 3) | {"weight_scale": torch.ones(scale)}
    with pytest.raises(FormatError, match=r"(?s)do not fit its weight. Nothing was loaded.*m.weight_scale"):
        ModeloptInt4.detect("m", described("m", tensors), AWQ)


def test_a_group_size_that_contradicts_the_scales_is_refused():
    tensors = random_int4((8, 96), 3)
    assert ModeloptInt4.detect("m", described("m", tensors), AWQ | {"group_size": 32}).group_size == 32
    with pytest.raises(
        FormatError, match=r"(?s)contradicts the tensors of m. Nothing was loaded.*groups of 48"
    ):
        ModeloptInt4.detect("m", described("m", tensors), AWQ | {"group_size": 48})


@pytest.mark.parametrize("name", ["weight_scale", "pre_quant_scale"])
@pytest.mark.parametrize("kind", ["int4", "w8a8"])
def test_a_scale_that_is_not_finite_is_refused_by_name(kind, name):
    tensors = random_int4((8, 96), 1, has_columns=True) if kind == "int4" else random_int8(has_columns=True)
    found = (ModeloptInt4 if kind == "int4" else ModeloptInt8).detect(
        "m", described("m", tensors), AWQ if kind == "int4" else SQ
    )
    tensors[name].view(-1)[1] = float("nan")
    with pytest.raises(FormatError, match=rf"(?s)not finite. Nothing was loaded.*m.{name}"):
        found.resolve("m", tensors)


@pytest.mark.parametrize("size", [(7, 96), (8, 95)], ids=str)
def test_a_size_that_int4_cannot_hold_is_refused(size):
    with pytest.raises(FormatError, match="cannot hold a layer of this size"):
        ModeloptInt4(group_size=32).tensor_specs(size[1], size[0])


def random_int8(has_columns: bool, shape: tuple[int, ...] = (7,)):
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "weight": torch.randint(-128, 128, (7, 33), generator=generator).to(torch.int8),
        "weight_scale": torch.randn(shape, generator=generator),
        "input_scale": torch.tensor(0.5),
    }
    return tensors | (
        {"pre_quant_scale": torch.randn(33, generator=generator).bfloat16()} if has_columns else {}
    )


@pytest.mark.parametrize("shape", [(7,), (7, 1)], ids=str)
@pytest.mark.parametrize("algorithm", ["W8A8_SQ_PER_CHANNEL", "W8A16", "INT8"])
@pytest.mark.parametrize("has_columns", [False, True])
def test_int8_scales_rows_and_then_the_columns_of_what_is_smoothed(has_columns, algorithm, shape):
    tensors = random_int8(has_columns, shape)
    expected = tensors["weight"].float() * tensors["weight_scale"].reshape(7, 1)
    if has_columns:
        expected = expected * tensors["pre_quant_scale"].float()
    check(
        ModeloptInt8.detect("m", described("m", tensors), SQ | {"quant_algo": algorithm}), tensors, expected
    )


@pytest.mark.parametrize(
    ("module", "config", "is_incomplete"),
    [
        ("layers.0.q_proj", {"__smoothed__": True}, True),
        ("layers.0.q_proj", {"__smoothed__": False}, False),
        ("layers.0.mlp.shared_experts.up_proj", {"__smoothed__": True}, True),
        ("layers.0.mlp.experts.0.up_proj", {"__smoothed__": True}, False),
        ("layers.0.q_proj", {"__smoothed__": True, "quant_algo": "W8A16"}, False),
    ],
)
def test_a_layer_beside_smoothed_ones_is_incomplete_without_its_columns(module, config, is_incomplete):
    found = ModeloptInt8.detect(module, described(module, random_int8(has_columns=False)), SQ | config)
    assert (
        "pre_quant_scale" in {spec.name for spec in found.tensor_specs(33, 7) if not spec.optional}
    ) == is_incomplete


def test_activations_are_rounded_where_their_scale_is_stored():
    tensors = random_int8(has_columns=False)
    assert ModeloptInt8.detect("m", described("m", tensors), SQ).activation_scheme is not None
    del tensors["input_scale"]
    assert (
        ModeloptInt8.detect("m", described("m", tensors), SQ | {"quant_algo": "W8A16"}).activation_scheme
        is None
    )


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", "W4A16_AWQ"])
def test_bytes_under_an_algorithm_of_another_kind_are_a_contradiction(algorithm):
    infos = described("m", random_int8(has_columns=False))
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m": {"quant_algo": algorithm}}}
    for config in ({"quant_algo": algorithm}, mixed):
        with pytest.raises(
            FormatError, match=rf"(?s)contradicts the tensors of m. Nothing was loaded.*{algorithm}"
        ):
            ModeloptInt8.detect("m", infos, SQ | config)


@pytest.mark.parametrize(
    "layers", [{"m": {"quant_algo": "W8A16"}}, {"other": {"quant_algo": "FP8"}}, {"m": 5}, 5, None], ids=str
)
def test_mixed_precision_names_the_algorithm_of_each_layer(layers):
    config = SQ | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert ModeloptInt8.detect("m", described("m", random_int8(has_columns=False)), config) is not None
