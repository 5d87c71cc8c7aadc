"""Tests of five classes of models in every mix of accelerators, CPU, and disk, in every order of streams."""

import contextlib

import pytest
import torch

from tests.contract.cases import CASES
from tests.support import moe_models, tiny_models
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator

MIXTURES = {"Mixtral, gptq": "mixtral w1 w2 w3, gptq", "gpt-oss, mxfp4": "gpt-oss blocks"}
ORDERS = {
    "eager": {},
    "lazy default": {"default": "lazy"},
    "lazy others": {"others": "lazy"},
    "lazy": {"default": "lazy", "others": "lazy"},
    "slow": {"default": 100, "others": 1000},
}
FEWER_ORDERS = ("1", "1+cpu", "1+disk", "2")
"""Maps with parts of others, which run in the order "lazy" alone."""
TOKENS = torch.arange(2, 10)[None]


def write_nf4(folder):
    case = next(case for case in CASES if case.id == "bitsandbytes-nf4")
    tensors = tiny_models.model_tensors(case.format)
    return tiny_models.write_model(folder, tensors, case.config)


def write_mixture(name: str, folder):
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == MIXTURES[name])
    return moe_models.write(scheme, moe_models.is_quantized(scheme)).save(folder)


@pytest.fixture(scope="module", params=["tied gptq", "fp8 blocks", "nf4", *MIXTURES])
def written(sim, request, tmp_path_factory):
    """A checkpoint, its logits and tokens on one accelerator, and its layers and experts."""
    if request.param in MIXTURES:
        path = write_mixture(request.param, tmp_path_factory.mktemp("mixture"))
    elif request.param == "nf4":
        path = write_nf4(tmp_path_factory.mktemp("nf4"))
    else:
        path = GPTQ if request.param == "tied gptq" else tiny_models.DATA / "tiny-llama-fp8"
    model = load(path, {"": "sim:0"})
    names = [name for name, _ in model.named_modules()]
    layers = [name for name in names if name.rpartition(".")[0] == "model.layers"]
    experts = [name for name in names if name.endswith("experts")]
    return path, compute(model, TOKENS.to("sim:0")), layers, experts


def compute(model, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits, and tokens that follow."""
    with torch.no_grad():
        generated = model.generate(tokens, max_new_tokens=4, do_sample=False)
        return model(tokens).logits.cpu(), generated.cpu()


def last(layers, device: str) -> dict[str, str]:
    """Returns the map of the last layer and of what follows it."""
    return {layers[-1]: device, "model.norm": device, "lm_head": device}


def maps(layers, experts) -> dict[str, dict[str, str]]:
    """Returns the mixes; a part on the CPU or on disk belongs to a layer of each accelerator."""
    first, final = layers[0], layers[-1]
    parts = {f"{first}.self_attn": "cpu", f"{final}.self_attn": "disk"}
    found = {
        "1": {"": "sim:0"},
        "1+cpu": {"": "sim:0", **dict.fromkeys(layers, "cpu")},
        "1+disk": {"": "sim:0", **dict.fromkeys(layers, "disk")},
        "1+cpu+disk": {"": "sim:0", first: "disk", final: "cpu"},
        "2": {"": "sim:0", **last(layers, "sim:1")},
        "2+cpu+disk": {"": "sim:0", **last(layers, "sim:1"), **parts},
        "3+cpu+disk": {"": "sim:1", "model.embed_tokens": "sim:0", **last(layers, "sim:2"), **parts},
    }
    if experts:
        places = {name: ("disk", "cpu")[at % 2] for at, name in enumerate(experts)}
        found["2, experts on cpu and disk"] = {"": "sim:0", **last(layers, "sim:1"), **places}
    return found


PLACEMENTS = [
    pytest.param(name, marks=pytest.mark.slow if name in ("1", "1+cpu", "1+disk", "2") else ())
    for name in maps(["0", "1"], ["experts"])
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_logits_and_tokens_are_equal_in_every_order_of_streams(sim, written, placement):
    path, expected, layers, experts = written
    found = maps(layers, experts)
    if placement not in found:
        pytest.skip("the model has no experts")
    if path == GPTQ:  # a tied head computes where its table does
        found[placement].pop("lm_head", None)
    before, wrong = tiny_models.digests(path), []
    with sim.streams(default="lazy", others="lazy"):
        model = load(path, found[placement])
    orders = {"lazy": ORDERS["lazy"]} if placement in FEWER_ORDERS else ORDERS
    for order, delays in orders.items():
        for place in ("default", "user's"):
            with sim.streams(**delays):
                tokens = TOKENS.to("sim:0")
                with torch.Stream("sim:0") if place == "user's" else contextlib.nullcontext():
                    logits, generated = compute(model, tokens)
            if not (torch.equal(logits, expected[0]) and torch.equal(generated, expected[1])):
                wrong.append((order, place))
    assert wrong == []
    assert tiny_models.digests(path) == before
