"""Tests of the records of cached tokens."""

import pytest
import torch

from hfq.runtime.kv_cache import kv_codec
from hfq.runtime.kv_cache.kv_codec import KvCodec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(dtype, batch=2, heads=3, tokens=5, sizes=(8, 4)):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(batch, heads, tokens, size, generator=generator).to(dtype) for size in sizes)


def decoded(kind, keys, values):
    codec = KvCodec.of(kind, keys, values)
    records = codec.encode(keys, values)
    assert records.shape == (keys.shape[2], keys.shape[0], codec.record_nbytes)
    found = torch.empty_like(keys), torch.empty_like(values)
    codec.decode_into(records, *found)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_records_of_the_model_s_dtype_are_exact(dtype):
    keys, values = make(dtype)
    found = decoded("auto", keys.transpose(1, 2).contiguous().transpose(1, 2), values)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "steps"), [("fp8", 16), ("int8", 254)])
def test_quantized_records_round_to_the_scale_of_head_and_token(kind, steps, dtype):
    for given, found in zip(make(dtype), decoded(kind, *make(dtype)), strict=True):
        most = given.float().abs().amax(-1, keepdim=True)
        error = (given.float() - found.float()).abs()
        rounding = 1 / steps + torch.finfo(dtype).eps / 2  # half a step, and the rounding to the dtype
        assert (error <= most * rounding * 1.01).all()
        assert not torch.equal(given, found)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_zeros_stay_zeros_and_nan_stays_nan(kind):
    keys, values = make(torch.float32)
    keys[0, 0, 0], values[1, 2, 3, 0] = 0.0, torch.nan
    found = decoded(kind, keys, values)
    assert not found[0][0, 0, 0].any()
    assert found[1][1, 2, 3].isnan().all()
    assert found[1].isnan().sum() == 4


@pytest.mark.parametrize(("kind", "nbytes"), [("auto", 72), ("fp8", 64), ("int8", 64)])
def test_bytes_of_a_record(kind, nbytes):
    keys, values = make(torch.bfloat16)
    codec = KvCodec.of(kind, keys, values)  # 36 elements, and scales of 3 heads: 36 + 24, rounded up to 8
    assert codec.record_nbytes == nbytes
    assert codec.row_nbytes == 2 * nbytes
    assert codec.of_batch(5).row_nbytes == 5 * nbytes


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_blocks_change_no_bit(kind, tokens, monkeypatch):
    keys, values = make(torch.bfloat16, tokens=10)
    records = KvCodec.of(kind, keys, values).encode(keys, values)
    expected = decoded(kind, keys, values)
    monkeypatch.setattr(kv_codec, "_BLOCK_NBYTES", tokens * 2 * 3 * 8 * 4)
    assert torch.equal(KvCodec.of(kind, keys, values).encode(keys, values), records)
    assert all(map(torch.equal, decoded(kind, keys, values), expected))
