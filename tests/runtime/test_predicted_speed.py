"""Tests of predicted speed where routed experts are read."""

from dataclasses import replace

import pytest

from hfq.placement.estimate.profile import PUBLISHED
from hfq.runtime.predicted_speed import predict_step
from tests.support import moe_models
from tests.support.models import load
from tests.support.moe_models import CHOSEN, EXPERTS, IDS, LAYERS, is_quantized, logits


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    scheme = moe_models.BY_EXPERT
    return moe_models.write(scheme, is_quantized(scheme)).save(tmp_path_factory.mktemp("moe"))


def load_experts(path, cache: str):
    """Returns the load of a model with all experts on disk, read past the page cache as far as possible."""
    layers = {f"model.layers.{layer}.mlp.experts": "disk" for layer in range(LAYERS)}
    return load(path, {"": "cpu", **layers}, expert_cache_size=cache, disk_io="direct").hf_quantizer.loading


def test_a_step_waits_for_the_routed_experts_that_the_cache_misses(path):
    loading = load_experts(path, "1B")
    resident = predict_step(load(path).hf_quantizer.loading, PUBLISHED)
    offloader = loading.offloader
    offloader.source.mode = "direct"
    nbytes = sum(info.nbytes for expert in offloader.experts.experts for info in expert.infos)
    assert offloader.experts.hit_rate == CHOSEN / (EXPERTS * LAYERS)  # of the places that a token needs
    for rate in (offloader.experts.hit_rate, 0.0, 0.75, 1.0):
        if rate != offloader.experts.hit_rate:
            offloader.experts.hits, offloader.experts.misses = int(rate * 4), int(4 - rate * 4)
        found = predict_step(loading, PUBLISHED)
        read = int(nbytes * (1 - rate) * CHOSEN / EXPERTS) / PUBLISHED.disk
        assert found.terms["disk"] == pytest.approx(read)
        assert found.step_seconds == pytest.approx(resident.step_seconds + read)


def test_guessed_experts_are_hits_that_were_read(path):
    loading = load_experts(path, "1B")
    experts = loading.offloader.experts
    loading.offloader.source.mode = "direct"
    experts.hits, experts.misses, experts.guesses.used = 5, 1, 3  # two hits that were kept, of six
    nbytes = sum(info.nbytes for expert in experts.experts for info in expert.infos)
    read = int(nbytes * 4 / 6 * CHOSEN / EXPERTS)
    assert predict_step(loading, PUBLISHED).terms["disk"] * PUBLISHED.disk == pytest.approx(read, abs=1)


def test_the_hit_rate_of_a_prediction_is_the_measured_one(path):
    loading = load_experts(path, "1MB")
    assert loading.offloader.experts.hit_rate == 1
    logits(loading.model, IDS)
    assert loading.offloader.experts.hit_rate < 1
    faster = replace(PUBLISHED, disk=PUBLISHED.disk * 2)
    assert predict_step(loading, faster).terms["disk"] <= predict_step(loading, PUBLISHED).terms["disk"]
    before = loading.offloader.experts.hit_rate
    logits(loading.model, IDS)
    assert loading.offloader.experts.hit_rate > before
