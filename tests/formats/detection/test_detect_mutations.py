"""Tests of damaged configs and headers in every format of the contract.

Any damage raises an `HfqError` or leads to a weight of the right shape.
"""

import copy
import functools
import json

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hfq import HfqError
from hfq.formats import detect_formats, tensors_by_module
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.tensor_spec import DTYPE_BITS, ByteRange, TensorInfo
from tests.contract.cases import CASES, REPRESENTATIVES
from tests.support import tiny_models

OUT, IN = 64, 128
MODULE = "model.layers.0.self_attn.q_proj"
KEYS = (
    "quant_method",
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "checkpoint_format",
    "format",
    "meta",
    "dynamic",
    "extra_config",
    "version",
    "weight_block_size",
    "activation_scheme",
    "weight_scale_semantics",
    "activation_scale_ub",
    "config_groups",
    "transform_config",
    "sparsity_config",
    "quant_algo",
    "data_type",
    "packing_format",
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_quant_type",
    "quanto_qmap",
    "type",
    "strategy",
    "num_bits",
    "symmetric",
    "targets",
    "weights",
    "input_activations",
    "block_structure",
    "actorder",
    "scale_fmt",
    "dynamic",
    "_type",
    "_data",
    "block_size",
    "_tensor_data_names",
)
WORDS = (
    "gptq",
    "awq",
    "fp8",
    "compressed-tensors",
    "modelopt",
    "bitsandbytes",
    "torchao",
    "auto-round",
    "mxfp4",
    "gptq_v2",
    "gptq_p",
    "gemm",
    "gemv",
    "static",
    "inverse",
    "block",
    "group",
    "tensor",
    "channel",
    "int",
    "float",
    "nvfp4-pack-quantized",
    "marlin-24",
    "NVFP4",
    "W4A16_AWQ",
    "W8A8_SQ",
    "mx_int",
    "mx_fp",
    "nf4",
    "fp4",
    "Linear",
    "re:.*",
    "re:(",
    MODULE,
    "-:.*q_proj",
    "gptqmodel",
)
LOCALS = (
    *sorted({local for case in CASES for local in case.format.quantize(torch.ones(128, 128))}),
    "bias",
    "g_idx",
    "weight_g_idx",
    "weight_zero_point",
    "SCB",
    "input_scale",
    "weight_global_scale",
    "weight_scale_2",
    "B",
    "s",
    "scaled_zeros",
    "pre_quant_scale",
    "weight.nested_absmax",
    "zero.scale",
    "codes",
    "meta",
    "_weight_act_quant_scale",
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from((-1, 0, 1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 2**31, 2**70, -(2**40))),
    st.sampled_from((0.0, 4.0, 0.5, float("nan"), float("inf"), 1e300)),
    st.sampled_from(WORDS),
    st.text(max_size=4),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS + WORDS), st.text(max_size=3)), inner, max_size=3),
    ),
    max_leaves=4,
)
shapes = st.lists(st.sampled_from((0, 1, 2, 4, 8, 16, 32, 64, 128, 63, 65, 2**40)), max_size=4).map(tuple)


def module_of(case) -> tuple[dict[str, torch.Tensor], dict]:
    """Returns the tensors of one module, its config, and its metadata."""
    return _module_of(case.id)


@functools.cache
def _module_of(id: str) -> tuple[dict[str, torch.Tensor], dict]:
    case = next(case for case in CASES if case.id == id)
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3)) * 0.1
    tensors = case.format.quantize(weight)
    named = {f"{MODULE}.{local}": tensor for local, tensor in tensors.items()}
    hints = {**(case.config or {}), "__metadata__": tiny_models.schemas(named, case.schema)}
    if case.kind:
        hints["quanto_qmap"] = {MODULE: {"weights": case.kind, "activations": "none"}}
    return tensors, hints


def described(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    nbytes = DTYPE_BITS[dtype] // 8
    for size in shape:
        nbytes *= size
    return TensorInfo(f"{MODULE}.{name}", dtype, shape, ByteRange("model.safetensors", 4096, nbytes))


def fits(info: TensorInfo, tensor: torch.Tensor | None) -> bool:
    return (
        tensor is not None and tensor.dtype == torch_dtype(info.dtype) and tuple(tensor.shape) == info.shape
    )


def content(info: TensorInfo, original: torch.Tensor | None) -> torch.Tensor:
    if fits(info, original):
        return original
    generator = torch.Generator().manual_seed(info.nbytes)
    return (
        torch.randint(0, 256, (info.nbytes,), dtype=torch.uint8, generator=generator)
        .view(torch_dtype(info.dtype))
        .view(info.shape)
    )


def judge(case, infos: dict[str, TensorInfo], config: dict) -> None:
    """Loads a damaged module until it raises an HfqError or returns a weight of the right shape."""
    tensors = module_of(case)[0]
    try:
        modules = tensors_by_module({info.name: info for info in infos.values()})
        for module, found in detect_formats(modules, config).items():
            found.describe()
            sized = found.sized(IN, OUT)
            specs = {spec.name: spec for spec in sized.tensor_specs(IN, OUT)}
            sized.describe()
            stored = modules[module]
            required = {name for name, spec in specs.items() if not spec.optional}
            matching = {
                name
                for name, info in stored.items()
                if name in specs and info.dtype in specs[name].dtypes and info.shape == specs[name].shape
            }
            if (
                module != MODULE
                or not required <= matching
                or matching != stored.keys()
                or max(stored[n].nbytes for n in stored) > 1 << 20
            ):
                continue
            contents = {name: content(info, tensors.get(name)) for name, info in stored.items()}
            resolved = sized.resolve(module, contents)
            assert resolved.shape(contents) == (OUT, IN)
            assert resolved.dequantize(contents).shape == (OUT, IN)
    except HfqError:
        return


def paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    if isinstance(value, list):
        for index in range(len(value)):
            yield from paths(value[index], (*path, index))


def damaged_config(data, config: dict) -> dict:
    config = copy.deepcopy(config)
    metadata = config["__metadata__"]
    if metadata and data.draw(st.booleans(), label="in the metadata"):
        key = f"{MODULE}.weight"
        schema = replaced(data, json.loads(metadata[key]))
        metadata[key] = json.dumps(schema)
        return config
    changed = replaced(data, {key: value for key, value in config.items() if key != "__metadata__"})
    return {**changed, "__metadata__": metadata} if isinstance(changed, dict) else config


def replaced(data, config):
    """Returns the config with one value replaced at any depth, or one key added."""
    path = data.draw(st.sampled_from(list(paths(config))), label="path")
    owner = config
    for step in path[:-1]:
        owner = owner[step]
    value = data.draw(values, label="value")
    target = owner[path[-1]] if path else owner
    if isinstance(target, dict):
        target[data.draw(st.sampled_from(KEYS), label="key")] = value
    else:
        owner[path[-1]] = value
    return config


def damaged_headers(data, infos: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    infos = dict(infos)
    name = data.draw(st.sampled_from(sorted(infos)), label="tensor")
    info = infos[name]
    kind = data.draw(st.sampled_from(("dtype", "shape", "size", "drop", "rename", "duplicate")), label="kind")
    if kind == "dtype":
        infos[name] = described(
            name, data.draw(st.sampled_from(sorted(set(DTYPE_BITS) - {"F4"}))), info.shape
        )
    elif kind == "shape":
        infos[name] = described(name, info.dtype, data.draw(shapes))
    elif kind == "size" and info.shape:
        place = data.draw(st.integers(0, len(info.shape) - 1))
        size = data.draw(
            st.sampled_from((0, 1, info.shape[place] // 2, info.shape[place] + 1, info.shape[place] * 2))
        )
        infos[name] = described(name, info.dtype, (*info.shape[:place], size, *info.shape[place + 1 :]))
    elif kind in ("drop", "rename") and len(infos) > 1:
        del infos[name]
    if kind in ("rename", "duplicate"):
        other = data.draw(st.sampled_from(LOCALS))
        infos[other] = described(other, info.dtype, info.shape)
    return infos


by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
by_format = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.id in REPRESENTATIVES else pytest.mark.slow) for case in CASES],
    ids=lambda case: case.id,
)
few = settings(
    max_examples=50, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@by_case
def test_the_module_as_it_is_comes_through(case):
    tensors, config = module_of(case)
    infos = tiny_models.described(MODULE, tensors)
    found = detect_formats(tensors_by_module({info.name: info for info in infos.values()}), config)
    assert type(found[MODULE]) is type(case.format)
    judge(case, infos, config)


@by_format
@few
@given(data=st.data())
def test_a_damaged_config_is_judged_by_hfq_alone(case, data):
    tensors, config = module_of(case)
    changed = damaged_config(data, config)
    assume(changed != config)
    judge(case, tiny_models.described(MODULE, tensors), changed)


@by_format
@few
@given(data=st.data())
def test_damaged_headers_are_judged_by_hfq_alone(case, data):
    tensors, config = module_of(case)
    infos = tiny_models.described(MODULE, tensors)
    changed = infos
    for _ in range(data.draw(st.integers(1, 2))):
        changed = damaged_headers(data, changed)
    assume(changed != infos)
    judge(case, changed, config)


@by_format
@few
@given(data=st.data())
def test_both_at_once_are_judged_by_hfq_alone(case, data):
    tensors, config = module_of(case)
    judge(case, damaged_headers(data, tiny_models.described(MODULE, tensors)), damaged_config(data, config))
