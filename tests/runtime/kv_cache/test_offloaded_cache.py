"""Tests that an offloaded KV cache equals transformers' own, in memory and in files."""

import contextlib
import copy
import gc
import json
import resource
import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hfq
from hfq.errors import HfqError, SetupError
from hfq.offload.reader_threads import Ticket
from hfq.runtime.kv_cache.offloaded_layer import OffloadedLayer
from tests.support import moe_models
from tests.support.models import GPTQ, load

HALF = {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}
PROMPT = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def model():
    return load(GPTQ, HALF)


@pytest.fixture(params=["memory", "files"])
def folder(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "cache"


def generate(model, cache, prompt=PROMPT, **options):
    options = {"max_new_tokens": 12, "do_sample": False} | options
    return model.generate(prompt, past_key_values=cache, **options)


def test_tokens_and_states_equal_those_of_a_dynamic_cache(model, folder):
    expected = DynamicCache(config=model.config)
    tokens = generate(model, expected)
    with hfq.OffloadedCache(model, folder) as cache:
        assert torch.equal(generate(model, cache), tokens)
        assert cache.get_seq_length() == expected.get_seq_length()
        with torch.no_grad():
            one, other = (model(tokens[:, -1:], past_key_values=each).logits for each in (cache, expected))
        assert torch.equal(one, other)
        empty = expected.layers[0].keys[:, :, :0]
        for index, layer in enumerate(expected.layers):
            keys, values = cache.update(empty, empty, index)
            assert torch.equal(keys, layer.keys)
            assert torch.equal(values, layer.values)
            assert keys.is_contiguous()


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_are_equal(model, folder, options):
    expected = generate(model, DynamicCache(config=model.config), **options)
    with hfq.OffloadedCache(model, folder) as cache:
        assert torch.equal(generate(model, cache, **options), expected)


def test_speculation_crops_the_cache(model, folder):
    prompt = torch.tensor([[5, 6, 7, 8] * 5])
    expected = generate(model, DynamicCache(config=model.config), prompt, prompt_lookup_num_tokens=3)
    with hfq.OffloadedCache(model, folder) as cache:
        assert torch.equal(generate(model, cache, prompt, prompt_lookup_num_tokens=3), expected)


def test_each_layer_is_read_once_per_step_and_the_next_one_ahead(model, folder):
    with hfq.OffloadedCache(model, folder) as cache, torch.no_grad():
        model(PROMPT, past_key_values=cache)
        for _ in range(3):
            model(PROMPT[:, :1], past_key_values=cache)
        for layer in cache.layers:
            layer.flush()
        assert [layer.reads for layer in cache.layers][1:] == [3, 3, 3]
        assert cache.layers[0].reads in (3, 4)  # the first layer of the next pass may have been read


def test_a_layer_is_read_after_the_rows_of_the_one_before_are_freed(model, tmp_path, monkeypatch):
    waiting, wrong = set(), []

    def noting(layer):
        wrong.extend(waiting)
        waiting.add(layer._index)
        bring(layer)

    def taking(layer, *args, **kwargs):
        found = update(layer, *args, **kwargs)
        waiting.discard(layer._index)
        return found

    bring, update = OffloadedLayer._bring, OffloadedLayer.update
    monkeypatch.setattr(OffloadedLayer, "_bring", noting)
    monkeypatch.setattr(OffloadedLayer, "update", taking)
    with hfq.OffloadedCache(model, tmp_path) as cache:
        generate(model, cache)
    assert wrong == []


def test_an_interrupted_pass_is_named_and_never_saved(model, folder, tmp_path, monkeypatch):
    with hfq.OffloadedCache(model, folder or tmp_path / "made") as cache, torch.no_grad():
        model(PROMPT, past_key_values=cache)
        cache.layers[0].update(*(torch.zeros(1, 4, 1, 32) for _ in range(2)))
        for action in (cache.save, lambda: model(PROMPT[:, :1], past_key_values=cache)):
            with pytest.raises(SetupError, match="did not end") as caught:
                action()
            assert caught.value.found == "17 to 18 tokens"
        cache.reset()
        assert torch.equal(generate(model, cache), generate(model, DynamicCache(config=model.config)))


def test_an_interrupt_while_a_layer_is_waited_for_leaves_its_read_to_the_next_pass(
    model, folder, monkeypatch
):
    with hfq.OffloadedCache(model, folder) as cache, torch.no_grad():
        model(PROMPT, past_key_values=cache)
        expected = model(PROMPT[:, :1], past_key_values=cache).logits
        cache.crop(-1)
        cache.layers[0].start(cache._pool)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Ticket, "wait", interrupt)
            model(PROMPT[:, :1], past_key_values=cache)
        assert torch.equal(model(PROMPT[:, :1], past_key_values=cache).logits, expected)


@contextlib.contextmanager
def disk_full(layer=None, after=0):
    """Files cannot grow beyond 4096 bytes, once a decoder layer has started more often than `after`."""

    def limit(*_):
        passes.append(0)
        if len(passes) > after:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))

    limits, passes = resource.getrlimit(resource.RLIMIT_FSIZE), []
    handle = None if layer is None else layer.register_forward_pre_hook(limit)
    try:
        if handle is None:
            limit()
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("index", [0, 2, 3])
@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_a_full_disk_forgets_the_tokens_of_the_pass_alone(model, tmp_path, index, kind):
    prompt = PROMPT.repeat(1, 3)
    with hfq.OffloadedCache(model, tmp_path / "first", kv_cache_dtype=kind) as cache, torch.no_grad():
        expected = [model(each, past_key_values=cache).logits for each in (prompt, PROMPT, PROMPT[:, :1])]
    with hfq.OffloadedCache(model, tmp_path / "second", kv_cache_dtype=kind) as cache, torch.no_grad():
        found = [model(prompt, past_key_values=cache).logits]
        with disk_full(model.model.layers[index]), pytest.raises(SetupError, match="cannot be written"):
            model(PROMPT, past_key_values=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [prompt.shape[1]] * 4
        cache.save()
    with hfq.OffloadedCache(model, tmp_path / "second", kv_cache_dtype=kind) as cache, torch.no_grad():
        found += [model(each, past_key_values=cache).logits for each in (PROMPT, PROMPT[:, :1])]
    assert all(map(torch.equal, found, expected))


def test_a_full_disk_in_generate_is_repaired_by_the_crop_of_the_page(model, tmp_path):
    expected = generate(model, DynamicCache(config=model.config))
    with hfq.OffloadedCache(model, tmp_path) as cache, torch.no_grad():
        model(PROMPT[:, :9], past_key_values=cache)
        length_before = cache.get_seq_length()
        with (
            disk_full(model.model.layers[2], after=3),
            pytest.raises(SetupError, match="cannot be written") as caught,
        ):
            generate(model, cache, max_new_tokens=40)
        assert cache.get_seq_length() > length_before
        assert "crop the cache to the tokens before the call" in caught.value.fix
        cache.crop(length_before - cache.get_seq_length())
        assert torch.equal(generate(model, cache), expected)


def test_a_full_disk_in_a_beam_search_is_named_until_a_reset(model, tmp_path):
    with hfq.OffloadedCache(model, tmp_path) as cache, torch.no_grad():
        model(PROMPT.repeat(1, 3), past_key_values=cache)
        with disk_full(), pytest.raises(SetupError, match="cannot be written"):
            cache.batch_repeat_interleave(2)
        assert not list(tmp_path.glob("*.new"))
        for action in (cache.save, lambda: model(PROMPT, past_key_values=cache)):
            with pytest.raises(SetupError, match="did not end"):
                action()
        cache.reset()
        assert torch.equal(generate(model, cache), generate(model, DynamicCache(config=model.config)))


def test_layers_that_cannot_forget_are_named_after_a_full_disk(sliding, tmp_path):
    prompt = PROMPT.repeat(1, 8)
    with hfq.OffloadedCache(sliding, tmp_path) as cache, torch.no_grad():
        cache.save(generate(sliding, cache, max_new_tokens=2))
        last = max(index for index, each in enumerate(cache.layers) if isinstance(each, OffloadedLayer))
        with (
            disk_full(sliding.model.layers[last]),
            pytest.raises(SetupError, match="cannot be written"),
        ):
            sliding(prompt, past_key_values=cache)
        with pytest.raises(SetupError, match="did not end"):
            sliding(prompt, past_key_values=cache)
    with hfq.OffloadedCache(sliding, tmp_path) as cache:  # the fix
        found = generate(sliding, cache, cache.tokens, max_new_tokens=10)
        assert torch.equal(found, generate(sliding, DynamicCache(config=sliding.config)))


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_quantized_cache_does_not_depend_on_the_steps(model, folder, kind):
    with torch.no_grad():
        with hfq.OffloadedCache(model, None, kv_cache_dtype=kind) as cache:
            model(PROMPT[:, :9], past_key_values=cache)
            expected = model(PROMPT[:, 9:10], past_key_values=cache).logits
            exact = cache.nbytes * 64 // 18  # 16 codes and 2 bytes of a scale for 16 float32 elements
        with hfq.OffloadedCache(model, folder, kv_cache_dtype=kind) as cache:
            for index in range(9):
                model(PROMPT[:, index : index + 1], past_key_values=cache)
            found = model(PROMPT[:, 9:10], past_key_values=cache).logits
        unquantized = DynamicCache(config=model.config)
        model(PROMPT[:, :9], past_key_values=unquantized)
        plain = model(PROMPT[:, 9:10], past_key_values=unquantized).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)  # products of one row and of nine
    assert not torch.equal(expected, plain)
    assert exact > 0


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """gpt-oss, whose first layer has a sliding window of four tokens."""
    scheme = next(each for each in moe_models.SCHEMES if each.id == "gpt-oss blocks")
    path = moe_models.write(scheme).save(tmp_path_factory.mktemp("sliding") / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 4}))
    return load(path)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    """A model with three layers of linear attention and one of full attention."""
    path = tmp_path_factory.mktemp("recurrent") / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    config = AutoConfig.for_model("qwen3_5_text", **sizes, **heads, **linear, linear_value_head_dim=16)
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return load(path, offload_folder=tmp_path_factory.mktemp("made"), quantize_weights="w8a16")


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_other_layers_stay_where_they_compute_and_are_saved(request, kind, folder, tmp_path):
    model = request.getfixturevalue(kind)
    expected = generate(model, DynamicCache(config=model.config), max_new_tokens=12)
    with hfq.OffloadedCache(model, folder) as cache:
        offloaded = [isinstance(layer, OffloadedLayer) for layer in cache.layers]
        assert 0 < sum(offloaded) < len(offloaded)
        assert torch.equal(generate(model, cache, max_new_tokens=12), expected)
    with hfq.OffloadedCache(model, tmp_path / "resumed") as cache:
        cache.save(generate(model, cache, max_new_tokens=5))
    with hfq.OffloadedCache(model, tmp_path / "resumed") as cache:
        assert torch.equal(generate(model, cache, cache.tokens, max_new_tokens=7), expected)


def test_it_is_refused_by_name(model):
    with pytest.raises(SetupError, match="kv_cache_dtype='fp4' is not valid"):
        hfq.OffloadedCache(model, kv_cache_dtype="fp4")
    with pytest.raises(SetupError, match="no folder"):
        hfq.OffloadedCache(model).save()
    with pytest.raises(HfqError, match="cannot be copied"):
        copy.deepcopy(hfq.OffloadedCache(model))
    with pytest.raises(SetupError, match="not loaded by hfq"):
        hfq.OffloadedCache(torch.nn.Linear(1, 1))


def test_another_batch_size_is_refused_before_anything_is_stored(model, folder):
    with hfq.OffloadedCache(model, folder) as cache, torch.no_grad():
        model(PROMPT, past_key_values=cache)
        nbytes = cache.nbytes
        with pytest.raises(SetupError, match="do not match those that its KV cache holds"):
            model(PROMPT.repeat(2, 1), past_key_values=cache)
        assert cache.nbytes == nbytes


def test_a_dropped_cache_ends_its_threads(model):
    before = set(threading.enumerate())
    cache = hfq.OffloadedCache(model)
    generate(model, cache)
    del cache
    gc.collect()
    assert not {each for each in threading.enumerate() if each.is_alive()} - before
