"""Tests of models with the C++ kernel: equal results in every placement, near the reference."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig, SetupError
from hfq.modules.experts import QuantizedExperts
from hfq.modules.linear import QuantizedLinear
from tests.contract.cases import CASES
from tests.support import moe_models, tiny_models
from tests.support.models import load, logits
from tests.support.zero_models import write_dialect

PATHS = {name: tiny_models.DATA / f"tiny-llama-{name}" for name in ("gptq", "fp8")}
TOKENS = torch.tensor([[1, 5, 9, 60, 33, 2, 7], [1, 90, 4, 4, 17, 80, 3]])
PLACEMENTS = {
    "arena": (None, {"cpu_memory": "private"}),
    "half": ({"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}, {}),
    "disk": ({"": "disk"}, {"disk_io": "direct"}),
}
# the reference rounds the weight to the activations' dtype, and the outputs of one layer are the activations
# of the next
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-5}


@pytest.fixture(params=PATHS)
def path(request, native):
    return PATHS[request.param]


def kernels(model) -> set[str]:
    return {module.kernel.name for module in model.modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_every_placement_gives_the_same_logits_close_to_the_references(path, dtype):
    resident, reference = load(path, dtype=dtype), load(path, dtype=dtype, kernel="reference")
    assert (kernels(resident), kernels(reference)) == ({"cpp"}, {"reference"})
    expected = {tokens: logits(resident, tokens) for tokens in (TOKENS, TOKENS[:1, :1])}
    for tokens, found in expected.items():
        exact = logits(reference, tokens)
        assert (found.double() - exact.double()).norm() <= CLOSE[dtype] * exact.double().norm()
    for device_map, options in PLACEMENTS.values():
        model = load(path, device_map, dtype=dtype, **options)
        for tokens, found in expected.items():
            assert torch.equal(logits(model, tokens), found)


def test_gradients_reach_the_inputs_alike_from_memory_and_from_disk(path):
    gradients = []
    for device_map in (None, {"": "disk"}):
        model = load(path, device_map)
        embedded = torch.randn(
            1, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()
        model(inputs_embeds=embedded).logits.square().sum().backward()
        gradients.append(embedded.grad)
    assert torch.isfinite(gradients[0]).all()
    assert torch.equal(*gradients)


def test_a_compiled_kernel_that_is_not_there_is_refused_by_name():
    with pytest.raises(SetupError, match="HFQ_DISABLE_CPP=1"):
        load(PATHS["gptq"], kernel="cpp")


def test_a_named_kernel_that_cannot_read_a_layer_is_named(native, tmp_path, caplog):
    case = next(case for case in CASES if "hqq" in case.id)
    load = AutoModelForCausalLM.from_pretrained
    load(write_dialect(tmp_path / "hqq", case), quantization_config=HfqConfig(kernel="cpp"))
    assert "cannot multiply 14 quantized layers. torch does this instead" in caplog.text
    caplog.clear()
    load(PATHS["gptq"], quantization_config=HfqConfig(kernel="cpp"))
    assert "cannot multiply" not in caplog.text


FAST = ("mixtral w1 w2 w3, gptq", "nemotron by expert, fp8", "gpt-oss blocks")


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(scheme, id=scheme.id, marks=() if scheme.id in FAST else pytest.mark.slow)
        for scheme in moe_models.SCHEMES
    ],
)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_routed_experts_give_the_same_logits_wherever_they_are_stored(native, tmp_path, dtype, scheme):
    path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path)
    resident = load(path, dtype=dtype)
    assert scheme.id not in FAST or "cpp" in kernels(resident)
    expected = [logits(resident, tokens) for tokens in (TOKENS % 64, TOKENS[:1, :1])]
    experts = [name for name, each in resident.named_modules() if isinstance(each, QuantizedExperts)]
    maps = {
        "experts on disk": {"": "cpu", **dict.fromkeys(experts, "disk")},
        "some on disk": {"": "cpu", f"{experts[0]}.1": "disk", f"{experts[-1]}.2": "disk"},
        "all on disk": {"": "disk"},
    }
    for device_map in maps.values():
        for size in (0, None):
            model = load(path, device_map, dtype=dtype, expert_cache_size=size)
            found = [logits(model, tokens) for tokens in (TOKENS % 64, TOKENS[:1, :1])]
            assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
