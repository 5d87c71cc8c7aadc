"""Tests that accelerate's dispatch of a loaded model never changes a bit without an error."""

import contextlib

import accelerate
import pytest
import torch
from accelerate.utils import set_module_tensor_to_device

from hfq.errors import FormatError, PlacementError
from hfq.formats import FORMATS
from hfq.kernels.cpp.layers import describe_layer
from tests.contract.cases import CASES
from tests.support import tiny_models
from tests.support.models import load

IDS = ("gptq-v1-w4-sym", "fp8-block", "fp8-channel", "int-quantized-channel", "bitsandbytes-nf4")
TOKENS = torch.arange(8)[None]


def offload_to_cpu(model, folder):
    accelerate.cpu_offload(model, execution_device="cpu")


def offload_to_disk(model, folder):
    accelerate.disk_offload(model, folder, execution_device="cpu")


def dispatch(model, folder):
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def set_every_tensor(model, folder):
    for name, parameter in list(model.named_parameters()):
        set_module_tensor_to_device(model, name, "cpu", value=parameter.data)


DOORS = [offload_to_cpu, offload_to_disk, dispatch, set_every_tensor]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@pytest.mark.parametrize("case", [case for case in CASES if case.id in IDS], ids=lambda case: case.id)
def test_a_dispatched_model_is_bit_identical_or_raises_an_error(case, door, tmp_path):
    tensors = tiny_models.model_tensors(case.format)
    tiny_models.write_model(tmp_path / "model", tensors, case.config)
    model = load(tmp_path / "model")
    found = None
    with torch.no_grad():
        expected = model(TOKENS).logits
        # accelerate itself raises KeyError and ValueError for tensors whose name or shape it does not expect
        with contextlib.suppress(PlacementError, KeyError, ValueError):
            door(model, tmp_path / "offload")
            found = model(TOKENS).logits
    assert found is None or torch.equal(found, expected)


def test_the_error_names_the_tensor_and_its_dtypes(tmp_path):
    case = next(case for case in CASES if case.id == "fp8-block")
    tiny_models.write_model(tmp_path, tiny_models.model_tensors(case.format), case.config)
    model = load(tmp_path)
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(PlacementError, match="was replaced after the model was loaded") as caught:
        model(TOKENS)
    assert caught.value.tensor.endswith(".weight")
    assert "float8_e4m3fn" in caught.value.expected
    assert "float32" in caught.value.found


@pytest.mark.parametrize("name", ["fp8", "gptq"])
def test_the_compiled_kernel_reads_no_tensor_of_another_dtype(name):
    weight_format = FORMATS[name]()
    tensors = weight_format.quantize(torch.randn(64, 128))
    cast = {local: tensor.float() for local, tensor in tensors.items()}
    with pytest.raises(FormatError, match="compiled kernel cannot read"):
        describe_layer(weight_format, cast)
