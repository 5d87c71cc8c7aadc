"""Tests of QMoE's dictionary: its digest, its entries, and rows against loops."""

import functools
import hashlib
from collections import Counter

import pytest
import torch

from hfq.errors import SetupError
from hfq.formats.codecs import pair_dictionary
from hfq.formats.codecs.pair_dictionary import ENTRIES, decode_rows, encode_rows, entry_words

DIGEST = "c09862c453fe122634070a475357ff81a679aff65829d84a56f806c02a54ed45"
LENGTHS = [9, 65, 233, 577, 1161, 2049, 3305, 4993, 7177, 9921, 13289, 17345, 3843, 1569]


def entries() -> list[tuple[int, ...]]:
    """Returns the pairs of each entry, read from the words bit by bit."""
    found = []
    for first, second in entry_words().tolist():
        length = first & 15
        symbols = [word >> shift & 3 for word in (first, second) for shift in range(4, 32, 2)]
        pairs = tuple(a + 3 * b for a, b in zip(symbols[::2], symbols[1::2], strict=True))
        assert second & 15 == length
        assert not any(pairs[length:])
        found.append(pairs[:length])
    return found


@functools.cache
def codes_by_entry() -> dict[tuple, int]:
    return {entry: code for code, entry in enumerate(entries())}


def test_the_words_have_the_digest_of_the_source():
    assert hashlib.sha256(entry_words().astype("<u4").tobytes()).hexdigest() == DIGEST


def test_another_dictionary_is_refused(monkeypatch):
    monkeypatch.setattr(pair_dictionary, "ZERO_PROBABILITY", 0.88)
    with pytest.raises(SetupError, match=r"(?s)dictionary of QMoE is another one.*expected.*Fix:"):
        pair_dictionary._entries.__wrapped__()


def test_every_beginning_of_an_entry_is_an_entry():
    found = entries()
    counts = Counter(map(len, found))
    assert [counts[length] for length in range(1, 15)] == LENGTHS
    assert {entry[:-1] for entry in found} <= {(), *found}
    single = {entry[0]: code for code, entry in enumerate(found) if len(entry) == 1}
    assert [single[pair] for pair in range(9)] == [0, 12, 13, 14, 326, 327, 15, 328, 329]


@pytest.mark.parametrize("columns", [1, 2, 27, 28, 29, 75])
@pytest.mark.parametrize("zeros", [0.0, 0.885, 1.0])
def test_rows_are_encoded_as_by_loops_and_decoded_again(columns, zeros):
    generator = torch.Generator().manual_seed(columns)
    symbols = torch.randint(1, 3, (6, columns), generator=generator)
    symbols *= torch.rand(6, columns, generator=generator) >= zeros
    codes, offsets = encode_rows(symbols)
    assert (codes.dtype, offsets.dtype) == (torch.int16, torch.int32)
    code_of = codes_by_entry()
    expected, ends = list[int](), [0]
    for row in symbols.tolist():
        row = row + [0] * (columns % 2)
        pairs = tuple(a + 3 * b for a, b in zip(row[::2], row[1::2], strict=True))
        while pairs:
            length = max(size for size in range(1, 15) if pairs[:size] in code_of and size <= len(pairs))
            expected.append(code_of[pairs[:length]])
            pairs = pairs[length:]
        ends.append(len(expected))
    assert [code % ENTRIES for code in codes.tolist()] == expected
    assert offsets.tolist() == ends
    assert torch.equal(decode_rows(codes, offsets.long(), columns), symbols.to(torch.uint8))
    for start in range(6):
        part = codes[offsets[start] : offsets[-1]]
        found = decode_rows(part, offsets[start:].long() - offsets[start], columns)
        assert torch.equal(found, symbols[start:].to(torch.uint8))


def test_codes_of_another_width_are_no_rows():
    codes, offsets = encode_rows(torch.zeros(3, 64, dtype=torch.int64))
    assert decode_rows(codes, offsets.long(), 64) is not None
    assert decode_rows(codes, offsets.long(), 66) is None
    assert decode_rows(codes, offsets.long(), 62) is None
    changed = codes.clone()
    changed[-1] = -1  # the last entry, of more pairs than the row has left
    assert decode_rows(changed, offsets.long(), 64) is None
