"""Tests of parameter sizes from headers: flat buffers as loaded, adapters as PEFT sizes them."""

import pytest

from hfq.checkpoint import Checkpoint
from hfq.errors import PlacementError
from hfq.formats import tensors_by_module
from hfq.modules.flat_buffer import flat_layout
from hfq.placement.zero.model_states import count_states
from tests.support import tiny_models

LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module", params=["tiny-llama-gptq", "tiny-llama-fp8"])
def quantized(request):
    return Checkpoint.open(tiny_models.DATA / request.param)


@pytest.fixture(scope="module")
def unquantized():
    return Checkpoint.open(tiny_models.DATA / "tiny-llama")


def test_rows_and_other_tensors_are_those_of_the_loader(quantized, unquantized):
    modules = tensors_by_module(quantized.tensors)
    linear = {name: tensors for name, tensors in modules.items() if name.rpartition(".")[2] in LINEARS}
    states = count_states(quantized)
    assert states.quantized == tuple(flat_layout(tensors)[1] for tensors in linear.values())
    kept = [info for name, info in unquantized.tensors.items() if not name.endswith("_proj.weight")]
    assert sorted(states.frozen) == sorted(info.numel for info in kept)
    assert states.trained == ()


def test_adapters_have_peft_s_sizes(quantized, unquantized):
    sizes = {name: info.shape for name, info in unquantized.tensors.items() if name.endswith("_proj.weight")}
    two = count_states(quantized, 4, ["q_proj", "mlp.down_proj"]).trained
    chosen = [
        shape for name, shape in sizes.items() if name.endswith(("q_proj.weight", "mlp.down_proj.weight"))
    ]
    assert sorted(two) == sorted(numel for out, into in chosen for numel in (4 * into, out * 4))
    assert sum(count_states(quantized, 8).trained) == 8 * sum(map(sum, sizes.values()))


def test_adapters_beside_dense_layers_are_the_same(quantized, unquantized):
    assert sorted(count_states(unquantized, 8).trained) == sorted(count_states(quantized, 8).trained)


def test_an_unquantized_checkpoint_may_be_trained_whole(unquantized):
    states = count_states(unquantized, trains_unquantized=True)
    assert (states.quantized, states.frozen) == ((), ())
    assert sum(states.trained) == sum(info.numel for info in unquantized.tensors.values())


def test_a_target_that_is_no_layer_is_refused(quantized):
    with pytest.raises(PlacementError, match="Did you mean 'q_proj'"):
        count_states(quantized, 8, ["q_prj"])
