"""Tests of words without straddling codes, and of bit planes, against Python integers."""

import pytest
import torch

from hfq.formats.codecs.bit_packing import pack_planes, pack_words, unpack_planes, unpack_words

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
COLUMNS = 3


def random_words(count: int, seed: int = 0) -> torch.Tensor:
    """Returns random words, including the extremes."""
    words = torch.randint(
        -(2**31), 2**31, (count, COLUMNS), dtype=torch.int64, generator=torch.Generator().manual_seed(seed)
    )
    words[0, :2] = torch.tensor([-(2**31), 2**31 - 1])
    words[-1, 2] = -1
    return words.to(torch.int32)


def bits_of(word: int) -> list[int]:
    """Returns the 32 bits of a word, the lowest first."""
    return [(word & 0xFFFFFFFF) >> position & 1 for position in range(32)]


def number(bits: list[int]) -> int:
    return sum(bit << position for position, bit in enumerate(bits))


def words_by_hand(column: list[int], num_bits: int, count: int) -> list[int]:
    """Packs `32 // num_bits` codes per word, from the low end; the other bits are unused."""
    share = 32 // num_bits
    codes = [
        number(bits_of(word)[i * num_bits : (i + 1) * num_bits]) for word in column for i in range(share)
    ]
    return codes[:count]


def planes_by_hand(column: list[int], num_bits: int, count: int) -> list[int]:
    """Packs 32 codes into `num_bits` words, plane by plane.

    The words of the low plane are first, as one stream of its width. Those of the next plane follow.
    """
    codes = []
    for block in range(0, len(column), num_bits):
        first, low = block, 0
        block_codes = [0] * 32
        for width in PLANES[num_bits]:
            stream = [bit for word in column[first : first + width] for bit in bits_of(word)]
            for i in range(32):
                block_codes[i] |= number(stream[i * width : (i + 1) * width]) << low
            first, low = first + width, low + width
        codes += block_codes
    return codes[:count]


def by_columns(words: torch.Tensor, by_hand, num_bits: int, count: int) -> torch.Tensor:
    columns = [by_hand(column, num_bits, count) for column in words.t().tolist()]
    return torch.tensor(columns, dtype=torch.int32).t()


@pytest.mark.parametrize("num_bits", range(1, 9))
def test_codes_of_words_are_those_of_the_bits(num_bits):
    words, share = random_words(5), 32 // num_bits
    for count in (1, share - 1, share, share + 1, 5 * share - 1, 5 * share):
        found = unpack_words(words, num_bits, count)
        assert found.dtype == torch.int32
        assert torch.equal(found, by_columns(words, words_by_hand, num_bits, count))


@pytest.mark.parametrize("num_bits", sorted(PLANES))
def test_codes_of_planes_are_those_of_the_bits(num_bits):
    words = random_words(3 * num_bits)
    for count in (1, 31, 32, 33, 63, 95, 96):
        found = unpack_planes(words, num_bits, count)
        assert found.dtype == torch.int32
        assert torch.equal(found, by_columns(words, planes_by_hand, num_bits, count))


@pytest.mark.parametrize("num_bits", sorted(PLANES))
def test_packing_planes_is_the_inverse(num_bits):
    words = random_words(2 * num_bits, seed=1)
    assert torch.equal(pack_planes(unpack_planes(words, num_bits, 64), num_bits), words)


@pytest.mark.parametrize("num_bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 3, 31, 32, 33, 37])
def test_packing_words_is_the_inverse_and_leaves_the_rest_zero(num_bits, count):
    codes = torch.randint(0, 1 << num_bits, (count, COLUMNS), generator=torch.Generator().manual_seed(2)).to(
        torch.int32
    )
    words = pack_words(codes, num_bits)
    share = 32 // num_bits
    assert words.shape == (-(-count // share), COLUMNS)
    assert torch.equal(by_columns(words, words_by_hand, num_bits, count), codes)
    for column in words.t().tolist():
        stream = [bit for word in column for bit in bits_of(word)[: share * num_bits]]
        assert not any(stream[count * num_bits :])
        assert not any(bit for word in column for bit in bits_of(word)[share * num_bits :])


@pytest.mark.parametrize("unpack", [unpack_words, unpack_planes])
def test_words_that_are_not_contiguous_are_read_in_their_order(unpack):
    words = random_words(8).t().contiguous().t()
    assert not words.is_contiguous()
    assert torch.equal(unpack(words, 4, 61), unpack(words.contiguous(), 4, 61))


def test_a_plane_of_a_power_of_two_is_a_plain_stream():
    words = random_words(8)
    for num_bits in (2, 4, 8):
        assert torch.equal(unpack_planes(words, num_bits, 32), by_columns(words, words_by_hand, num_bits, 32))
