"""Tests of the tiny trained Llama in all placements.

They cover generation, gradients, threads, forks, and the reads of a load.
"""

import copy
import os
import threading
from collections import Counter
from fractions import Fraction

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfq import HfqConfig, PlacementError, pretrained_config
from hfq.modules.linear import QuantizedLinear
from hfq.offload.byte_source import CHUNK_NBYTES
from tests.support import moe_models, programs, tiny_models
from tests.support.models import GPTQ, load

PATHS = {name: tiny_models.DATA / f"tiny-llama-{name}" for name in ("gptq", "fp8")}
HALF = {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}


@pytest.fixture(params=PATHS)
def path(request):
    return PATHS[request.param]


def prompt(path):
    return AutoTokenizer.from_pretrained(path)("Return the list of names", return_tensors="pt")


def forward(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def test_generation_is_the_same_in_every_placement(path):
    inputs = prompt(path)
    texts = [
        load(path, device_map).generate(**inputs, max_new_tokens=12, do_sample=False).tolist()
        for device_map in (None, HALF, {"": "disk"}, "cpu")
    ]
    assert all(text == texts[0] for text in texts)
    assert len(texts[0][0]) == inputs["input_ids"].shape[1] + 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_activation_dtype_is_bit_equal_across_placements(path, dtype):
    inputs = prompt(path)
    expected = forward(load(path, dtype=dtype), inputs)
    assert expected.dtype == dtype
    assert torch.isfinite(expected).all()
    for device_map in (HALF, {"": "disk"}):
        assert torch.equal(forward(load(path, device_map, dtype=dtype), inputs), expected)


def test_no_weight_is_ever_a_float_parameter(path):
    model = load(path)
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(linears) == 28
    assert not any(isinstance(module, torch.nn.Linear) for module in model.model.modules())
    assert not any(parameter.requires_grad for linear in linears for parameter in linear.parameters())
    stored = sum(info.nbytes for linear in linears for info in linear.infos.values())
    assert sum(p.nbytes for linear in linears for p in linear.parameters()) == stored


def test_loading_to_disk_reads_no_codes_and_writes_nothing(path, tmp_path):
    model = load(path, {"": "disk"})
    reader = model.hf_quantizer.loading.reader
    codes = {"qweight", "weight"}
    small = sum(
        info.nbytes
        for module in model.modules()
        if isinstance(module, QuantizedLinear)
        for local, info in module.infos.items()
        if local not in codes
    )
    assert reader.counters.bytes_read == small
    assert reader.counters.maps == 0
    assert all(parameter.is_meta for parameter in model.parameters())
    offload = tmp_path / "offload"
    AutoModelForCausalLM.from_pretrained(
        path, quantization_config=HfqConfig(), device_map={"": "disk"}, offload_folder=str(offload)
    )
    assert not offload.exists() or not any(offload.iterdir())


def quiet(model) -> int:
    """Returns the bytes read, once all started reads are complete."""
    loading = model.hf_quantizer.loading
    for index in range(len(loading.offloader.units)):
        ticket = loading.offloader._buffers_of(index).ticket_of(index)
        if ticket is not None:
            ticket.wait()
    return loading.reader.counters.bytes_read


def test_a_forward_from_disk_reads_each_byte_once_and_of_the_embeddings_the_rows(path):
    model, inputs = load(path, {"": "disk"}, disk_io="buffered"), prompt(path)
    loading, offloader = model.hf_quantizer.loading, model.hf_quantizer.loading.offloader
    needed = sum(info.nbytes for unit in offloader.units for info in unit.infos)
    assert needed == sum(
        info.nbytes for info in loading.checkpoint.tensors.values()
    )  # the tied head reads the embeddings
    # a unit is read from the start of its first page, with the small gaps between its tensors
    sizes = [sum(run.lead + run.source.nbytes for run in layout.runs) for layout in offloader.layouts]
    assert needed <= offloader.pass_nbytes < 1.01 * needed
    table = loading.checkpoint.tensors["model.embed_tokens.weight"]
    rows = inputs["input_ids"].unique().numel() * table.nbytes // table.shape[0]
    before = quiet(model)
    for passes in range(1, 4):
        forward(model, inputs)
        once = passes * (sum(sizes) + rows)
        assert once <= quiet(model) - before <= once + offloader.buffer_nbytes  # prefetched for the next pass
    assert (offloader.passes, offloader.prefetch_order.prefetch_misses, offloader.buffer_overflows) == (
        3,
        0,
        0,
    )


def test_direct_and_verified_reads_give_the_same_logits(path):
    inputs = prompt(path)
    expected = forward(load(path), inputs)
    for options in (
        {"disk_io": "direct"},
        {"disk_io": "buffered", "disk_checksum": "always"},
        {"disk_io": "direct", "disk_checksum": "first"},
    ):
        model = load(path, {"": "disk"}, **options)
        assert torch.equal(forward(model, inputs), expected)
        assert torch.equal(forward(model, inputs), expected)


@pytest.mark.parametrize("budget", [0, 1, 15_000, 40_000, None])
def test_routed_experts_are_read_and_kept_within_their_budget(tmp_path, budget):
    scheme = moe_models.BY_EXPERT
    path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path)
    inputs = {"input_ids": moe_models.IDS}
    expected = forward(load(path, quantize_activations=False), inputs)
    model = load(path, {"": "disk"}, quantize_activations=False, expert_cache_size=budget, disk_io="buffered")
    offloader, used, read = model.hf_quantizer.loading.offloader, set(), []
    cache = offloader.experts
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and ".experts." in name:
            module.register_forward_pre_hook(lambda module, _: used.add(module.name.rpartition(".")[0]))
    (places,) = cache._places.values()
    size, count = places.memory.place_nbytes, places.memory.count
    assert cache.budget == size * count
    if budget is not None:
        assert count == max(budget // size, 2 * moe_models.CHOSEN)
    chunks = {
        chunk: expert.name
        for expert in cache.experts
        for run in expert.layout.runs
        for chunk, _ in run.chunks(CHUNK_NBYTES)
    }
    offloader.source.on_read = lambda chunk, *_: chunk in chunks and read.append(chunk)
    for _ in range(3):
        hits, misses = cache.hits, cache.misses
        used.clear()
        read.clear()
        assert torch.equal(forward(model, inputs), expected)
        quiet(model)
        hits, misses = cache.hits - hits, cache.misses - misses
        assert hits + misses == len(used)
        assert cache.nbytes <= cache.budget
        requests = Counter(chunks.values())
        assert (
            sum(Fraction(1, requests[chunks[chunk]]) for chunk in read) == misses
        )  # each one is read once, whole
    if budget is None:
        assert (hits, misses) == (len(used), 0)
    else:
        assert misses > 0


def test_the_plan_counts_every_byte_of_the_checkpoint(path):
    plan = load(path, {"": "disk"}).hf_quantizer.loading.plan
    stored = sum(info.nbytes for info in load(path).hf_quantizer.loading.checkpoint.tensors.values())
    assert plan.nbytes_by_device() == {"disk": stored}
    assert plan.resident_nbytes() == 0
    half = load(path, HALF).hf_quantizer.loading.plan
    assert set(half.nbytes_by_device()) == {"cpu", "disk"}
    assert half.onloaded_nbytes() == half.nbytes_by_device()["disk"]


def test_gradients_reach_the_activations_and_are_the_same_from_disk(path):
    grads = []
    for device_map in (None, HALF, {"": "disk"}):
        model = load(path, device_map)
        embeddings = torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
        model(inputs_embeds=embeddings).logits.square().sum().backward()
        grads.append(embeddings.grad)
    assert grads[0].abs().sum() > 0
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_gradients_are_the_same_under_checkpointing_from_disk(path):
    grads = []
    for device_map, checkpointing in ((None, False), (HALF, True)):
        model = load(path, device_map).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        embeddings = torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
        model(inputs_embeds=embeddings, use_cache=False).logits.square().sum().backward()
        grads.append(embeddings.grad)
    assert torch.equal(*grads)


def test_two_threads_load_and_run_two_models_at_once():
    found, errors = {}, []

    def work(name):
        try:
            found[name] = forward(load(PATHS[name], HALF), prompt(PATHS[name]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in PATHS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    for name in PATHS:
        assert torch.equal(found[name], forward(load(PATHS[name]), prompt(PATHS[name])))


@pytest.fixture
def one_torch_thread():
    """Limits torch to one thread, since OpenMP threads do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_model_serves_after_a_fork(path, one_torch_thread):
    model, inputs = load(path, HALF), prompt(path)
    expected = forward(model, inputs)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if torch.equal(forward(model, inputs), expected) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_casting_the_model_leaves_packed_bytes_alone(path):
    model = load(path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "_proj." in name}
    torch.nn.Module.half(model)
    after = model.state_dict()
    assert all(
        torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in before.items()
    )
    assert model.model.embed_tokens.weight.dtype == torch.float16


def test_a_copied_model_gives_the_same_logits(path):
    model, inputs = load(path), prompt(path)
    assert torch.equal(forward(copy.deepcopy(model), inputs), forward(model, inputs))


def test_take_over_needs_no_patch(path):
    model = AutoModelForCausalLM.from_pretrained(
        path, config=pretrained_config(path, HfqConfig(kernel="reference")), dtype=torch.float32
    )
    assert torch.equal(forward(model, prompt(path)), forward(load(path, kernel="reference"), prompt(path)))
    assert model.hf_quantizer.quantization_config.kernel == "reference"


def test_a_device_map_is_read_by_whole_names(path):
    model = load(path, {"": "cpu", "model.layers.1": "disk"})
    devices = model.hf_quantizer.loading.devices
    assert {name.split(".")[2] for name, home in devices.items() if home == "disk"} == {"1"}


def test_the_users_device_map_is_left_as_it_was_and_reported(path):
    device_map = dict(HALF)
    model = load(path, device_map)
    assert device_map == HALF
    assert model.hfq_device_map == HALF


def test_a_home_may_split_a_block(path):
    device_map = {
        "": "cpu",
        "model.layers.0.mlp.up_proj": "disk",
        "model.norm": "disk",
        "model.layers.1.self_attn": "disk",
    }
    assert torch.equal(forward(load(path, device_map), prompt(path)), forward(load(path), prompt(path)))


def test_tied_embeddings_follow_their_source(path):
    for device_map in ({"": "cpu", "model.embed_tokens": "disk"}, {"": "cpu", "lm_head": "disk"}):
        assert torch.equal(forward(load(path, device_map), prompt(path)), forward(load(path), prompt(path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_named(path):
    with pytest.raises(
        PlacementError, match=r"(?s)cuda:0.*Nothing was loaded|that this machine does not have"
    ):
        load(path, {"": "cuda:0"})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_a_device_of_a_kind_that_torch_does_not_know_is_named():
    for device_map in ("sim:0", {"": "sim:0"}):
        with pytest.raises(PlacementError, match="is not a device") as caught:
            load(GPTQ, device_map)
        assert caught.value.found == "'sim:0'"


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cuda:0", "lm_head": "cpu"},
        *(pytest.param(each, marks=pytest.mark.slow) for each in (0, {"": 0}, "cuda:0")),
    ],
)
def test_a_device_that_an_environment_variable_hides_is_named(device_map):
    code = (
        "import ast, sys; from tests.support.models import load; from hfq import PlacementError\n"
        "try: load(sys.argv[1], ast.literal_eval(sys.argv[2]))\n"
        "except PlacementError as error: print(error)"
    )
    told = programs.run_line(code, GPTQ, repr(device_map), CUDA_VISIBLE_DEVICES="")
    lines = told.stdout.splitlines()
    assert lines[0].startswith("device_map names an accelerator that this machine does not have."), told
    assert "  expected: cpu, disk; torch finds no accelerator" in lines
    assert """Use "cpu" or "disk". CUDA_VISIBLE_DEVICES='' hides""" in lines[-1]


@pytest.mark.parametrize(
    "compute",
    [
        lambda weight: torch.nn.functional.linear(torch.ones(1, weight.shape[1]), weight),
        lambda weight: torch.nn.functional.embedding(torch.tensor([1]), weight),
        lambda weight: weight[3],
        lambda weight: torch.ones(1, weight.shape[1]) @ weight.t(),
    ],
)
def test_a_late_use_of_a_weight_on_disk_is_an_error_and_not_made_up(path, compute):
    model = load(path, {"": "disk"})
    forward(model, prompt(path))
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        with pytest.raises(PlacementError, match="is offloaded"):
            compute(module.weight)
