"""Codes and scales of blocks: their product is what ggml dequantizes, bit for bit."""

import pytest
import torch

from hfq.checkpoint.gguf.block_types import block_type
from hfq.formats.codecs.ggml.blocks import decode_into
from hfq.formats.codecs.ggml.signed_codes import (
    SIGNED_TYPES,
    WRITTEN_TYPES,
    pack_blocks,
    unpack_codes,
    unpack_scales,
)
from tests.support.gguf_files import random_blocks


@pytest.mark.parametrize("name", SIGNED_TYPES)
def test_a_value_is_its_code_times_its_scale(name):
    kind, found = block_type(name), SIGNED_TYPES[name]
    rows = torch.from_numpy(random_blocks(name, 192)).view(8, -1)
    expected = torch.empty(8, 24 * kind.size)
    decode_into(expected, rows, name, kind.nbytes)
    codes, scales = unpack_codes(rows, name), unpack_scales(rows, name)
    half = 1 << (found.num_bits - 1)
    assert (int(codes.min()), int(codes.max())) == (-half, half - 1)
    assert scales.dtype == found.scale_dtype
    values = codes.float().unflatten(1, (-1, found.group_size)) * scales.float()[:, :, None]
    assert torch.equal(values.flatten(1).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", WRITTEN_TYPES.values())
def test_packed_blocks_are_those_that_were_unpacked(name):
    rows = torch.from_numpy(random_blocks(name, 64)).view(4, -1)
    assert torch.equal(pack_blocks(unpack_codes(rows, name), unpack_scales(rows, name), name), rows)
