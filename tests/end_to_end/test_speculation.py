"""Tests that drafted tokens cost fewer passes and bytes of offloaded models, and change no token."""

import pytest
import torch

import hfq
from hfq.loading.dry_run import open_model
from hfq.placement.estimate.estimate import Workload, estimate_placement
from hfq.placement.estimate.hardware import Hardware
from hfq.placement.estimate.profile import PUBLISHED
from hfq.placement.estimate.speculation import speculation_costs
from tests.support import models, mtp_models
from tests.support.models import GPTQ

LAYERS_ON_DISK = {"": "cpu", "model.layers": "disk"}
PROMPT = torch.tensor([[5, 6, 7, 8] * 5])
DRAFTED = 4


@pytest.fixture(scope="module")
def assistant():
    """The main model itself in memory, so that every draft is accepted."""
    model = models.load(GPTQ)
    model.generation_config.update(
        num_assistant_tokens=DRAFTED,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return model


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return mtp_models.write(tmp_path_factory.mktemp("mixture"), "glm4_moe", agrees=True)[0]


def counted(model, tokens, prompt=PROMPT, **options):
    """Returns (new tokens, passes, bytes read of units and experts, lookups of experts)."""
    found = []
    models.finish_reads(model)
    for _ in range(2):
        report = hfq.report(model).offload
        found.append((report.passes, report.nbytes_read, report.expert_hits + report.expert_misses))
        if len(found) == 1:
            made = model.generate(
                prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=None, **options
            )
            models.finish_reads(model)
    return made[0, prompt.shape[1] :].tolist(), *(
        after - before for before, after in zip(*found, strict=True)
    )


def test_accepted_drafts_divide_passes_and_bytes(assistant):
    model = models.load(GPTQ, LAYERS_ON_DISK)
    counted(model, 2)
    tokens, passes, nbytes, _ = counted(model, 25)
    assert passes == 25
    assert counted(model, 25, assistant_model=assistant)[:3] == (tokens, 5, nbytes // 5)


def test_prompt_lookup_reads_each_layer_once_per_pass():
    model = models.load(GPTQ, LAYERS_ON_DISK)
    counted(model, 2)
    tokens, passes, nbytes, _ = counted(model, 24)
    found, fewer, fewer_nbytes, _ = counted(model, 24, prompt_lookup_num_tokens=DRAFTED)
    assert found == tokens
    assert fewer < passes == 24
    assert fewer_nbytes * passes == nbytes * fewer


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": DRAFTED}, {"use_mtp": True}])
def test_a_pass_reads_the_experts_of_all_its_tokens_once(mixture, options):
    model = models.load(mixture, {"": "cpu", "model.layers.1.mlp.experts": "disk"}, expert_cache_size=0)
    prompt = torch.tensor([[1, 5, 9, 60, 33]])
    tokens, passes, _, lookups = counted(model, 24, prompt)
    with hfq.record_routing(model) as routing:
        found, fewer, _, fewer_lookups = counted(model, 24, prompt, **options)
    assert found == tokens
    assert 0 < fewer <= passes // 2 + 1
    requests = routing.requests()
    assert len(requests) == fewer
    assert all(len(set(wanted)) == len(wanted) for wanted in requests)
    assert sum(map(len, requests)) == fewer_lookups < lookups


def test_a_plan_predicts_passes_and_bytes(assistant):
    planned = open_model(GPTQ, "float32")
    hardware = Hardware(cpu=1_300_000)
    estimate = estimate_placement(planned.sizes, hardware, Workload(1, 64), PUBLISHED)
    (costs,) = speculation_costs(estimate, planned.sizes, PUBLISHED, DRAFTED, [1.0])
    model = models.load(GPTQ, planned.device_map(estimate.budget))
    counted(model, 2)
    greedy = counted(model, 25)[2]
    _, passes, nbytes, _ = counted(model, 25, assistant_model=assistant)
    assert passes == 25 * costs.passes_per_token == 5
    # the offload buffer may keep a unit from pass to pass, so a plan counts at least the bytes that are read
    assert nbytes <= 25 * costs.per_token_nbytes
    assert nbytes / greedy == pytest.approx(costs.per_token_nbytes / estimate.work.streamed, rel=0.05)
