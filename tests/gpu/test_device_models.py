"""Models give the same bits on a GPU in every placement, and leave its memory as it was."""

import gc
import threading

import pytest
import torch
from transformers import StaticCache

import hfq
from hfq.modules.linear import QuantizedLinear
from tests.contract.cases import CASES, REPRESENTATIVES
from tests.support import moe_models, tiny_models
from tests.support.accelerator_maps import LAYERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.gpu

PROMPT, TOKEN = torch.arange(2, 14)[None], torch.tensor([[5]])
PLACEMENTS = {
    "cpu": dict.fromkeys(LAYERS, "cpu"),
    "disk": dict.fromkeys(LAYERS, "disk"),
    "both": {LAYERS[0]: "disk", f"{LAYERS[1]}.mlp": "cpu", LAYERS[3]: "disk"},
    "all": {"": "disk", f"{LAYERS[1]}.self_attn": 0},
}
DTYPES = [torch.float32, torch.bfloat16]
EXPERTS = [
    "mixtral w1 w2 w3, gptq",
    "mixtral fused gate_up, fp8",
    "qwen3 by expert, bitsandbytes",
    "qwen2 with a shared expert, fp8 blocks",
    "gpt-oss blocks",
]


def on(device: torch.device, placement: dict | None = None) -> dict:
    """Returns a device map; number 0 means the device."""
    return {"": str(device)} | {
        name: str(device) if place == 0 else place for name, place in (placement or {}).items()
    }


def passes(model, device: torch.device) -> list[torch.Tensor]:
    """Returns the logits of a prompt and of a token, twice, so that the order of units is known."""
    found = []
    with torch.no_grad():
        for _ in range(2):
            state = model(PROMPT.to(device), use_cache=True)
            found.append(state.logits.cpu())
            found.append(
                model(TOKEN.to(device), past_key_values=state.past_key_values, use_cache=True).logits.cpu()
            )
    return found


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_offloaded_layers_give_the_bits_of_resident_ones(device, placement, dtype):
    expected = passes(load(GPTQ, on(device), dtype=dtype), device)
    assert torch.equal(expected[0], expected[2])
    model = load(GPTQ, on(device, PLACEMENTS[placement]), dtype=dtype)
    assert_equal(passes(model, device), expected)


@pytest.mark.parametrize("case", [c for c in CASES if c.id in REPRESENTATIVES], ids=lambda case: case.id)
def test_each_format_gives_the_bits_of_resident_layers(device, case, tmp_path):
    tensors = tiny_models.model_tensors(case.format)
    metadata = tiny_models.schemas(tensors, case.schema)
    path = tiny_models.write_model(tmp_path, tensors, case.config, metadata, case.kind)
    expected = passes(load(path, on(device), dtype=torch.bfloat16), device)
    offloaded = {LAYERS[0]: "cpu", LAYERS[1]: "disk"}
    assert_equal(passes(load(path, on(device, offloaded), dtype=torch.bfloat16), device), expected)


@pytest.fixture(scope="module", params=EXPERTS)
def mixture(request, tmp_path_factory):
    """A mixture of experts on disk, and the names of its modules of experts."""
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == request.param)
    path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path_factory.mktemp("moe"))
    names = [name for name, _ in load(path).named_modules() if name.endswith("experts")]
    return path, names


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("cache", [None, 0, 20_000], ids=["default", "no cache", "small cache"])
def test_experts_give_the_same_bits_from_disk_and_in_memory(device, mixture, cache, dtype):
    path, names = mixture
    expected = passes(load(path, on(device), dtype=dtype), device)
    offloaded = on(device, dict.fromkeys(names, "disk"))
    model = load(path, offloaded, dtype=dtype, expert_cache_size=cache)
    assert_equal(passes(model, device), expected)
    if device.type == "cuda":  # row 4: the cache is sized by the memory of the device
        experts = model.hf_quantizer.loading.offloader.experts
        assert sum(experts.nbytes_by_device().values()) <= torch.cuda.mem_get_info(device)[1]


def test_offloaded_tensors_are_aligned_on_the_device(device):
    """Row 2: unaligned tensors make cuBLAS and Triton choose other kernels."""
    seen = []

    def note(layer: QuantizedLinear, _: object) -> None:
        if device.type == next(iter(layer.onloaded_tensors().values())).device.type:
            seen.extend(tensor.data_ptr() % 256 for tensor in layer.onloaded_tensors().values())

    model = load(GPTQ, on(device, PLACEMENTS["both"]))
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear) and layer.onload_device is not None:
            layer.register_forward_pre_hook(note)
    passes(model, device)
    assert seen
    assert set(seen) == {0}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_memory_of_a_dropped_model_is_not_written_later(device, placement):
    """Row 3: copies of the next pass may be under way when a model is dropped."""
    for _ in range(5):
        model = load(GPTQ, on(device, PLACEMENTS[placement]))
        with torch.no_grad():
            model(PROMPT.to(device))
        del model
        gc.collect()
        filled = [torch.full((1 << 18,), 7, dtype=torch.uint8, device=device) for _ in range(16)]
        torch.accelerator.synchronize()
        assert all(bool((each == 7).all()) for each in filled)


def test_two_threads_with_a_stream_each_share_a_model(device):
    """Row 11: buffers of threads belong to a stream."""
    expected = passes(load(GPTQ, on(device)), device)
    model, equal = load(GPTQ, on(device, PLACEMENTS["both"])), []

    def run() -> None:
        with torch.Stream(device):
            for _ in range(10):
                with torch.no_grad():
                    equal.append(torch.equal(model(PROMPT.to(device)).logits.cpu(), expected[0]))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 20


def test_tokens_are_those_of_a_resident_model(device):
    found = []
    for placement in (None, PLACEMENTS["both"]):
        model = load(GPTQ, on(device, placement), dtype=torch.bfloat16)
        found.append(model.generate(PROMPT.to(device), max_new_tokens=12, do_sample=False).cpu())
    assert torch.equal(*found)


def test_a_loss_trains_through_offloaded_layers(device):
    grads = []
    for placement in (None, PLACEMENTS["disk"]):
        model = load(GPTQ, on(device, placement))
        embedded = model.get_input_embeddings()(PROMPT.to(device)).float().detach().requires_grad_()
        model(inputs_embeds=embedded).logits.square().mean().backward()
        grads.append(embedded.grad.cpu())
    assert grads[0].abs().sum() > 0
    assert torch.equal(*grads)


def static_decode(model, device: torch.device):
    """Returns a function of one decoded token with a static cache, and its static inputs."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    token, position = TOKEN.to(device).clone(), torch.tensor([12], device=device)

    def decode() -> torch.Tensor:
        return model(
            token, past_key_values=cache, cache_position=position, position_ids=position[None], use_cache=True
        ).logits

    with torch.no_grad():
        model(PROMPT.to(device), past_key_values=cache, use_cache=True)
    return decode, token


def recorded(decode) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Returns a CUDA graph of a function, and the tensor that each replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            decode()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        logits = decode()
    return graph, logits


@pytest.mark.parametrize("path", [GPTQ, "mixture"], ids=["dense", "experts"])
def test_a_cuda_graph_of_a_resident_model_replays_its_bits(cuda, path, tmp_path):
    if path == "mixture":
        scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == EXPERTS[0])
        path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path)
    model = load(path, on(cuda), dtype=torch.bfloat16)
    decode, token = static_decode(model, cuda)
    graph, logits = recorded(decode)
    for value in (5, 9, 60):
        token.fill_(value)
        graph.replay()
        found = logits.clone()
        with torch.no_grad():
            assert torch.equal(found, decode())


def test_an_offloaded_layer_is_not_recorded(cuda):
    decode, _ = static_decode(load(GPTQ, on(cuda, PLACEMENTS["both"])), cuda)
    with pytest.raises(hfq.SetupError, match="CUDA graph"):
        recorded(decode)
