"""Tests of layer-major runs: equal results, with one read per unit for all batches."""

import json
import os
import signal
import threading
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import hfq
from hfq import CheckpointError, SetupError, run_batches
from hfq.formats.gptq import Gptq
from hfq.offload import lockstep
from tests.support import moe_models, tiny_models
from tests.support.models import load

GPTQ = tiny_models.DATA / "tiny-llama-gptq"
DISK = {"": "disk"}
HALF = {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}
LENGTHS = (3, 7, 1, 5)


@pytest.fixture(scope="module")
def streamed():
    return load(device_map=DISK)


@pytest.fixture(scope="module")
def resident():
    return load()


@pytest.fixture(params=[DISK, HALF, None], ids=["disk", "half", "resident"])
def placed(request, streamed, resident):
    return {"disk": streamed, "half": None, "resident": resident}[request.node.callspec.id] or load(
        device_map=HALF
    )


def batches_of(*lengths: int) -> list[dict]:
    generator = torch.Generator().manual_seed(4)
    return [{"input_ids": torch.randint(3, 90, (2, length), generator=generator)} for length in lengths]


def lockstep_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hfq-lockstep")]


def test_forwards_are_those_of_separate_calls(placed, resident):
    batches = batches_of(*LENGTHS)
    with torch.no_grad():
        found, expected = run_batches(placed, batches), [resident(**batch) for batch in batches]
    assert len(found) == len(expected)
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(found, expected, strict=True))
    assert lockstep_threads() == []


def test_batches_may_be_token_ids_and_there_may_be_none_or_one(placed, resident):
    ids = batches_of(4)[0]["input_ids"]
    with torch.no_grad():
        assert run_batches(placed, []) == []
        assert torch.equal(run_batches(placed, [ids])[0].logits, resident(ids).logits)
        assert torch.equal(run_batches(placed, iter([ids, ids]))[1].logits, resident(ids).logits)


def test_caches_stay_with_their_batch(placed, resident):
    batches = batches_of(*LENGTHS)

    def two_steps(model, batch):
        first = model(**batch, use_cache=True)
        tokens = first.logits[:, -1:].argmax(-1)
        return model(input_ids=tokens, past_key_values=first.past_key_values, use_cache=True).logits

    with torch.no_grad():
        found = run_batches(placed, batches, lambda batch: two_steps(placed, batch))
        expected = [two_steps(resident, batch) for batch in batches]
    assert all(map(torch.equal, found, expected))


def generated(model, batch, tokens: int = 5, **options):
    return model.generate(**batch, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options)


def test_generation_is_that_of_separate_calls_though_batches_differ_in_length_and_end(placed, resident):
    batches, steps = batches_of(*LENGTHS), {length: index + 2 for index, length in enumerate(LENGTHS)}

    def run(model, batch):
        return generated(model, batch, steps[batch["input_ids"].shape[1]])

    found = run_batches(placed, batches, lambda batch: run(placed, batch))
    assert all(map(torch.equal, found, [run(resident, batch) for batch in batches]))


def test_a_batch_that_meets_its_end_early_leaves_the_others_alone(streamed, resident):
    batches = batches_of(3, 6, 4)
    first = generated(resident, batches[0], 6)
    end = first[0, 4].item()  # the first sequence ends at its second new token
    found = run_batches(streamed, batches, lambda batch: generated(streamed, batch, 6, eos_token_id=[end]))
    expected = [generated(resident, batch, 6, eos_token_id=[end]) for batch in batches]
    assert all(map(torch.equal, found, expected))


def blocks_read(model) -> int:
    offloader = model.hf_quantizer.loading.offloader
    for index in range(len(offloader.units)):
        ticket = offloader._buffers_of(index).ticket_of(index)
        if ticket is not None:
            ticket.wait()
    return offloader.source.nbytes_read


@pytest.mark.parametrize("count", [2, 5])
def test_the_blocks_are_read_once_for_each_step_whatever_the_number_of_batches(count):
    model = load(device_map=DISK)
    with torch.no_grad():
        run_batches(model, batches_of(2, 2))
        before = blocks_read(model)
        run_batches(model, batches_of(*range(1, count + 1)))
    sizes = [
        sum(run.lead + run.source.nbytes for run in layout.runs)
        for layout in model.hf_quantizer.loading.offloader.layouts
    ]
    once = blocks_read(model) - before
    assert (
        sum(sizes) / 2 <= once <= sum(sizes)
    )  # fewer, since the offload buffer still holds units of the earlier run
    run_batches(model, batches_of(*range(1, count + 1)), lambda batch: generated(model, batch, 3))
    assert sum(sizes) / 2 <= blocks_read(model) - before - once <= 3 * sum(sizes)
    assert hfq.report(model).offload.prefetch_misses == 0


def test_max_concurrent_bounds_how_many_run_together(streamed, resident):
    batches, running, most = batches_of(*LENGTHS, 2), set(), []

    def run(batch):
        running.add(id(batch))
        most.append(len(running))
        logits = streamed(**batch).logits
        running.remove(id(batch))
        return logits

    with torch.no_grad():
        for max_concurrent, expected in ((2, 2), (3, 3), (None, 5), (1, 1)):
            most.clear()
            found = run_batches(streamed, batches, run, max_concurrent=max_concurrent)
            assert max(most) == expected
            assert all(
                torch.equal(one, resident(**batch).logits) for one, batch in zip(found, batches, strict=True)
            )


@pytest.mark.parametrize("max_concurrent", [0, -1, True, 1.5, "2"])
def test_max_concurrent_must_be_a_number_of_batches(streamed, max_concurrent):
    with pytest.raises(SetupError, match="max_concurrent"):
        run_batches(streamed, [], max_concurrent=max_concurrent)


def test_what_is_no_batch_and_what_hfq_did_not_load_is_refused(streamed):
    with pytest.raises(SetupError, match="requires dicts or tensors as batches"):
        run_batches(streamed, ["text", "text"])
    with pytest.raises(SetupError, match="not loaded by hfq"):
        run_batches(torch.nn.Linear(2, 2), [])


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_failure_is_raised_all_threads_are_joined_and_the_model_works(
    streamed, resident, place, error
):
    batches = batches_of(*LENGTHS)

    def run(batch):
        is_bad = batch is batches[1]
        if is_bad and place == "before":
            raise error("from a batch")
        logits = streamed(**batch).logits
        if is_bad:
            raise error("from a batch")
        return logits

    with torch.no_grad():
        with pytest.raises(error, match="from a batch"):
            run_batches(streamed, batches, run)
        assert lockstep_threads() == []
        assert all(parameter.is_meta for parameter in streamed.parameters())
        found = run_batches(streamed, batches)
        assert all(
            torch.equal(one.logits, resident(**batch).logits)
            for one, batch in zip(found, batches, strict=True)
        )


def test_a_failure_within_a_block_is_raised_while_the_others_wait_for_it(streamed, resident):
    batches, layer, seen = batches_of(*LENGTHS), streamed.model.layers[1].mlp, []

    def fail(module, inputs):
        seen.append(inputs[0].shape[1])
        if inputs[0].shape[1] == LENGTHS[1]:
            raise ValueError("in a block")

    handle = layer.register_forward_pre_hook(fail)
    with torch.no_grad():
        with pytest.raises(ValueError, match="in a block"):
            run_batches(streamed, batches)
        handle.remove()
        assert seen == list(LENGTHS[:2])
        assert lockstep_threads() == []
        assert torch.equal(run_batches(streamed, batches)[0].logits, resident(**batches[0]).logits)


def test_a_job_that_ignores_its_end_cannot_hang_the_others(streamed):
    def stubborn(batch):
        try:
            return streamed(**batch)
        except BaseException:
            return streamed(**batch)

    def run(batch):
        if batch is batches[2]:
            raise ValueError("third")
        return stubborn(batch)

    batches = batches_of(2, 3, 4)
    with torch.no_grad(), pytest.raises(ValueError, match="third"):
        run_batches(streamed, batches, run)
    assert lockstep_threads() == []


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_disk_that_fails_is_raised_with_the_blocks_name(monkeypatch, resident, is_direct):
    model = load(device_map=DISK, disk_io="direct" if is_direct else "buffered")
    source, batches = model.hf_quantizer.loading.offloader.source, batches_of(2, 3)

    def fail(wanted, target):
        raise CheckpointError("The disk fails.", fix="check the disk")

    with torch.no_grad():
        with (
            monkeypatch.context() as patch,
            pytest.raises(CheckpointError, match=r"model.layers.0: The disk fails"),
        ):
            patch.setattr(source, "read", fail)
            run_batches(model, batches)
        assert lockstep_threads() == []
        assert torch.equal(run_batches(model, batches)[1].logits, resident(**batches[1]).logits)


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode", "autocast"])
def test_jobs_see_the_modes_of_the_caller(streamed, resident, mode):
    modes = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    batches, seen = batches_of(2, 3), []

    def state():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    def run(batch):
        seen.append(state())
        with torch.no_grad():
            return streamed(**batch).logits

    with modes[mode]():
        expected = state()
        found = run_batches(streamed, batches, run)
        with torch.no_grad():
            assert all(
                torch.equal(one, resident(**batch).logits) for one, batch in zip(found, batches, strict=True)
            )
    assert seen == [expected, expected]


def test_gradients_flow_through_it(streamed, resident):
    gradients = []
    for model in (streamed, resident):
        inputs = [
            torch.randn(1, length, 128, generator=torch.Generator().manual_seed(length)).requires_grad_()
            for length in (3, 5)
        ]
        run = lambda batch, model=model: model(inputs_embeds=batch).logits  # noqa: E731
        outputs = run_batches(model, inputs, run) if model is streamed else [run(batch) for batch in inputs]
        sum(output.square().sum() for output in outputs).backward()
        gradients.append([batch.grad for batch in inputs])
    assert all(map(torch.equal, *gradients))
    assert gradients[0][0].abs().sum() > 0


def test_a_run_within_a_run_shares_its_blocks(streamed, resident):
    batches = batches_of(2, 3)

    def run(batch):
        return [output.logits for output in run_batches(streamed, [batch, batch])]

    with torch.no_grad():
        found = run_batches(streamed, batches, run)
        for (one, other), batch in zip(found, batches, strict=True):
            assert torch.equal(one, resident(**batch).logits)
            assert torch.equal(other, one)


def test_a_job_may_call_another_streamed_model(streamed, resident):
    batches, fp8 = batches_of(*LENGTHS), tiny_models.DATA / "tiny-llama-fp8"
    other, other_resident = load(fp8, DISK), load(fp8)

    def both(first, second):
        return lambda batch: (
            first(**batch).logits,
            second(**batch).logits,
            run_batches(second, [batch])[0].logits,
        )

    with torch.no_grad():
        found = run_batches(streamed, batches, both(streamed, other))
        assert all(
            all(map(torch.equal, one, both(resident, other_resident)(batch)))
            for one, batch in zip(found, batches, strict=True)
        )


@pytest.fixture
def one_torch_thread():
    """Limits torch to one thread, since its thread pool does not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_child_that_a_job_forks_may_call_the_model(streamed, resident, one_torch_thread):
    batches, ended = batches_of(2, 3), []

    def run(batch):
        logits = streamed(**batch).logits
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            try:
                os._exit(0 if torch.equal(streamed(**batch).logits, logits) else 1)
            finally:
                os._exit(2)
        ended.append(os.waitpid(child, 0)[1])
        return logits

    with torch.no_grad():
        found = run_batches(streamed, batches, run)
        assert ended == [0, 0]
        assert all(
            torch.equal(one, resident(**batch).logits) for one, batch in zip(found, batches, strict=True)
        )


def test_an_interrupted_job_leaves_its_block_before_another_is_read_over_it(streamed, monkeypatch):
    offloader, is_inside, events = streamed.hf_quantizer.loading.offloader, threading.Event(), []
    release = offloader._release

    def interrupted(worker, region):
        worker._buffer, worker.waits_for = region, None
        worker._go.release()
        is_inside.wait(20)
        raise KeyboardInterrupt

    def slow(*_):
        is_inside.set()
        time.sleep(0.05)
        events.append("left")

    monkeypatch.setattr(lockstep.Worker, "resume", interrupted)
    monkeypatch.setattr(
        offloader, "_release", lambda *arguments: (events.append("released"), release(*arguments))
    )
    handle = streamed.model.layers[0].mlp.register_forward_pre_hook(slow)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        run_batches(streamed, batches_of(2, 2))
    handle.remove()
    assert events == ["left", "released"]
    assert lockstep_threads() == []


@pytest.mark.parametrize("budget", [0, 20_000, None])
def test_mixtures_of_experts(tmp_path, budget):
    scheme = moe_models.BY_EXPERT
    path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path)
    batches = [{"input_ids": moe_models.IDS[:, :length]} for length in (2, 7, 4)]
    model, plain = (
        load(path, DISK, quantize_activations=False, expert_cache_size=budget),
        load(path, quantize_activations=False),
    )
    with torch.no_grad():
        for _ in range(2):
            found = run_batches(model, batches)
            assert all(
                torch.equal(one.logits, plain(**batch).logits)
                for one, batch in zip(found, batches, strict=True)
            )
    experts = model.hf_quantizer.loading.offloader.experts
    assert experts.nbytes <= experts.budget
    assert experts.misses > 0
    assert budget == 0 or experts.hits > 0


def test_an_encoder_and_a_decoder(tmp_path):
    sizes = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 96,
        "decoder_start_token_id": 0,
    }
    config = AutoConfig.for_model("t5", **sizes)
    torch.manual_seed(5)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "plain")
    tensors, weight_format = {}, Gptq(4, 32, True, "stored", g_idx_length=64)
    for name, tensor in tiny_models.stored_tensors(tmp_path / "plain").items():
        if name.endswith(("q.weight", "k.weight", "v.weight")):
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{local}": part for local, part in weight_format.quantize(tensor).items()}
        else:
            tensors[name] = tensor
    quantization = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": 4,
        "group_size": 32,
        "sym": True,
    }
    path = tiny_models.write_model(tmp_path / "packed", tensors, quantization)
    written = config.to_dict() | {
        "architectures": ["T5ForConditionalGeneration"],
        "quantization_config": quantization,
    }
    (path / "config.json").write_text(json.dumps(written))
    model, plain = (load(path, device_map, cls=AutoModelForSeq2SeqLM) for device_map in (DISK, None))
    batches = batches_of(3, 6)
    found = run_batches(model, batches, lambda batch: generated(model, batch, 4))
    assert all(map(torch.equal, found, [generated(plain, batch, 4) for batch in batches]))
