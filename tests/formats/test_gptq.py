"""Tests of GPTQ layers against loops over one Python integer per packed column."""

import itertools

import numpy as np
import pytest
import torch

from hfq.formats.gptq import Gptq

K, N = 96, 64
BITS = (2, 3, 4, 8)
READINGS = ("stored", "word_plus_one", "field_plus_one", "masked_plus_one")


def fields(words, num_bits: int, count: int) -> list[int]:
    bits = sum((int(word) & 0xFFFFFFFF) << (32 * position) for position, word in enumerate(words))
    return [(bits >> (i * num_bits)) & ((1 << num_bits) - 1) for i in range(count)]


def words_of(codes, num_bits: int) -> list[int]:
    bits = sum(int(code) << (i * num_bits) for i, code in enumerate(codes))
    unsigned = [(bits >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(codes) * num_bits // 32))]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in unsigned]


def ones(num_bits: int) -> int:
    return sum(1 << position for position in range(0, 32, num_bits))


def real_zeros(words, num_bits: int, count: int, reading: str) -> list[int]:
    """Returns the zero points of one group as each writer's own reader computes them."""
    if reading == "word_plus_one":
        words = [(int(word) + ones(num_bits)) % (1 << 32) for word in words]
    stored = fields(words, num_bits, count)
    return {
        "stored": stored,
        "word_plus_one": stored,
        "field_plus_one": [zero + 1 for zero in stored],
        "masked_plus_one": [(zero + 1) % (1 << num_bits) for zero in stored],
    }[reading]


def dequantize_by_hand(tensors, num_bits: int, groups: list[int], reading: str) -> torch.Tensor:
    """Computes W[n, k] = scales[g, n] * (q[k, n] - z[g, n]), with one float32 product each."""
    qweight, qzeros = tensors["qweight"].numpy(), tensors["qzeros"].numpy()
    scales = tensors["scales"].float().numpy()
    count, columns = len(groups), qweight.shape[1]
    zeros = [real_zeros(row, num_bits, columns, reading) for row in qzeros]
    weight = np.empty((columns, count), dtype=np.float32)
    for n in range(columns):
        codes = fields(qweight[:, n], num_bits, count)
        for k, g in enumerate(groups):
            weight[n, k] = np.float32(codes[k] - zeros[g][n]) * scales[g, n]
    return torch.from_numpy(weight)


def groups_of(group_size: int, in_features: int = K) -> list[int]:
    span = in_features if group_size == -1 else group_size
    return [k // span for k in range(in_features)]


def random_layer(num_bits: int, group_size: int, seed: int = 0, in_features: int = K, columns: int = N):
    """Returns a layer of random words; every bit pattern is valid."""
    generator = torch.Generator().manual_seed(seed)
    groups = max(groups_of(group_size, in_features)) + 1

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).to(torch.int32)

    return {
        "qweight": words(in_features * num_bits // 32, columns),
        "qzeros": words(groups, columns * num_bits // 32),
        "scales": (torch.randn(groups, columns, generator=generator) * 0.01).half(),
    }


@pytest.mark.parametrize(
    "group_size", [-1, 32, 64, 200]
)  # group size 64 fills half of the last group of the 96 channels, and 200 is larger than the input
@pytest.mark.parametrize(("num_bits", "reading"), list(itertools.product(BITS, READINGS[:1] + READINGS[2:])))
def test_the_weight_is_that_of_the_loops(num_bits, group_size, reading):
    tensors = random_layer(num_bits, group_size)
    weight_format = Gptq(num_bits=num_bits, group_size=group_size, symmetric=False, zero_reading=reading)
    expected = dequantize_by_hand(tensors, num_bits, groups_of(group_size), reading)
    assert torch.equal(weight_format.resolve("m", tensors).dequantize(tensors), expected)


@pytest.mark.parametrize("group_size", [-1, 32, 64])
@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_adding_on_the_word_wraps_around_like_gptqmodel(num_bits, group_size):
    tensors = random_layer(num_bits, group_size, seed=3)
    tensors["qzeros"][0, 0] = -1
    weight_format = Gptq(
        num_bits=num_bits, group_size=group_size, symmetric=False, zero_reading="word_plus_one"
    )
    expected = dequantize_by_hand(tensors, num_bits, groups_of(group_size), "word_plus_one")
    assert torch.equal(weight_format.dequantize(tensors), expected)


def twins(num_bits: int, group_size: int = 32):
    """Returns one layer twice, with all zero points from 0 on.

    The first is stored as v2. The second is gptqmodel's conversion of it to v1.
    """
    v2 = random_layer(num_bits, group_size, seed=5)
    groups = v2["scales"].shape[0]
    zeros = torch.randint(0, 1 << num_bits, (groups, N), generator=torch.Generator().manual_seed(6))
    zeros[:, ::3] = 0
    v2["qzeros"] = torch.tensor([words_of(row, num_bits) for row in zeros.tolist()], dtype=torch.int32)
    v1 = dict(v2)
    if num_bits == 3:
        stored = [words_of([(zero - 1) % 8 for zero in row], 3) for row in zeros.tolist()]
        v1["qzeros"] = torch.tensor(stored, dtype=torch.int32)
    else:
        wrapped = (v2["qzeros"].to(torch.int64) - ones(num_bits)) % (1 << 32)
        v1["qzeros"] = torch.where(wrapped >= 1 << 31, wrapped - (1 << 32), wrapped).to(torch.int32)
    return v1, v2


@pytest.mark.parametrize("num_bits", BITS)
def test_the_v1_twin_of_a_v2_layer_with_zero_points_of_zero_is_equal(num_bits, describe_tensors):
    v1, v2 = twins(num_bits)
    config = {"bits": num_bits, "group_size": 32, "sym": False}
    read_v1 = Gptq.detect(
        "m", describe_tensors("m", v1), config | {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    )
    read_v2 = Gptq.detect("m", describe_tensors("m", v2), config | {"checkpoint_format": "gptq_v2"})
    assert not torch.equal(v1["qzeros"], v2["qzeros"])
    assert torch.equal(read_v1.resolve("m", v1).dequantize(v1), read_v2.resolve("m", v2).dequantize(v2))


@pytest.mark.parametrize("num_bits", BITS)
def test_the_writers_differ_where_a_zero_point_is_zero(num_bits):
    v1, v2 = twins(num_bits)
    gptqmodel = "masked_plus_one" if num_bits == 3 else "word_plus_one"
    weights = {
        reading: Gptq(num_bits=num_bits, group_size=32, symmetric=False, zero_reading=reading).dequantize(v1)
        for reading in (gptqmodel, "field_plus_one")
    }
    assert torch.equal(
        weights["field_plus_one"], dequantize_by_hand(v1, num_bits, groups_of(32), "field_plus_one")
    )
    assert not torch.equal(*weights.values())
    assert torch.equal(weights[gptqmodel], dequantize_by_hand(v2, num_bits, groups_of(32), "stored"))


def test_autogptq_reads_a_stored_minus_one_as_two_to_the_bits():
    tensors = random_layer(4, -1)
    tensors["qweight"].zero_()
    tensors["qzeros"].fill_(-1)
    tensors["scales"].fill_(1)
    weights = {
        reading: Gptq(4, -1, False, reading).dequantize(tensors).unique().tolist() for reading in READINGS
    }
    # -1 on a word borrows from its lowest field alone: this field becomes 0, all others 1
    assert weights == {
        "stored": [-15],
        "field_plus_one": [-16],
        "masked_plus_one": [0],
        "word_plus_one": [-1, 0],
    }


@pytest.mark.parametrize("num_bits", BITS)
def test_a_shuffled_g_idx_gives_each_channel_its_own_group(num_bits):
    tensors = random_layer(num_bits, 32)
    shuffled = torch.randperm(K, generator=torch.Generator().manual_seed(2)) // 32
    tensors["g_idx"] = shuffled.to(torch.int32)
    weight_format = Gptq(num_bits, 32, False, "stored", g_idx_length=K).resolve("m", tensors)
    assert weight_format.act_order
    assert "act-order" in weight_format.describe()
    assert torch.equal(
        weight_format.dequantize(tensors), dequantize_by_hand(tensors, num_bits, shuffled.tolist(), "stored")
    )


@pytest.mark.parametrize("g_idx", [None, [], [0]])
def test_a_g_idx_that_is_absent_or_a_stub_is_trivial(g_idx, describe_tensors):
    tensors = random_layer(4, 32)
    if g_idx is not None:
        tensors["g_idx"] = torch.tensor(g_idx, dtype=torch.int32)
    detected = Gptq.detect(
        "m", describe_tensors("m", tensors), {"sym": False, "group_size": 32, "checkpoint_format": "gptq_v2"}
    )
    resolved = detected.resolve("m", tensors)
    spec = next(spec for spec in resolved.tensor_specs(K, N) if spec.name == "g_idx")
    assert spec.optional
    assert spec.shape == (K if g_idx is None else len(g_idx),)
    assert not resolved.act_order
    assert torch.equal(resolved.dequantize(tensors), dequantize_by_hand(tensors, 4, groups_of(32), "stored"))


@pytest.mark.parametrize("group_size", [-1, 32, 64])
def test_a_whole_g_idx_in_order_is_no_act_order(group_size):
    tensors = random_layer(4, group_size) | {"g_idx": torch.tensor(groups_of(group_size), dtype=torch.int32)}
    resolved = Gptq(4, group_size, False, "stored", g_idx_length=K).resolve("m", tensors)
    assert not resolved.act_order
    assert torch.equal(
        resolved.dequantize(tensors), dequantize_by_hand(tensors, 4, groups_of(group_size), "stored")
    )


@pytest.mark.parametrize(
    ("num_bits", "reading"), [*((4, reading) for reading in READINGS), (3, "stored"), (8, "stored")]
)
@pytest.mark.parametrize("act_order", [False, True])
def test_panels_are_rows_of_the_whole_weight(num_bits, reading, act_order):
    columns = 128
    tensors = random_layer(num_bits, 64, columns=columns)
    order = torch.arange(K).flip(0) if act_order else torch.arange(K)
    tensors["g_idx"] = (order // 64).to(torch.int32)
    weight_format = Gptq(num_bits, 64, False, reading, g_idx_length=K).resolve("m", tensors)
    assert weight_format.act_order is act_order
    whole = weight_format.dequantize(tensors)
    assert whole.shape == (columns, K)
    for start, rows in ((0, 32), (32, 64), (64, 64), (96, 17), (64, 1)):
        panel = torch.full((rows, K), torch.nan)
        weight_format.dequantize_into(panel, tensors, start)
        assert torch.equal(panel, whole[start : start + rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_is_rounded_once_to_the_dtype_asked_for(dtype):
    tensors = random_layer(4, 32)
    weight_format = Gptq(4, 32, False, "stored")
    assert torch.equal(weight_format.dequantize(tensors, dtype), weight_format.dequantize(tensors).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_every_float_dtype_are_read_as_they_are(dtype):
    tensors = random_layer(4, 32)
    tensors["scales"] = tensors["scales"].to(dtype)
    expected = dequantize_by_hand(tensors, 4, groups_of(32), "stored")
    assert torch.equal(Gptq(4, 32, False, "stored").dequantize(tensors), expected)
