"""Contract tests of formats through `from_pretrained`.

Every placement has the same logits and saves the same bytes, and damage raises an error.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import FormatError
from hfq.checkpoint import Checkpoint
from hfq.cli.inspect import inspect_checkpoint
from tests.support import tiny_models
from tests.support.models import logits

TOKENS = torch.tensor([[1, 5, 9, 60, 33, 2, 7], [1, 90, 4, 4, 17, 80, 3]])
PLACEMENTS = {
    "cpu": {"": "cpu"},
    "half": {"": "cpu", "model.layers.1": "disk", "lm_head": "disk"},
    "disk": {"": "disk"},
    "auto": "auto",
}
ONCE = pytest.mark.once_each_format  # formats do not see the device map or cpu_memory
HALF_AND_ONCE = ["half", *(pytest.param(placement, marks=ONCE) for placement in ("cpu", "disk"))]


@pytest.fixture(scope="session")
def resident(load, checkpoint):
    return logits(load(checkpoint), TOKENS)


@pytest.mark.parametrize(
    "placement", ["half", "disk", *(pytest.param(other, marks=ONCE) for other in ("cpu", "auto"))]
)
def test_every_placement_gives_the_same_logits(load, checkpoint, resident, placement):
    model = load(checkpoint, PLACEMENTS[placement])
    assert torch.equal(logits(model, TOKENS), resident)
    assert torch.equal(logits(model, TOKENS), resident)


@ONCE
@pytest.mark.parametrize("cpu_memory", ["mmap", "private"])
def test_both_backings_give_the_same_logits(load, checkpoint, resident, cpu_memory):
    assert torch.equal(logits(load(checkpoint, cpu_memory=cpu_memory), TOKENS), resident)


def test_the_logits_are_those_of_the_dequantized_weights(detected, load, resident, tensors, tmp_path):
    packed = {f"{module}.{name}" for module, (_, local) in detected.items() for name in local}
    dense = {name: tensor for name, tensor in tensors.items() if name not in packed}
    dense |= {f"{module}.weight": found.dequantize(local) for module, (found, local) in detected.items()}
    plain = AutoModelForCausalLM.from_pretrained(
        tiny_models.write_model(tmp_path / "dense", dense, None), dtype=torch.float32
    )
    # the weights are bit-identical, but products over panels may sum in another order
    assert (logits(plain, TOKENS) - resident).norm() <= 1e-5 * resident.norm()


def test_inspecting_counts_every_packed_module(case, checkpoint, detected):
    report = inspect_checkpoint(Checkpoint.open(checkpoint))
    assert sum(report["formats"].values()) == len(detected) == 14
    if report["bits_per_quantized_weight"] is not None:
        assert (
            case.format.bits_per_code
            <= report["bits_per_quantized_weight"]
            <= case.format.bits_per_code * 2 + 1
        )


@pytest.mark.parametrize("placement", HALF_AND_ONCE)
def test_saving_gives_back_the_bytes(load, checkpoint, resident, required, placement, tmp_path):
    model = load(checkpoint, PLACEMENTS[placement])
    model.to(torch.bfloat16) if placement != "disk" else None
    model.save_pretrained(tmp_path)
    source, saved = tiny_models.digests(checkpoint), tiny_models.digests(tmp_path)
    assert source.keys() == saved.keys()
    packed = [name for name in source if "_proj." in name]
    assert len(packed) >= 14 * min(len(required), 2)
    assert {name: saved[name] for name in packed} == {name: source[name] for name in packed}
    assert torch.equal(logits(load(tmp_path), TOKENS), resident)


@ONCE
def test_layers_that_predict_further_tokens_are_saved_again(case, tensors, load, resident, tmp_path):
    more = {
        name.replace("model.layers.1.", "mtp.0."): t for name, t in tensors.items() if "layers.1." in name
    }
    schemas = tiny_models.schemas(tensors | more, case.schema)
    path = tiny_models.write_model(tmp_path / "source", tensors | more, case.config, schemas, case.kind)
    model = load(path)
    assert torch.equal(logits(model, TOKENS), resident)
    model.save_pretrained(tmp_path / "saved")
    source, saved = tiny_models.digests(path), tiny_models.digests(tmp_path / "saved")
    assert {name: saved[name] for name in more} == {name: source[name] for name in more}


def damaged(tensors, tmp_path, case, name, change) -> str:
    broken = dict(tensors)
    change(broken, name)
    return tiny_models.write_model(
        tmp_path, broken, case.config, tiny_models.schemas(tensors, case.schema), case.kind
    )


@pytest.fixture
def required(detected) -> list[str]:
    return [spec.name for spec in detected[tiny_models.FIRST][0].tensor_specs(128, 128) if not spec.optional]


def test_a_missing_tensor_is_refused_by_name(case, required, tensors, load, tmp_path):
    for local in required:
        name = f"{tiny_models.FIRST}.{local}"
        path = damaged(tensors, tmp_path / local, case, name, lambda t, n: t.pop(n))
        with pytest.raises(FormatError) as caught:
            load(path)
        assert tiny_models.FIRST in str(caught.value), local
        assert "Nothing was loaded" in str(caught.value)


def test_a_renamed_tensor_is_refused_by_both_names(case, required, tensors, load, tmp_path):
    name = f"{tiny_models.FIRST}.{required[:2][-1]}"
    path = damaged(tensors, tmp_path, case, name, lambda t, n: t.__setitem__(f"{n}x", t.pop(n)))
    with pytest.raises(FormatError) as caught:
        load(path)
    # without another tensor, nothing says that the layer is quantized
    missing = name if len(required) > 1 else f"{tiny_models.FIRST}.weight"
    assert f"{missing}: missing" in str(caught.value)
    assert f"{name}x: unexpected" in str(caught.value)


def test_an_extra_tensor_is_refused_by_name(case, tensors, load, tmp_path):
    name = f"{tiny_models.FIRST}.surplus"
    path = damaged(tensors, tmp_path, case, name, lambda t, n: t.__setitem__(n, torch.zeros(4)))
    with pytest.raises(FormatError, match=rf"{name}: unexpected"):
        load(path)


def test_a_wrong_dtype_is_refused_by_name(case, required, tensors, load, tmp_path):
    for local in required:
        name = f"{tiny_models.FIRST}.{local}"
        others = {torch.int32: torch.float32, torch.int8: torch.int32, torch.uint8: torch.int16}
        cast = others.get(tensors[name].dtype, torch.int8)
        path = damaged(
            tensors, tmp_path / local, case, name, lambda t, n, cast=cast: t.__setitem__(n, t[n].to(cast))
        )
        with pytest.raises(FormatError) as caught:
            load(path)
        assert name in str(caught.value), local


def test_a_wrong_shape_is_refused_by_name(case, required, tensors, load, tmp_path):
    for local in required:
        name = f"{tiny_models.FIRST}.{local}"
        longer = lambda t, n: t.__setitem__(n, torch.cat([t[n].reshape(-1, *t[n].shape[1:])] * 3))  # noqa: E731
        path = damaged(tensors, tmp_path / local, case, name, longer)
        with pytest.raises(FormatError) as caught:
            load(path)
        assert tiny_models.FIRST in str(caught.value), local


@pytest.mark.parametrize(
    "device_map", [None, pytest.param({"": "disk"}, marks=ONCE)], ids=["resident", "disk"]
)
def test_a_scale_that_is_not_finite_is_refused_while_loading(
    case, detected, tensors, load, tmp_path, device_map
):
    specs = detected[tiny_models.FIRST][0].tensor_specs(128, 128)
    local = next((spec.name for spec in specs if spec.role == "scale"), None)
    if local is None:
        pytest.skip("its scales are in its blocks")

    def poison(t, n):
        t[n] = t[n].clone()
        tiny_models.poison(t[n].view(-1), -1)

    path = damaged(tensors, tmp_path, case, f"{tiny_models.FIRST}.{local}", poison)
    with pytest.raises(
        FormatError, match=rf"(?s)not finite. Nothing was loaded.*{tiny_models.FIRST}.{local}"
    ):
        load(path, device_map)


def test_an_index_out_of_range_is_refused_while_loading(case, indexed_tensors, load, tmp_path):
    name = f"{tiny_models.FIRST}.g_idx"
    for value in (-1, 10_000):
        path = damaged(
            indexed_tensors,
            tmp_path / str(value),
            case,
            name,
            lambda t, n, value=value: t.__setitem__(n, torch.full_like(t[n], value)),
        )
        with pytest.raises(FormatError, match=rf"(?s)out of range. Nothing was loaded.*{name}"):
            load(path, {"": "disk"})
