"""Tests of predicted speed where routed experts are read."""

from dataclasses import replace

import pytest

import hfq
from hfq.errors import SetupError
from hfq.offload.experts.decoding_counts import DecodingCounts
from hfq.placement.estimate.profile import PUBLISHED
from hfq.runtime.predicted_speed import expert_hits, predict_step
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
    even = expert_hits(loading).share
    assert even == 2 * CHOSEN / (EXPERTS * LAYERS)  # the least: those of two layers
    for rate in (even, 0.0, 0.75, 1.0):
        if rate != even:
            offloader.experts.decoding = DecodingCounts(LAYERS, LAYERS, 4, int(rate * 4))
        found = predict_step(loading, PUBLISHED)
        read = int(nbytes * (1 - rate) * CHOSEN / EXPERTS) / PUBLISHED.disk
        assert found.terms["disk"] == pytest.approx(read)
        assert found.step_seconds == pytest.approx(resident.step_seconds + read)


def test_the_hits_of_a_prediction_are_those_of_decoded_tokens(path):
    loading = load_experts(path, "1B")
    experts = loading.offloader.experts
    even = expert_hits(loading)
    assert (even.share, "even" in even.source) == (experts.share, True)
    logits(loading.model, IDS)
    assert expert_hits(loading) == even  # a prompt tells little
    for count in range(1, 4):
        logits(loading.model, IDS[:1, :1])
        hits = expert_hits(loading)
        assert hits.source == f"measured over {count} tokens"
        assert experts.decoding.lookups == count * LAYERS * CHOSEN
    assert hits.share == experts.decoding.kept / experts.decoding.lookups
    assert hits.source in str(hfq.report(loading.model))


def test_an_expert_that_a_guess_read_is_no_hit_of_a_token(path):
    loading = load_experts(path, "120kB")
    experts = loading.offloader.experts
    loading.offloader.source.mode = "direct"
    for token in IDS.flatten():
        logits(loading.model, token.reshape(1, 1))
    assert experts.guesses.used > 0
    assert experts.decoding.kept == experts.hits - experts.guesses.used


def test_recorded_routing_gives_the_hits_of_tokens_that_are_decoded(path):
    loading = load_experts(path, "150kB")
    experts = loading.offloader.experts
    assert 2 * CHOSEN / EXPERTS / LAYERS < experts.share < 1
    tokens = IDS.flatten()[None]
    with hfq.record_routing(loading.model) as routing:
        logits(loading.model, tokens)
    predicted = expert_hits(loading, routing)
    assert f"{tokens.numel()} tokens" in predicted.source
    assert predicted.share == routing.hit_rate(experts.share) != experts.share
    assert expert_hits(load(path).hf_quantizer.loading, routing) is None
    step = predict_step(loading, PUBLISHED, routing=routing)
    whole = predict_step(loading, PUBLISHED).terms["disk"] / (1 - experts.share)
    assert step.terms["disk"] == pytest.approx(whole * (1 - predicted.share), rel=1e-3)
    with pytest.raises(SetupError, match="another model"):
        hfq.report(loading.model, routing=replace(routing, modules=["a", "b"]))
    with pytest.raises(SetupError, match="no token"):
        hfq.report(loading.model, routing=replace(routing, calls=[]))
