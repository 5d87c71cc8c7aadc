"""Tests of compressed-tensors' integers against loops over one Python integer per row.

They also test invalid configs.
"""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.compressed_tensors import IntQuantized, PackQuantized
from tests.support.tiny_models import described

BITS = tuple(range(1, 9))


def config(**weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


def words_of(codes: list[int], num_bits: int, share: int | None = None) -> list[int]:
    """Packs codes into int32 words: one stream, or `share` codes per word."""
    if share is not None:
        return [
            word for i in range(0, len(codes), share) for word in words_of(codes[i : i + share], num_bits)
        ]
    bits = sum(code << (i * num_bits) for i, code in enumerate(codes))
    words = [bits >> (32 * i) & 0xFFFFFFFF for i in range(-(-len(codes) * num_bits // 32))]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


def random_layer(
    num_bits: int, size: tuple[int, int], groups: int, symmetric: bool = True, is_straddling: bool = True
):
    """Returns tensors as compressed-tensors packs them, and their weight.

    W[n, k] = (q - zp) * scale in float32.
    """
    out_features, in_features = size
    generator = torch.Generator().manual_seed(num_bits)
    half, span = 1 << (num_bits - 1), in_features // groups
    codes = torch.randint(-half, half, size, generator=generator)
    zeros = torch.randint(-half, half, (out_features, groups), generator=generator) * (not symmetric)
    scale = torch.randn(out_features, groups, generator=generator).bfloat16()
    share = None if is_straddling else 32 // num_bits
    tensors = {
        "weight_packed": torch.tensor(
            [words_of([code + half for code in row], num_bits, share) for row in codes.tolist()],
            dtype=torch.int32,
        ),
        "weight_scale": scale,
        "weight_shape": torch.tensor(size),
    }
    if not symmetric:
        columns = [words_of([zero + half for zero in column], num_bits) for column in zeros.t().tolist()]
        tensors["weight_zero_point"] = torch.tensor(columns, dtype=torch.int32).t().contiguous()
    return tensors, by_hand(codes, zeros, scale, [k // span for k in range(in_features)])


def by_hand(codes, zeros, scale, groups: list[int]) -> torch.Tensor:
    scale, zeros = scale.float().numpy(), zeros.tolist()
    weight = [
        [np.float32(code - zeros[n][groups[k]]) * scale[n, groups[k]] for k, code in enumerate(row)]
        for n, row in enumerate(codes.tolist())
    ]
    return torch.from_numpy(np.array(weight, dtype=np.float32))


def detected(tensors, size, hints, cls=PackQuantized):
    found = cls.detect("m", described("m", tensors), hints).sized(size[1], size[0])
    specs = {spec.name: spec for spec in found.tensor_specs(size[1], size[0])}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name].shape for name in tensors
    }
    return found.resolve("m", tensors)


def check_panels(weight_format, tensors, whole) -> None:
    for start in range(0, whole.shape[0], weight_format.row_multiple):
        for rows in (1, 5, 32, 33, whole.shape[0] - start):
            panel = torch.full((min(rows, whole.shape[0] - start), whole.shape[1]), float("nan"))
            weight_format.dequantize_into(panel, tensors, start)
            assert torch.equal(panel, whole[start : start + rows]), (start, rows)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(
    ("size", "groups"), [((37, 33), 1), ((64, 96), 3), ((5, 64), 2), ((33, 35), 5), ((1, 1), 1)], ids=str
)
@pytest.mark.parametrize("num_bits", BITS)
def test_the_weight_is_that_of_the_loops(num_bits, size, groups, symmetric):
    tensors, expected = random_layer(num_bits, size, groups, symmetric)
    found = detected(tensors, size, config(num_bits=num_bits, symmetric=symmetric))
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize("num_bits", [3, 5, 6, 7])
def test_words_of_old_writers_hold_whole_codes(num_bits):
    tensors, expected = random_layer(num_bits, (40, 64), 2, is_straddling=False)
    found = detected(tensors, (40, 64), config(num_bits=num_bits))
    assert not found.is_straddling
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize("num_bits", [3, 5, 6, 7])
def test_zero_points_of_old_writers_are_refused(num_bits):
    """The packing of their zero points could not be verified."""
    tensors, _ = random_layer(num_bits, (40, 64), 2, False, is_straddling=False)
    with pytest.raises(FormatError, match="do not fit its input"):
        detected(tensors, (40, 64), config(num_bits=num_bits, symmetric=False))


def test_the_config_tells_apart_what_the_width_does_not():
    """32 codes of 3 bits in whole words occupy 4 words, like 32 codes of 4 bits."""
    tensors, expected = random_layer(3, (8, 32), 1, is_straddling=False)
    assert tensors["weight_packed"].shape == (8, 4)
    assert torch.equal(detected(tensors, (8, 32), config(num_bits=3)).dequantize(tensors), expected)
    assert detected(tensors, (8, 32), config(num_bits=4)).num_bits == 4


def test_eight_bits_or_seven_of_an_old_writer_are_refused_without_a_config():
    tensors, _ = random_layer(8, (6, 320), 1)
    with pytest.raises(FormatError, match="do not fit its input"):
        detected(tensors, (6, 320), {})


@pytest.mark.parametrize("num_bits", [bits for bits in BITS if bits != 8])
def test_the_width_tells_the_bits_that_no_config_does(num_bits):
    tensors, expected = random_layer(num_bits, (6, 320), 1)
    found = detected(tensors, (6, 320), {})
    assert found.num_bits == num_bits
    assert torch.equal(found.dequantize(tensors), expected)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_a_stored_order_gives_each_channel_its_own_group(symmetric):
    size, num_bits = (37, 64), 4
    tensors, straight = random_layer(num_bits, size, 4, symmetric)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5)) // 16
    tensors["weight_g_idx"] = order.to(torch.int32)
    codes = torch.tensor(
        [
            [(word & 0xFFFFFFFF) >> (4 * i) & 15 for word in row for i in range(8)]
            for row in tensors["weight_packed"].tolist()
        ]
    )
    zeros = torch.zeros(37, 4, dtype=torch.int64)
    if not symmetric:
        columns = [
            [(word & 0xFFFFFFFF) >> (4 * i) & 15 for word in column for i in range(8)][:37]
            for column in tensors["weight_zero_point"].t().tolist()
        ]
        zeros = torch.tensor(columns).t() - 8
    expected = by_hand(codes - 8, zeros, tensors["weight_scale"], order.tolist())
    found = detected(tensors, size, config(num_bits=4, symmetric=symmetric, actorder="group"))
    assert torch.equal(found.dequantize(tensors), expected)
    assert not torch.equal(expected, straight)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_an_order_out_of_range_is_refused(bad):
    tensors, _ = random_layer(4, (8, 64), 4)
    tensors["weight_g_idx"] = torch.tensor([bad] + [0] * 63, dtype=torch.int32)
    with pytest.raises(FormatError, match=r"(?s)out of range. Nothing was loaded.*m.weight_g_idx"):
        detected(tensors, (8, 64), config(num_bits=4, actorder="group"))


def test_one_scale_for_the_tensor_is_applied_to_all_of_it():
    tensors, _ = random_layer(4, (8, 64), 1)
    tensors["weight_scale"] = torch.tensor([0.5])
    ones = tensors | {"weight_scale": torch.ones(8, 1)}
    found = detected(tensors, (8, 64), config(num_bits=4, strategy="tensor"))
    assert torch.equal(
        found.dequantize(tensors), detected(ones, (8, 64), config(num_bits=4)).dequantize(ones) * 0.5
    )


def test_a_stored_shape_of_another_layer_is_refused():
    tensors, _ = random_layer(4, (8, 64), 1)
    with pytest.raises(FormatError, match=r"(?s)Nothing was loaded.*m.weight_shape.*\[8, 64\].*\[64, 8\]"):
        detected(tensors | {"weight_shape": torch.tensor([64, 8])}, (8, 64), config(num_bits=4))


def test_a_width_that_contradicts_the_config_is_refused():
    tensors, _ = random_layer(4, (8, 64), 1)
    with pytest.raises(FormatError, match=r"(?s)do not fit its input.*8 bits, as config.json says.*8 words"):
        detected(tensors, (8, 64), config(num_bits=8))


@pytest.mark.parametrize("hints", [{"group_size": 16}, {"group_size": 48}])
def test_a_group_size_that_contradicts_the_scales_is_refused(hints):
    tensors, _ = random_layer(4, (8, 64), 2)
    with pytest.raises(FormatError, match=r"groups of|group_size"):
        detected(tensors, (8, 64), config(num_bits=4, **hints))


@pytest.mark.parametrize(
    "change",
    [
        {"transform_config": {"config_groups": {"R1": {}}}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"config_groups": {"group_0": 5}},
        {"config_groups": {"group_0": {"targets": "Linear"}}},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": [4]}}},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 4}}}},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 9}}}},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": "4"}}}},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"group_size": 0}}}},
        {"config_groups": {"group_0": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
    ],
    ids=str,
)
def test_a_config_that_changes_what_a_weight_means_is_refused(change):
    tensors, _ = random_layer(4, (8, 64), 2)
    with pytest.raises(FormatError, match="Nothing was loaded"):
        detected(tensors, (8, 64), config(num_bits=4) | change)


def test_a_scale_that_is_not_finite_is_refused_by_name():
    tensors, _ = random_layer(4, (8, 64), 2)
    tensors["weight_scale"][7, 1] = float("inf")
    with pytest.raises(FormatError, match=r"(?s)not finite. Nothing was loaded.*m.weight_scale"):
        detected(tensors, (8, 64), config(num_bits=4))


def test_a_scale_without_any_groups_is_refused():
    tensors, _ = random_layer(4, (8, 64), 1)
    tensors["weight_scale"] = tensors["weight_scale"][:, :0]
    with pytest.raises((FormatError, AssertionError)):
        detected(tensors, (8, 64), config(num_bits=4))


def test_a_scale_of_one_dimension_can_be_described():
    tensors, _ = random_layer(4, (8, 64), 1)
    tensors["weight_scale"] = tensors["weight_scale"].flatten()
    assert "pack-quantized" in PackQuantized.detect("m", described("m", tensors), {}).describe()


def random_bytes(size: tuple[int, int], scale_shape: tuple[int, ...], symmetric: bool = True):
    generator = torch.Generator().manual_seed(0)
    tensors = {"weight": torch.randint(-128, 128, size, generator=generator).to(torch.int8)}
    tensors["weight_scale"] = torch.randn(scale_shape, generator=generator).bfloat16()
    if not symmetric:
        tensors["weight_zero_point"] = torch.randint(-128, 128, scale_shape, generator=generator).to(
            torch.int8
        )
    return tensors


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("groups", [1, 3])
def test_bytes_are_scaled_as_they_are(groups, symmetric):
    tensors = random_bytes((7, 33), (7, groups), symmetric)
    zeros = tensors.get("weight_zero_point", torch.zeros(7, groups, dtype=torch.int64)).to(torch.int64)
    expected = by_hand(
        tensors["weight"].to(torch.int64),
        zeros,
        tensors["weight_scale"],
        [k // (33 // groups) for k in range(33)],
    )
    found = detected(tensors, (7, 33), config(num_bits=8, symmetric=symmetric), IntQuantized)
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_bytes_of_a_tensor_share_one_scale(shape):
    tensors = random_bytes((7, 33), shape)
    found = detected(tensors, (7, 33), config(num_bits=8, strategy="tensor"), IntQuantized)
    assert torch.equal(found.dequantize(tensors), tensors["weight"].float() * tensors["weight_scale"].float())


def test_bytes_under_a_grid_of_ragged_blocks_have_a_scale_for_each_block():
    tensors = random_bytes((7, 33), (3, 3))
    hints = config(num_bits=8, strategy="block", block_structure=[3, 16])
    found = detected(tensors, (7, 33), hints, IntQuantized)
    scale = tensors["weight_scale"].float()
    expected = torch.tensor(
        [[float(tensors["weight"][n, k]) * scale[n // 3, k // 16] for k in range(33)] for n in range(7)]
    )
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


def test_bytes_in_groups_that_contradict_the_config_are_refused():
    tensors = random_bytes((8, 64), (8, 2))
    with pytest.raises(
        FormatError, match=r"(?s)contradicts the tensors of m. Nothing was loaded.*groups of 16"
    ):
        IntQuantized.detect("m", described("m", tensors), config(num_bits=8, group_size=16, strategy="group"))


@pytest.mark.parametrize("hints", [{"quant_method": "fp8"}, config(type="float", num_bits=8)], ids=str)
def test_bytes_under_a_config_of_floats_are_a_contradiction(hints):
    with pytest.raises(FormatError, match=r"contradicts the tensors of m. Nothing was loaded"):
        IntQuantized.detect("m", described("m", random_bytes((8, 64), (8, 1))), hints)


def test_bytes_with_scales_of_no_groups_are_refused():
    tensors = random_bytes((8, 64), (8, 0))
    found = IntQuantized.detect("m", described("m", tensors), config(num_bits=8))
    with pytest.raises(FormatError):
        found.tensor_specs(64, 8)
