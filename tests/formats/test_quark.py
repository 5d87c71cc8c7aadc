"""Tests of Quark's 4-bit integers against loops over nibbles, in both orders and both signs."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.quark import QuarkInt4
from tests.support.tiny_models import described

ORDERS = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": range(8)}


def config(
    kind: str, order: str = "reorder", qscheme: str = "per_group", group_size: int | None = 16
) -> dict:
    weight = {"dtype": kind, "qscheme": qscheme, "group_size": group_size}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight},
        "export": {"pack_method": order},
    }


def random_words(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)


def random_scales(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()


def code(words: list, column: int, kind: str, order: str) -> int:
    """Returns the code of a column, from the words of a row."""
    nibble = words[column // 8] >> 4 * list(ORDERS[order]).index(column % 8) & 15
    return nibble - 16 if kind == "int4" and nibble > 7 else nibble


def by_hand(tensors, kind: str, order: str) -> torch.Tensor:
    words, zeros = tensors["weight"].tolist(), tensors["weight_zero_point"].tolist()
    scale = tensors["weight_scale"].float().numpy()
    is_grouped = scale.ndim == 2
    out_features = scale.shape[-1]
    in_features = len(words) if is_grouped else 8 * len(words[0])
    weight = np.empty((out_features, in_features), dtype=np.float32)
    for n in range(out_features):
        for k in range(in_features):
            row, column = (words[k], n) if is_grouped else (words[n], k)
            group = k * len(zeros) // in_features
            zero = code(zeros[group] if is_grouped else zeros, n, kind, order)
            factor = scale[group, n] if is_grouped else scale[n]
            weight[n, k] = np.float32(code(row, column, kind, order) - zero) * factor
    return torch.from_numpy(weight)


def check(found, tensors, expected) -> None:
    out_features, in_features = expected.shape
    specs = {spec.name: spec for spec in found.tensor_specs(in_features, out_features)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name].shape for name in tensors
    }
    resolved = found.resolve("m", tensors)
    assert torch.equal(resolved.dequantize(tensors), expected)
    for start in range(0, out_features, 8):
        for rows in {1, 3, out_features - start}:
            panel = torch.full((min(rows, out_features - start), in_features), float("nan"))
            resolved.dequantize_into(panel, tensors, start)
            assert torch.equal(panel, expected[start : start + rows]), (start, rows)


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize("order", ["reorder", "order"])
@pytest.mark.parametrize("size", [(24, 48), (8, 16)], ids=str)
def test_groups_are_those_of_the_loops(kind, order, size):
    out_features, in_features = size
    groups = in_features // 16
    tensors = {
        "weight": random_words(in_features, out_features // 8),
        "weight_scale": random_scales(groups, out_features),
        "weight_zero_point": random_words(groups, out_features // 8),
    }
    found = QuarkInt4.detect("m", described("m", tensors), config(kind, order))
    check(found, tensors, by_hand(tensors, kind, order))


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize("order", ["reorder", "order"])
def test_channels_are_those_of_the_loops(kind, order):
    tensors = {
        "weight": random_words(24, 5),
        "weight_scale": random_scales(24),
        "weight_zero_point": random_words(3),
    }
    found = QuarkInt4.detect("m", described("m", tensors), config(kind, order, "per_channel", None))
    check(found, tensors, by_hand(tensors, kind, order))


def test_zero_points_of_zero_change_no_weight():
    tensors = {
        "weight": random_words(24, 5),
        "weight_scale": random_scales(24),
        "weight_zero_point": torch.zeros(3, dtype=torch.int32),
    }
    found = QuarkInt4.detect("m", described("m", tensors), config("int4", qscheme="per_channel"))
    check(found, tensors, by_hand(tensors, "int4", "reorder"))
    assert not found.resolve("m", tensors).has_zeros


def test_the_scale_of_the_layer_multiplies_after_those_of_rows():
    tensors = {
        "weight": random_words(24, 5),
        "weight_scale": random_scales(24),
        "weight_zero_point": random_words(3),
    }
    expected = by_hand(tensors, "int4", "reorder") * 0.3
    tensors |= {
        "weight_scale_2": tensors["weight_scale"],
        "weight_zero_point_2": tensors.pop("weight_zero_point"),
        "weight_scale": torch.tensor(0.3),
    }
    levels = [{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int4", "qscheme": "per_channel"}]
    two = config("int4") | {"global_quant_config": {"weight": levels}}
    check(QuarkInt4.detect("m", described("m", tensors), two), tensors, expected)


def grouped() -> dict:
    return {
        "weight": random_words(48, 3),
        "weight_scale": random_scales(3, 24),
        "weight_zero_point": random_words(3, 3),
    }


def test_a_group_size_that_contradicts_the_scales_is_refused():
    with pytest.raises(
        FormatError, match=r"(?s)contradicts the tensors of m. Nothing was loaded.*groups of 32"
    ):
        QuarkInt4.detect("m", described("m", grouped()), config("uint4", group_size=32))


@pytest.mark.parametrize("kind", ["fp4", "int8", "None"])
def test_words_of_another_type_are_refused(kind):
    with pytest.raises(
        FormatError, match=r"(?s)contradicts the tensors of m. Nothing was loaded.*int4 or uint4"
    ):
        QuarkInt4.detect("m", described("m", grouped()), config(kind))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2"])
def test_a_scale_that_is_not_finite_is_refused_by_name(name):
    found = QuarkInt4(is_signed=True, is_two_level=True)
    tensors = found.quantize(torch.randn(16, 32))
    tensors[name].view(-1)[-1] = float("inf")
    with pytest.raises(FormatError, match=rf"(?s)not finite. Nothing was loaded.*m.{name}\b"):
        found.resolve("m", tensors)


@pytest.mark.parametrize(
    ("found", "size"), [(QuarkInt4(group_size=32), (12, 64)), (QuarkInt4(group_size=32), (16, 48))], ids=str
)
def test_a_size_that_words_or_groups_do_not_divide_is_refused(found, size):
    with pytest.raises(FormatError, match=r"cannot hold a layer of this"):
        found.tensor_specs(size[1], size[0])
