"""Tests of recorded routing: what is recorded, files, and misuse."""

import json

import pytest
import torch

import hfq
from hfq.errors import CheckpointError, SetupError
from hfq.runtime.record_routing import Routing
from tests.support import moe_models, tiny_models
from tests.support.models import load
from tests.support.moe_models import CHOSEN, EXPERTS, IDS, LAYERS, SCHEMES, is_quantized, logits


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    scheme = moe_models.BY_EXPERT
    return moe_models.write(scheme, is_quantized(scheme)).save(tmp_path_factory.mktemp("moe"))


def routed(model, ids) -> list[list[list[int]]]:
    """Returns the experts of each layer and token, as transformers' routers choose them."""
    with torch.no_grad():
        outputs = model(ids, output_router_logits=True).router_logits
    return [logits.topk(CHOSEN, -1).indices.tolist() for logits in outputs]


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_every_call_is_recorded_with_the_experts_of_each_token(path, placement):
    model = load(path, moe_models.PLACEMENTS[placement])
    expected = routed(model, IDS)
    with hfq.record_routing(model) as routing:
        logits(model, IDS)
    assert routing.calls == list(enumerate(expected))
    assert routing.modules == [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]
    assert routing.experts == [EXPERTS] * LAYERS
    infos = [info for layer in model.model.layers[0].mlp.experts[0].values() for info in layer.infos.values()]
    assert routing.nbytes == [sum(info.nbytes for info in infos)] * LAYERS
    assert routing.requests()[0] == [(0, each) for each in sorted({e for row in expected[0] for e in row})]
    logits(model, IDS)
    assert len(routing.calls) == LAYERS  # the recording has ended


def test_experts_of_llama_4_are_those_that_get_a_token(tmp_path):
    scheme = next(each for each in SCHEMES if each.model == "llama4")
    model = load(moe_models.write(scheme, is_quantized(scheme)).save(tmp_path))
    with hfq.record_routing(model) as routing:
        logits(model, IDS[:1, :1])
    assert [sum(map(len, rows)) for _, rows in routing.calls] == [CHOSEN] * LAYERS


def test_a_file_gives_back_the_recording(path, tmp_path):
    model = load(path)
    with hfq.record_routing(model) as routing:
        logits(model, IDS)
    routing.save(tmp_path / "routing.json")
    assert Routing.load(tmp_path / "routing.json") == routing


VALID = {"kind": "hfq routing", "modules": ["a"], "experts": [4], "nbytes": [9], "calls": [[0, [[1, 2]]]]}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "x"},
        {"calls": [[1, [[1]]]]},
        {"calls": [[0, [[4]]]]},
        {"calls": [[0, [[-1]]]]},
        {"calls": [0]},
        {"calls": None},
        {"experts": None},
        {"experts": None, "calls": []},
        {"experts": [4, 4]},
        {"experts": [4.5]},
        {"nbytes": ["9"]},
        {"modules": [3]},
        {"modules": ["a", "a"], "experts": [4, 4], "nbytes": [9, 9]},
        {"calls": [[0, [[float("inf")]]]]},
        {"calls": [[0, [[1.7]]]]},
    ],
    ids=str,
)
def test_a_file_that_is_no_recording_is_an_error_with_its_name(tmp_path, change):
    file = tmp_path / "routing.json"
    file.write_text(json.dumps(VALID))
    assert Routing.load(file).requests() == [[(0, 1), (0, 2)]]
    file.write_text(json.dumps(VALID | change))
    with pytest.raises(CheckpointError, match=r"routing\.json"):
        Routing.load(file)


def test_a_missing_file_and_one_of_other_text_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match="no recording"):
        Routing.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("[1, 2")
    with pytest.raises(CheckpointError, match="no recording"):
        Routing.load(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match="no recording"):
        Routing.load(tmp_path / "list.json")
    (tmp_path / "deep.json").write_text("[" * 99_999 + "]" * 99_999)
    with pytest.raises(CheckpointError, match="no recording"):
        Routing.load(tmp_path / "deep.json")


def test_tokens_of_prompts_are_requests_in_the_order_of_decoding():
    calls = [(0, [[0, 1], [2, 3]]), (1, [[3, 2], [1]]), (0, [[1, 0]]), (1, [[0, 1]])]
    routing = Routing(["a", "b"], [4, 4], [9, 9], calls)
    found = [(wanted[0][0], [expert for _, expert in wanted]) for wanted in routing.requests_by_token()]
    assert found == [(0, [0, 1]), (1, [3, 2]), (0, [2, 3]), (1, [1]), (0, [1, 0]), (1, [0, 1])]
    assert str(routing) == "the routing of 3 tokens"
    assert routing.hit_rate(1.0) == 1
    assert 0 < routing.hit_rate(0.5) < 1


def test_misuse_is_an_error_and_a_failed_forward_ends_the_recording(path):
    with (
        pytest.raises(SetupError, match="no quantized experts"),
        hfq.record_routing(load(tiny_models.DATA / "tiny-llama-gptq")),
    ):
        pass
    model = load(path)
    with pytest.raises(ZeroDivisionError), hfq.record_routing(model):
        with pytest.raises(SetupError, match="already"), hfq.record_routing(model):
            pass
        raise ZeroDivisionError
    with hfq.record_routing(model) as routing:
        logits(model, IDS)
    assert len(routing.calls) == LAYERS
