"""Tests of torchao files, which require the metadata that describes their tensors."""

import contextlib
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import FormatError, HfqConfig, HfqError
from hfq.formats.torchao import Torchao
from tests.support import tiny_models
from tests.support.tiny_models import described

CONFIG = {"quant_method": "torchao"}
KINDS = {
    "Float8Tensor": (torch.float8_e4m3fn, torch.float8_e5m2),
    "Int8Tensor": (torch.int8,),
    "IntxUnpackedToInt8Tensor": (torch.int8,),
}


def schema(kind: str, codes: torch.Size, scale: torch.Size, has_zero: bool, **data) -> dict:
    rows, groups = scale if len(scale) == 2 else (1, 1)
    names = ["qdata", "scale"] + ["zero_point"] * has_zero
    block = [codes[0] // rows, codes[1] // groups]
    return {"_type": kind, "_data": {"block_size": block, **data}, "_tensor_data_names": names}


def random_layer(
    dtype: torch.dtype, scale: tuple[int, ...], has_zero: bool = False, size: tuple[int, int] = (6, 48)
):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, size, dtype=torch.uint8, generator=generator).view(dtype)
    tensors = {"_weight_qdata": codes, "_weight_scale": torch.randn(scale, generator=generator)}
    if has_zero:
        tensors["_weight_zero_point"] = torch.randint(-128, 128, scale, generator=generator).to(torch.int8)
    return tensors


def by_hand(tensors) -> torch.Tensor:
    """Computes W[n, k] = (q - zero) * scale, in float32."""
    codes, scale = tensors["_weight_qdata"], tensors["_weight_scale"]
    rows, groups = scale.shape if scale.dim() == 2 else (1, 1)
    scale = scale.reshape(rows, groups).numpy()
    zero = tensors.get("_weight_zero_point", torch.zeros(rows, groups)).reshape(rows, groups).float().numpy()
    weight = np.empty(codes.shape, dtype=np.float32)
    for n, row in enumerate(codes.float().numpy()):
        for k, code in enumerate(row):
            place = n * rows // codes.shape[0], k * groups // codes.shape[1]
            weight[n, k] = (code - zero[place]) * scale[place]
    return torch.from_numpy(weight)


def detected(tensors, written: dict | str | None) -> Torchao:
    text = written if isinstance(written, str) or written is None else json.dumps(written)
    metadata = {} if text is None else {"m.weight": text}
    return Torchao.detect("m", described("m", tensors), CONFIG | {"__metadata__": metadata})


def check(found: Torchao, tensors) -> None:
    out_features, in_features = tensors["_weight_qdata"].shape
    specs = {spec.name: spec for spec in found.tensor_specs(in_features, out_features)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name].shape for name in tensors
    }
    expected = by_hand(tensors)
    resolved = found.resolve("m", tensors)
    assert torch.equal(resolved.dequantize(tensors), expected)
    for start in range(out_features):
        panel = torch.full((out_features - start, in_features), float("nan"))
        resolved.dequantize_into(panel, tensors, start)
        assert torch.equal(panel, expected[start:])


@pytest.mark.parametrize("scale", [(), (1, 1), (6, 1), (6, 3), (6, 48)], ids=str)
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind, dtypes in KINDS.items() for dtype in dtypes], ids=str
)
def test_the_weight_is_that_of_the_loops(kind, dtype, scale):
    tensors = random_layer(dtype, scale)
    check(
        detected(
            tensors, schema(kind, tensors["_weight_qdata"].shape, tensors["_weight_scale"].shape, False)
        ),
        tensors,
    )


@pytest.mark.parametrize("scale", [(6, 1), (6, 3)], ids=str)
def test_zero_points_are_taken_off_first(scale):
    tensors = random_layer(torch.int8, scale, has_zero=True)
    check(
        detected(tensors, schema("IntxUnpackedToInt8Tensor", tensors["_weight_qdata"].shape, scale, True)),
        tensors,
    )


LOST = {
    "no entry": None,
    "an empty text": "",
    "no json": "{",
    "a list": "[]",
    "a number": "5",
    "deeply nested": "[" * 100_000,
}


@pytest.mark.parametrize("text", LOST.values(), ids=LOST)
def test_a_file_that_lost_its_metadata_is_refused_by_name(text):
    tensors = random_layer(torch.int8, (6, 1))
    with pytest.raises(
        FormatError,
        match=r"(?s)metadata of a torchao file is missing. Nothing was loaded.*m\.weight.*Fix: Download the original",
    ):
        detected(tensors, text)


@pytest.mark.parametrize("metadata", [None, {}, {"other.weight": "{}"}], ids=str)
def test_a_module_that_the_metadata_leaves_out_is_refused(metadata):
    config = CONFIG if metadata is None else CONFIG | {"__metadata__": metadata}
    with pytest.raises(FormatError, match="metadata of a torchao file is missing"):
        Torchao.detect("m", described("m", random_layer(torch.int8, (6, 1))), config)


def test_a_model_whose_file_lost_its_metadata_is_refused_before_anything_is_loaded(tmp_path):
    weight_format = Torchao(scale_shape=(2, 1))
    path = tiny_models.write_model(
        tmp_path, tiny_models.model_tensors(weight_format), CONFIG | {"quant_type": {"default": {}}}
    )
    with pytest.raises(
        FormatError,
        match=r"(?s)metadata of a torchao file is missing. Nothing was loaded.*model.safetensors.*model.layers.0",
    ):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig())


@pytest.mark.parametrize(
    "kind", ["Int4Tensor", "AffineQuantizedTensor", "Tensor", "", None, ["Int8Tensor"]], ids=str
)
def test_a_tensor_of_a_kind_that_hfq_does_not_read_is_refused_by_its_kind(kind):
    tensors = random_layer(torch.int8, (6, 1))
    with pytest.raises(
        FormatError, match=r"(?s)unsupported type. Nothing was loaded.*Float8Tensor or Int8Tensor"
    ):
        detected(
            tensors, schema("Int8Tensor", torch.Size((6, 48)), torch.Size((6, 1)), False) | {"_type": kind}
        )


@pytest.mark.parametrize(
    ("kind", "dtype"), [("Float8Tensor", torch.int8), ("Int8Tensor", torch.float8_e4m3fn)], ids=str
)
def test_codes_of_another_kind_than_the_metadata_says_are_refused(kind, dtype):
    tensors = random_layer(dtype, (6, 1))
    with pytest.raises(FormatError, match=rf"(?s)unsupported type. Nothing was loaded.*found: {kind}"):
        detected(tensors, schema(kind, torch.Size((6, 48)), torch.Size((6, 1)), False))


@pytest.mark.parametrize("block", [[1, 24], [6, 48], [48, 1], "1, 48", 48, {"n": 1}, [True, 48.5]], ids=str)
def test_blocks_that_contradict_the_scales_are_refused(block):
    tensors = random_layer(torch.int8, (6, 1))
    written = schema("Int8Tensor", torch.Size((6, 48)), torch.Size((6, 1)), False, block_size=block)
    with pytest.raises(
        FormatError, match=r"(?s)metadata of m.weight contradicts its tensors. Nothing was loaded"
    ):
        detected(tensors, written)


def test_zero_points_that_the_metadata_names_must_be_stored():
    tensors = random_layer(torch.int8, (6, 1))
    found = detected(
        tensors, schema("IntxUnpackedToInt8Tensor", torch.Size((6, 48)), torch.Size((6, 1)), True)
    )
    assert "_weight_zero_point" in {spec.name for spec in found.tensor_specs(48, 6) if not spec.optional}


@pytest.mark.parametrize("names", [5, True, 0.5])
def test_names_of_parts_that_are_no_list_are_judged_by_hfq(names):
    tensors = random_layer(torch.int8, (6, 1))
    written = schema("Int8Tensor", torch.Size((6, 48)), torch.Size((6, 1)), False) | {
        "_tensor_data_names": names
    }
    with contextlib.suppress(HfqError):
        check(detected(tensors, written), tensors)


@pytest.mark.parametrize(
    "data", [{"act_quant_kwargs": {"granularity": "PerRow"}}, {"activation_quantization": "int8"}], ids=str
)
def test_activations_that_torchao_would_quantize_are_known(data):
    tensors = random_layer(torch.int8, (6, 1))
    assert detected(
        tensors, schema("Int8Tensor", torch.Size((6, 48)), torch.Size((6, 1)), False, **data)
    ).activation_scheme
    assert (
        detected(
            tensors, schema("Int8Tensor", torch.Size((6, 48)), torch.Size((6, 1)), False)
        ).activation_scheme
        is None
    )


def test_scales_of_no_groups_are_refused():
    tensors = random_layer(torch.int8, (6, 1))
    tensors["_weight_scale"] = tensors["_weight_scale"][:, :0]
    with pytest.raises(FormatError):
        detected(
            tensors, {"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale"]}
        ).tensor_specs(48, 6)
