"""Worked examples of the KV cache; tests/loading/test_dry_run.py compares with transformers' own
tensors.
"""

import pytest

from hfq.errors import PlacementError
from hfq.placement.estimate.kv_cache import (
    KV_DTYPES,
    Activations,
    KvLayer,
    activation_nbytes,
    kv_nbytes,
    offloaded_kv_nbytes,
)


def test_sixty_layers_of_eight_heads_take_240_kib_a_token():
    layers = [KvLayer(8 * 128, 8 * 128)] * 60
    assert kv_nbytes(layers, 1, 1, "bfloat16") == 240 * 1024
    assert kv_nbytes(layers, 3, 50_000, "bfloat16") == 3 * 50_000 * 240 * 1024
    assert kv_nbytes(layers, 1, 1, "float32") == 480 * 1024


def test_a_window_keeps_one_token_less_than_it_sees():
    layer = KvLayer(4, 2, window=8)
    assert [kv_nbytes([layer], 1, context, "bfloat16") for context in (1, 7, 8, 100)] == [12, 84, 84, 84]


def test_an_indexer_caches_its_own_keys():
    assert kv_nbytes([KvLayer(4, 2, extra=3)], 2, 10, "float16") == 2 * 10 * 9 * 2


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_a_quantized_cache_is_smaller(kv_dtype):
    layers = [KvLayer(512, 512)] * 4
    assert kv_nbytes(layers, 1, 4096, "bfloat16", kv_dtype) < kv_nbytes(layers, 1, 4096, "bfloat16")
    with pytest.raises(PlacementError, match="only layers of full attention"):
        kv_nbytes([KvLayer(512, 512, window=128)], 1, 4096, "bfloat16", kv_dtype)


def test_what_is_quantized_takes_codes_scales_and_shifts():
    layer, tokens, recent = KvLayer(128, 128), 200, 127
    quantized = 2 * (tokens - recent) * 256
    assert (
        kv_nbytes([layer], 2, tokens, "bfloat16", "int4")
        == quantized // 2 + quantized // 64 * 4 + 2 * recent * 256 * 2
    )
    assert kv_nbytes([layer], 2, 100, "bfloat16", "int2") == kv_nbytes(
        [layer], 2, 100, "bfloat16"
    )  # all are recent, at most


@pytest.mark.parametrize("sizes", [(0, 1, "auto"), (1, 0, "auto"), (1, -5, "auto"), (1, 1, "fp16")])
def test_what_makes_no_sense_is_refused(sizes):
    batch, context, kv_dtype = sizes
    with pytest.raises(PlacementError):
        kv_nbytes([KvLayer(1, 1)], batch, context, "bfloat16", kv_dtype)


@pytest.mark.parametrize(
    ("count", "kv_dtype", "fix"),
    [
        (kv_nbytes, "int8", "Add --kv-cache-device disk or cpu, or pass --kv-cache-dtype auto."),
        (offloaded_kv_nbytes, "int4", "Leave out --kv-cache-device, or pass --kv-cache-dtype auto."),
    ],
)
def test_a_dtype_of_the_other_kind_of_cache_is_told_its_option(count, kv_dtype, fix):
    with pytest.raises(PlacementError, match=r"is not valid with(out)? --kv-cache-device") as caught:
        count([KvLayer(1, 1)], 1, 1, "bfloat16", kv_dtype)
    assert caught.value.fix == fix


def test_activations_grow_with_tokens_and_logits_with_sequences():
    sizes = Activations(hidden=10, widest=40, vocabulary=1000, layers=2)
    one, longer, two = (
        activation_nbytes(sizes, *shape, "bfloat16") for shape in ((1, 100), (1, 200), (2, 100))
    )
    assert longer - one == 100 * (3 * 10 + 2 * 40) * 2
    assert two == 2 * one
