"""Tests of `hfq.timeline`, from the recording to the file that `hfq plot` reads."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hfq
from hfq.errors import SetupError
from hfq.plots.documents import read_section
from tests.support import tiny_models

TOKENS = torch.tensor([[1, 2, 3]])
HALF = {"": "cpu", "model.layers.1": "disk", "model.layers.3": "disk"}


@pytest.fixture(scope="module")
def load():
    return lambda device_map: AutoModelForCausalLM.from_pretrained(
        tiny_models.DATA / "tiny-llama-gptq",
        quantization_config=hfq.HfqConfig(kernel="reference"),
        device_map=device_map,
    )


@pytest.fixture(scope="module")
def half(load):
    return load(HALF)


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_recording_has_every_part_of_the_model_and_leaves_no_trace(half):
    with torch.no_grad():
        expected, before = half(TOKENS).logits, hooks(half)
        with hfq.timeline(half) as timeline:
            found = half(TOKENS).logits
            assert timeline.spans == []
        assert torch.equal(found, expected)
    assert hooks(half) == before
    names = {
        track: [span.name for span in timeline.spans if span.track == track]
        for track in ("pass", "other", "compute")
    }
    assert names["pass"] == [""]
    assert names["compute"] == timeline.units == ["model.layers.1", "model.layers.3"]
    assert names["other"] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.2",
        "model.norm",
        "lm_head",
    ]
    whole = next(span for span in timeline.spans if span.track == "pass")
    assert all(
        whole.start <= span.start <= span.end <= whole.end
        for span in timeline.spans
        if span.track in ("other", "compute")
    )


def test_a_measured_report_is_saved_and_read_again(half, tmp_path):
    assert hfq.report(half).timeline is None
    found = hfq.report(half, measure=True)
    found.save(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved == json.loads(json.dumps(found.to_dict()))
    assert [span["name"] for span in saved["timeline"]["spans"] if span["track"] == "pass"] == [""]
    assert sum(module["nbytes"] for module in saved["modules"]) == sum(
        device["nbytes"] for device in saved["devices"]
    )
    assert [module["module"] for module in saved["modules"]][:2] == [
        "model.embed_tokens",
        "model.layers.0.self_attn.q_proj",
    ]
    assert [picture.name for picture in read_section(tmp_path / "run.json").pictures] == [
        "placement",
        "timeline",
    ]


def test_a_recording_of_ones_own_is_kept(half):
    with hfq.timeline(half) as timeline, torch.no_grad():
        half.generate(TOKENS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert hfq.report(half, timeline=timeline).timeline is timeline
    assert sum(span.track == "pass" for span in timeline.spans) == 2


def test_a_model_in_memory_is_recorded_too(load):
    timeline = hfq.report(load({"": "cpu"}), measure=True).timeline
    assert timeline.units == []
    assert {span.track for span in timeline.spans} == {"pass", "other"}


def test_a_recording_is_saved_as_a_trace(half, tmp_path):
    with hfq.timeline(half) as timeline, torch.no_grad():
        half(TOKENS)
    timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kinds = sorted(event["cat"] for event in events if event["ph"] == "X")
    assert kinds == sorted(span.track for span in timeline.spans)
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"pass", "wait", "compute"} <= tracks


def test_layer_major_is_recorded(half):
    with hfq.timeline(half) as timeline, torch.no_grad():
        hfq.run_batches(half, [TOKENS, TOKENS], lambda batch: half(batch).logits)
    assert [span.name for span in timeline.spans if span.track == "compute"] == timeline.units


def test_a_model_of_another_loader_is_refused():
    with pytest.raises(SetupError, match="not loaded by hfq"), hfq.timeline(nn.Linear(2, 2)):
        pass


def test_a_second_recording_is_refused(half):
    with hfq.timeline(half), pytest.raises(SetupError, match="already active"), hfq.timeline(half):
        pass
