"""Tests of quantized modules: names, moves, and saves of parameters, and reads by model code."""

import copy
import itertools
import operator

import pytest
import torch
from torch import nn

from hfq import PlacementError
from hfq.formats.bitsandbytes import Bnb4Bit, BnbInt8
from hfq.formats.hqq import Hqq
from hfq.formats.quanto import QuantoBits, QuantoBytes
from hfq.kernels.registry import choose_kernel
from hfq.modules.embedding import QuantizedEmbedding
from hfq.modules.flat_buffer import FlatBuffer, map_tensors
from hfq.modules.linear import QuantizedLinear
from hfq.modules.offloaded_parameter import OffloadedParameter
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.unit import is_on_disk
from tests.support import tiny_models

IN, OUT = 96, 64
SCALARS = (("input_scale", "BF16", ()), ("output_scale", "BF16", ()))
FORMATS = {
    "dots": Bnb4Bit(is_nested=True),
    "a name of the module": BnbInt8(scale_shape=(2,), others=(("weight_format", "U8", ()),)),
    "weight among dots": QuantoBytes(scale_shape=(2, 1), others=SCALARS),
    "two dots": QuantoBits(num_bits=4, group_size=32, others=SCALARS),
    "scalars": Hqq(num_bits=4, group_size=32),
}
BACKINGS = ["mapped", "arena"]
PAIRS = list(itertools.product(FORMATS, BACKINGS))


def as_bytes(tensor: torch.Tensor) -> tuple:
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


@pytest.fixture
def build(store):
    """build(name, backing, bias) → (module, its tensors, its float32 weight)."""

    def build(name: str, backing: str = "mapped", bias: bool = False, cls=QuantizedModule, extra=()):
        weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3)) * 0.1
        tensors = FORMATS[name].quantize(weight)
        weight_format = tiny_models.settled(FORMATS[name], tensors, None, (OUT, IN))
        tensors |= dict(extra) | (
            {"bias": torch.randn(OUT, generator=torch.Generator().manual_seed(4)).half()} if bias else {}
        )
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))  # all aligned
        infos, reader = store(tensors)
        options = () if cls is not QuantizedLinear else (choose_kernel("reference"),)
        sizes = (OUT, IN) if cls is QuantizedEmbedding else (IN, OUT)
        module = cls("model.layers.0.q", *sizes, weight_format, infos, *options)
        if backing == "mapped":
            module.hold(map_tensors(reader, infos))
        elif backing == "arena":
            module.hold_buffer(FlatBuffer.read(reader, infos))
        return module, tensors, weight_format.dequantize(tensors)

    return build


@pytest.mark.parametrize(("name", "backing"), PAIRS)
def test_the_state_dict_speaks_on_disk_names_and_bytes(build, name, backing):
    module, tensors, _ = build(name, backing, bias=True)
    assert list(module.state_dict()) == list(tensors)
    assert {key: as_bytes(tensor) for key, tensor in module.state_dict().items()} == {
        key: as_bytes(tensor) for key, tensor in tensors.items()
    }
    prefixed = nn.ModuleDict({"q": module}).state_dict()
    assert list(prefixed) == [f"q.{key}" for key in tensors]


@pytest.mark.parametrize("name", FORMATS)
def test_a_held_tensor_is_a_frozen_parameter_without_dots(build, name):
    module, tensors, _ = build(name)
    parameters = dict(module.named_parameters())
    assert len(parameters) == len(tensors)
    assert not any("." in key or parameter.requires_grad for key, parameter in parameters.items())
    assert [as_bytes(parameter) for parameter in parameters.values()] == [
        as_bytes(tensor) for tensor in tensors.values()
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_an_arena_is_one_frozen_parameter_of_bytes(build, name):
    module, tensors, _ = build(name, "arena")
    ((key, parameter),) = module.named_parameters()
    assert key == "flat_buffer"
    assert (parameter.dtype, parameter.dim(), parameter.requires_grad) == (torch.uint8, 1, False)
    assert parameter.numel() >= sum(tensor.nbytes for tensor in tensors.values())
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in module.stored_tensors().values())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("target", BACKINGS)
@pytest.mark.parametrize("source", BACKINGS)
def test_a_state_dict_loads_into_either_backing(build, tmp_path, name, source, target):
    module, _, weight = build(name, target)
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    other, _, _ = build(name, source)
    for parameter in other.parameters():
        parameter.data.view(-1).view(torch.uint8).zero_()
    keys = other.load_state_dict(state)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert torch.equal(other.weight, weight)
    assert {key: as_bytes(tensor) for key, tensor in other.state_dict().items()} == {
        key: as_bytes(tensor) for key, tensor in state.items()
    }


def test_a_held_tensor_is_not_initialized_by_transformers_and_has_no_attributes_of_its_own(build):
    module, _, _ = build("scalars")
    copied = copy.deepcopy(module)
    for parameter in (*module.parameters(), *copied.parameters()):
        assert isinstance(parameter, nn.Parameter)
        assert parameter._is_hf_initialized
        assert not parameter.requires_grad
        assert vars(parameter) == {}
    assert all(map(torch.equal, module.parameters(), copied.parameters()))


def test_the_onload_device_changes_without_a_call_of_torch(build, monkeypatch):
    module, tensors, _ = build("scalars", "meta")
    module.onload_to(torch.device("cpu"))
    parameters = list(module.parameters())
    assert len(parameters) == len(tensors)
    monkeypatch.setattr(OffloadedParameter, "__torch_function__", lambda *_: pytest.fail("torch was called"))
    module.onload_to(torch.device("cuda", 1))
    assert is_on_disk(module)
    assert all(map(operator.is_, module._parameters.values(), parameters))
    assert {str(parameter.onload_device) for parameter in module._parameters.values()} == {"cuda:1"}
    assert module.compute_device == torch.device("cuda", 1)


def test_a_stored_tensor_may_bear_the_name_of_an_attribute(build):
    module, tensors, _ = build("a name of the module")
    assert isinstance(module.weight_format, BnbInt8)
    assert module.state_dict()["weight_format"] is not module.weight_format
    assert as_bytes(module.state_dict()["weight_format"]) == as_bytes(tensors["weight_format"])
    assert "stored_weight_format" in dict(module.named_parameters())


@pytest.mark.parametrize("cls", [QuantizedModule, QuantizedLinear, QuantizedEmbedding])
@pytest.mark.parametrize(
    "taken",
    [
        "name",
        "infos",
        "dtype",
        "training",
        "fetch",
        "is_offloaded",
        "in_features",
        "forward",
        "kernel",
        "scheme",
        "num_embeddings",
        "flat_buffer",
        "_parameters",
        "_apply",
        "state_dict",
        "T_destination",
        "_segments",
        "hold",
        "_modules",
        "weight_format",
    ],
)
def test_no_stored_name_takes_the_place_of_the_modules_own(build, cls, taken):
    module, tensors, weight = build("scalars", cls=cls, extra={taken: torch.tensor([3.0])})
    found = (
        getattr(module, taken) if taken not in ("flat_buffer", "kernel", "scheme", "num_embeddings") else None
    )
    assert not (isinstance(found, torch.Tensor) and found.numel() == 1)
    assert list(module.state_dict()) == list(tensors)
    assert module.state_dict()[taken].tolist() == [3.0]
    assert torch.equal(module.weight, weight)
    module.half()
    assert module.state_dict()[taken].dtype == torch.float32


def test_names_that_become_one_without_their_dots_stay_two(build):
    clashing = {"a.b": torch.tensor([1.0]), "a__b": torch.tensor([2.0])}
    module, tensors, _ = build("scalars", extra=clashing)
    assert {name: module.state_dict()[name].tolist() for name in clashing} == {"a.b": [1.0], "a__b": [2.0]}
    assert len(dict(module.named_parameters())) == len(tensors)


@pytest.mark.parametrize(("name", "backing"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reading_weight_dequantizes_in_the_dtype_of_the_model(build, name, backing, dtype):
    module, _, weight = build(name, backing)
    module.to(dtype)
    assert module.weight.dtype == dtype
    assert torch.equal(module.weight, weight.to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_weight_of_a_replaced_conv1d_is_transposed(build, name):
    module, _, weight = build(name)
    module.is_transposed = True
    assert torch.equal(module.weight, weight.t())


@pytest.mark.parametrize("backing", BACKINGS)
def test_reading_bias_gives_what_is_stored(build, backing):
    module, tensors, _ = build("dots", backing, bias=True)
    assert torch.equal(module.bias, tensors["bias"])
    assert build("dots", backing)[0].bias is None


def test_bias_of_a_module_on_disk_is_fetched_as_its_weight_is(build):
    module, tensors, weight = build("dots", "meta", bias=True)
    module.fetch = lambda: tensors
    assert torch.equal(module.weight, weight)
    assert torch.equal(module.bias, tensors["bias"])


def test_another_name_is_an_attribute_error(build):
    module = build("dots")[0]
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        module.wieght  # noqa: B018
    assert not hasattr(module, "weight_scale")


def test_weight_before_the_load_is_on_meta_with_shape_and_dtype(build):
    module = build("dots", "meta")[0].to(torch.bfloat16)
    assert (module.weight.device.type, module.weight.shape, module.weight.dtype) == (
        "meta",
        (OUT, IN),
        torch.bfloat16,
    )
    with pytest.raises(PlacementError, match="used before its weights were loaded"):
        module.onloaded_tensors()


@pytest.mark.parametrize(("name", "backing"), PAIRS)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_a_cast_leaves_every_byte(build, name, backing, cast):
    module, tensors, _ = build(name, backing, bias=True)
    model = nn.Sequential(module, nn.LayerNorm(4))
    getattr(model, cast)()
    assert {key: as_bytes(tensor) for key, tensor in module.state_dict().items()} == {
        key: as_bytes(tensor) for key, tensor in tensors.items()
    }
    assert model[1].weight.dtype == module.dtype


def test_a_cast_to_an_integer_keeps_the_dtype_of_weight(build):
    module = build("dots")[0].half()
    module._apply(lambda tensor: tensor)
    assert module.dtype == torch.float16


@pytest.mark.parametrize("name", FORMATS)
def test_a_fetched_module_is_read_for_each_use(build, name):
    module, tensors, weight = build(name)
    calls = []
    module.fetch, module.is_offloaded = lambda: calls.append(1) or tensors, True
    for _ in range(2):
        assert torch.equal(module.weight, weight)
    assert len(calls) == 2
    module.onload(tensors)
    assert module.onloaded_tensors() is tensors
    module.offload()
    module.onloaded_tensors()
    assert len(calls) == 3


def test_the_repr_names_sizes_and_format(build):
    assert f"in_features={IN}, out_features={OUT}, format=bitsandbytes nf4 double-quantized" in repr(
        build("dots")[0]
    )
