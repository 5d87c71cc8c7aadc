"""Tests that the reference kernel keeps one buffer per thread, and no float weight."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.kernels import reference

OUT, IN = 4096, 2048
FORMATS = {
    "gptq w4": Gptq(4, 128, True, "stored", g_idx_length=IN),
    "gptq w3 act-order": Gptq(3, 128, True, "stored", g_idx_length=IN, act_order=True),
    "fp8 block": Fp8(strategy="block", block_structure=(128, 128)),
    "fp8 group": Fp8(strategy="group", group_size=32),
    "fp8 channel": Fp8(strategy="channel"),
}


class Allocations(TorchDispatchMode):
    """Recorder of the largest storage that an operator allocates, and of their sum."""

    largest = total = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((arguments, options))
            if torch.is_tensor(leaf)
        }
        result = operator(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
                self.total += leaf.untyped_storage().nbytes()
        return result


def layer(weight_format, out_features: int = OUT, in_features: int = IN):
    """Returns a layer of random codes; quantizing a weight takes longer and allocates no less."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for spec in weight_format.tensor_specs(in_features, out_features):
        if spec.role == "codes" or spec.role == "zero_point":
            dtype = {"I32": torch.int32, "F8_E4M3": torch.uint8}[spec.dtypes[0]]
            codes = torch.randint(0, 120, spec.shape, generator=generator, dtype=dtype)
            tensors[spec.name] = codes.view(torch.float8_e4m3fn) if dtype == torch.uint8 else codes
        elif spec.role == "index":
            tensors[spec.name] = torch.randint(
                0, spec.bound, spec.shape, generator=generator, dtype=torch.int32
            )
        elif spec.role == "scale":
            tensors[spec.name] = torch.rand(spec.shape, generator=generator) * 0.01
    return tensors


@pytest.fixture
def panels(monkeypatch):
    """Returns the addresses of the float32 panels that a format fills, by thread."""
    seen: dict[int, set[int]] = {}
    for kind in (Fp8, Gptq):

        def spy(self, panel, tensors, start, original=kind.dequantize_into):
            seen.setdefault(threading.get_ident(), set()).add(panel.data_ptr())
            original(self, panel, tensors, start)

        monkeypatch.setattr(kind, "dequantize_into", spy)
    return seen


def in_a_new_thread(work):
    """Runs `work` in a thread without buffers, and returns its result or raises its exception."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def test_the_gate_sees_a_weight_that_is_made_as_floats():
    weight_format = FORMATS["fp8 channel"]
    tensors = layer(weight_format)
    with Allocations() as allocations:
        torch.ones(1, IN) @ weight_format.dequantize(tensors).t()
    assert allocations.largest == OUT * IN * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_no_call_makes_the_weight_as_floats(name, dtype):
    weight_format = FORMATS[name]
    tensors = layer(weight_format)
    activations, grad = torch.ones(2, IN, dtype=dtype), torch.ones(2, OUT, dtype=dtype)
    reference.linear(activations, tensors, weight_format)
    for call in (
        lambda: reference.linear(activations, tensors, weight_format),
        lambda: reference.linear_grad(grad, tensors, weight_format),
    ):
        with Allocations() as allocations:
            call()
        assert 0 < allocations.largest <= 2 * reference.PANEL_NBYTES < OUT * IN * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_fp8_needs_beyond_its_buffer_is_less_than_a_panel(dtype):
    weight_format = FORMATS["fp8 block"]
    tensors, activations = layer(weight_format), torch.ones(1, IN, dtype=dtype)
    reference.linear(activations, tensors, weight_format)
    with Allocations() as allocations:
        reference.linear(activations, tensors, weight_format)
    assert allocations.total < reference.PANEL_NBYTES


def test_every_panel_of_every_call_lies_in_one_buffer(panels):
    def work():
        for weight_format in (FORMATS["fp8 channel"], FORMATS["gptq w4"]):
            tensors = layer(weight_format)
            for dtype in (torch.float32, torch.bfloat16, torch.float32):
                reference.linear(torch.ones(2, IN, dtype=dtype), tensors, weight_format)
            reference.linear_grad(torch.ones(2, OUT), tensors, weight_format)

    in_a_new_thread(work)
    assert [len(addresses) for addresses in panels.values()] == [1]


def test_a_larger_layer_after_a_smaller_one_is_right():
    def work():
        results = []
        for size in (64, 512, 64):
            weight_format = Fp8(strategy="channel")
            tensors, activations = layer(weight_format, size, size), torch.ones(3, size)
            expected = activations @ weight_format.dequantize(tensors).t()
            results.append(torch.equal(reference.linear(activations, tensors, weight_format), expected))
        return results

    assert in_a_new_thread(work) == [True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", ["inference_mode", "no_grad", "plain"])
def test_a_buffer_made_in_one_mode_serves_every_other(first, dtype):
    weight_format = FORMATS["fp8 channel"]
    tensors = layer(weight_format, 48, 64)
    activations, grad = torch.rand(3, 64).to(dtype), torch.rand(3, 48).to(dtype)
    modes = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "plain": torch.enable_grad}

    def work():
        outcomes = []
        for name in (first, *modes):
            with modes[name]():
                outcomes.append(reference.linear(activations, tensors, weight_format).clone())
                outcomes.append(reference.linear_grad(grad, tensors, weight_format).clone())
        return outcomes

    outcomes = in_a_new_thread(work)
    expected = [
        activations @ weight_format.dequantize(tensors, dtype).t(),
        grad @ weight_format.dequantize(tensors, dtype),
    ]
    assert len(outcomes) == 8
    assert all(torch.equal(found, expected[index % 2]) for index, found in enumerate(outcomes))


def test_threads_have_buffers_of_their_own_and_do_not_disturb_each_other(panels):
    barrier = threading.Barrier(2, timeout=60)
    cases = []
    for name, fill in (("fp8 channel", 0.5), ("gptq w4", 2.0)):
        tensors, activations = layer(FORMATS[name], 512, 512), torch.full((3, 512), fill)
        cases.append(
            (FORMATS[name], tensors, activations, reference.linear(activations, tensors, FORMATS[name]))
        )
    panels.clear()
    wrong = []

    def work(weight_format, tensors, activations, expected):
        barrier.wait()
        for _ in range(40):
            wrong.append(not torch.equal(reference.linear(activations, tensors, weight_format), expected))

    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(wrong) == 80
    assert not any(wrong)
    assert len(panels) == 2
    assert not set.intersection(*panels.values())
