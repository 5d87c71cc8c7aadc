"""Tests that an offloaded KV cache of models on accelerators equals transformers' own, in every order of streams."""

import errno
import os

import pytest
import torch
from transformers import DynamicCache

import hfq
from hfq.errors import SetupError
from tests.support.accelerator_maps import MIXED, ORDERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator

MAPS = {"1": {"": "sim:0"}, **MIXED}
PROMPT = torch.arange(3, 20)[None]


def generate(model, cache, prompt=PROMPT, count=8):
    options = {"max_new_tokens": count, "do_sample": False, "past_key_values": cache}
    return model.generate(prompt.to("sim:0"), **options).cpu()


@pytest.fixture(scope="module")
def expected(sim):
    model = load(GPTQ, MAPS["1"])
    return {count: generate(model, DynamicCache(config=model.config), count=count) for count in (8, 13)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MAPS)
def test_tokens_are_equal_and_resume(sim, expected, placement, order, tmp_path):
    with sim.streams(**ORDERS[order]):
        model = load(GPTQ, MAPS[placement])
        assert torch.equal(generate(model, hfq.OffloadedCache(model)), expected[8])
        with hfq.OffloadedCache(model, tmp_path) as cache:
            cache.save(generate(model, cache))
        with hfq.OffloadedCache(model, tmp_path) as cache:
            assert torch.equal(generate(model, cache, cache.tokens, 5), expected[13])


@pytest.mark.parametrize("order", ORDERS)
def test_a_full_disk_forgets_the_pass_alone(sim, order, tmp_path, monkeypatch):
    """Rows of a pass are written during the next one, by a reader thread."""

    def write(file, *args):
        if os.readlink(f"/proc/self/fd/{file}").endswith("layer_00002.kv"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, *args)

    pwrite = os.pwrite
    with sim.streams(**ORDERS[order]), torch.no_grad():
        model = load(GPTQ, MAPS["1"])
        parts = [each.to("sim:0") for each in (PROMPT, PROMPT[:, :1], PROMPT[:, :5])]
        reference = DynamicCache(config=model.config)
        expected = [model(each, past_key_values=reference).logits.cpu() for each in parts]
        with hfq.OffloadedCache(model, tmp_path) as cache:
            found = [model(parts[0], past_key_values=cache).logits.cpu()]
            with monkeypatch.context() as patch, pytest.raises(SetupError, match="cannot be written"):
                patch.setattr(os, "pwrite", write)
                model(parts[1], past_key_values=cache)
            assert [layer.get_seq_length() for layer in cache.layers] == [17] * 4
            found += [model(each, past_key_values=cache).logits.cpu() for each in parts[1:]]
            cache.crop(-3)  # of five rows that are not written
            cache.save()
            assert {layer.rows.count for layer in cache.layers} == {20}
        assert all(map(torch.equal, found, expected))
        with hfq.OffloadedCache(model, tmp_path) as cache:
            reference.crop(-3)
            pair = [model(parts[1], past_key_values=each).logits.cpu() for each in (cache, reference)]
        assert torch.equal(*pair)


def test_the_device_holds_two_layers_of_a_long_conversation(sim):
    """The peak of a decoding step, against that of a step without a conversation."""
    model, peaks = load(GPTQ, MAPS["1"]), []
    with torch.no_grad():
        for tokens in (8, 1200):
            cache = hfq.OffloadedCache(model)
            model(torch.arange(tokens)[None].to("sim:0"), past_key_values=cache)
            for layer in cache.layers:
                layer.flush()
            torch.accelerator.synchronize()
            before = sim.memory_allocated(0)
            torch.accelerator.reset_peak_memory_stats(0)
            model(torch.tensor([[1]]).to("sim:0"), past_key_values=cache)
            torch.accelerator.synchronize()
            peaks.append(torch.accelerator.max_memory_allocated(0) - before)
            cache.close()
    layer = 2 * 1200 * 4 * 32 * 4
    assert layer < peaks[1] - peaks[0] < 2.5 * layer  # a part of a layer for the scores of attention
