"""Tests of bit packing against a bit stream in one Python integer per column."""

import numpy as np
import pytest
import torch

from hfq.formats.codecs.bit_packing import pack_stream, unpack_stream

BITS = range(1, 9)


def stream(column) -> int:
    """Returns the words of one column as one integer whose bit i is bit i of the stream."""
    return sum((int(word) & 0xFFFFFFFF) << (32 * position) for position, word in enumerate(column))


def unpack_by_hand(words: np.ndarray, num_bits: int, count: int) -> torch.Tensor:
    columns = [stream(words[:, column]) for column in range(words.shape[1])]
    rows = [[(bits >> (i * num_bits)) & ((1 << num_bits) - 1) for bits in columns] for i in range(count)]
    return torch.tensor(rows, dtype=torch.int32).reshape(count, words.shape[1])


def pack_by_hand(codes: np.ndarray, num_bits: int) -> torch.Tensor:
    count, columns = codes.shape
    length = -(-count * num_bits // 32)
    words = np.zeros((length, columns), dtype=np.uint32)
    for column in range(columns):
        bits = sum(int(code) << (i * num_bits) for i, code in enumerate(codes[:, column]))
        words[:, column] = [(bits >> (32 * position)) & 0xFFFFFFFF for position in range(length)]
    return torch.from_numpy(words.view(np.int32).copy())


def random_words(length: int, columns: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(-(2**31), 2**31, (length, columns), dtype=np.int64).astype(np.int32)


@pytest.mark.parametrize("num_bits", BITS)
def test_unpacking_reads_the_bit_stream(num_bits):
    words = random_words(2 * num_bits, 5, num_bits)
    assert (words < 0).any()
    codes = unpack_stream(torch.from_numpy(words), num_bits, 64)
    assert codes.dtype == torch.int32
    assert torch.equal(codes, unpack_by_hand(words, num_bits, 64))


@pytest.mark.parametrize("num_bits", BITS)
@pytest.mark.parametrize("count", [1, 2, 7, 10, 11, 21, 31, 33, 50])
def test_unpacking_takes_just_the_codes_asked_for(num_bits, count):
    words = random_words(-(-count * num_bits // 32), 3, count)
    assert torch.equal(
        unpack_stream(torch.from_numpy(words), num_bits, count), unpack_by_hand(words, num_bits, count)
    )


@pytest.mark.parametrize("num_bits", BITS)
def test_words_of_all_ones_unpack_to_the_largest_code(num_bits):
    codes = unpack_stream(torch.full((num_bits, 2), -1, dtype=torch.int32), num_bits, 32)
    assert torch.equal(codes, torch.full((32, 2), (1 << num_bits) - 1, dtype=torch.int32))


@pytest.mark.parametrize("num_bits", BITS)
@pytest.mark.parametrize("count", [1, 5, 10, 11, 22, 32, 43, 64])
def test_packing_writes_the_bit_stream(num_bits, count):
    codes = np.random.default_rng(count).integers(0, 1 << num_bits, (count, 4))
    words = pack_stream(torch.from_numpy(codes), num_bits)
    assert words.dtype == torch.int32
    assert torch.equal(words, pack_by_hand(codes, num_bits))


@pytest.mark.parametrize("num_bits", BITS)
def test_packing_takes_codes_of_any_number_type(num_bits):
    codes = torch.arange(45).reshape(15, 3) % (1 << num_bits)
    packed = [
        pack_stream(codes.to(dtype), num_bits)
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.float32)
    ]
    expected = pack_by_hand(codes.numpy(), num_bits)
    assert all(torch.equal(words, expected) for words in packed)


@pytest.mark.parametrize("num_bits", BITS)
def test_codes_survive_a_round_trip(num_bits):
    codes = torch.randint(
        0, 1 << num_bits, (77, 6), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(unpack_stream(pack_stream(codes, num_bits), num_bits, 77), codes)


@pytest.mark.parametrize("num_bits", BITS)
def test_words_survive_a_round_trip(num_bits):
    words = torch.from_numpy(random_words(3 * num_bits, 4, 9))
    assert torch.equal(pack_stream(unpack_stream(words, num_bits, 96), num_bits), words)


@pytest.mark.parametrize("num_bits", [3, 4])
def test_a_strided_view_unpacks_like_its_copy(num_bits):
    words = torch.from_numpy(random_words(num_bits, 8, 4))
    view = words.t().contiguous().t()[:, 1:7:2]
    assert not view.is_contiguous()
    assert torch.equal(unpack_stream(view, num_bits, 30), unpack_by_hand(view.numpy(), num_bits, 30))


def test_a_code_of_three_bits_straddles_two_words():
    words = torch.tensor([[0x7FFFFFFF], [0]], dtype=torch.int32)
    assert unpack_stream(words, 3, 12).flatten().tolist() == [7] * 10 + [1, 0]
    words = torch.tensor([[-(2**31)], [1]], dtype=torch.int32)
    assert unpack_stream(words, 3, 12).flatten().tolist() == [0] * 10 + [6, 0]
