"""Tests of conversions that fail: the error names the layer, and no files are left."""

import errno
import json
import os
import shutil
import weakref

import pytest
import torch

from hfq import CheckpointError, FormatError, SetupError
from hfq.checkpoint import Checkpoint, write_safetensors
from hfq.convert import convert_checkpoint, layer_plan
from hfq.convert.integer_codes import plan_gptq
from hfq.convert.layer_plan import NewTensor
from tests.contract.cases import CASES
from tests.support import moe_models, tiny_models
from tests.support.checkpoint_files import refused
from tests.support.reshard_files import assert_nothing_left

ROWS = {case.id: case for case in CASES}
FIRST = tiny_models.FIRST


def write(folder, name, **changed):
    """Writes the checkpoint of a contract case.

    `changed` maps the local name of a tensor in the first layer to a function that changes it.
    """
    case = ROWS[name]
    tensors = tiny_models.model_tensors(case.format)
    for local, change in changed.items():
        tensors[f"{FIRST}.{local}"] = change(tensors[f"{FIRST}.{local}"])
    return tiny_models.write_model(folder, tensors, case.config)


REFUSED = [
    ("gptq-v1-w4-sym", "fp8", "hold", "a format with the same numbers as fp8"),
    ("fp8-block", "gptq", "hold", "a format with the same numbers as gptq"),
    ("bitsandbytes-int8", "gptq", "hold", "bitsandbytes-int8"),
    ("awq-gemm", "gptq", "hold", "awq"),
    ("gptq-planar-w5", "gptq", "q_proj", "2, 3, 4 or 8 bits"),
    ("fp8-channel", "fp8", "weight_scale", "one for each channel"),
    ("fp8-group", "fp8", "weight_scale", "one for each group"),
    ("fp8-tensor", "fp8", "q_proj", "activations that stay floats"),
    ("fp8-modelopt-tensor", "fp8", "q_proj", "activations that stay floats"),
    ("fp8-gptqmodel-reciprocal", "float-quantized", "weight_scale_inv", "scales that divide"),
    ("fp8-fbgemm", "float-quantized", "q_proj", "bounded by 1200"),
    ("pack-quantized-w4", "gptq", "weight_scale", "scales that F16 holds exactly"),
]


@pytest.mark.parametrize(("name", "to", "_", "words"), REFUSED, ids=[f"{row[0]}-{row[1]}" for row in REFUSED])
def test_what_the_target_cannot_hold_is_refused_by_name(tmp_path, name, to, _, words):
    path = write(tmp_path / "source", name)
    with refused("cannot be converted without loss. Nothing was written", words, kind=FormatError) as caught:
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", to)
    assert caught.value.tensor.startswith("model.layers.0.")
    assert caught.value.tensor.endswith(_ if _ != "hold" else "_proj")
    assert_nothing_left(tmp_path)


def test_a_zero_point_of_0_is_refused_for_v1_alone(tmp_path):
    path = write(tmp_path / "source", "gptq-v2-w4-asym", qzeros=lambda zeros: zeros & ~0xF)
    with refused("a zero point of 0", "Fix: Convert to", kind=FormatError, tensor=f"{FIRST}.qzeros"):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "gptq")
    assert_nothing_left(tmp_path)
    convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "pack-quantized")


def test_a_zero_point_that_wraps_in_v1_is_kept_by_others(tmp_path):
    """gptqmodel stores 0 as -1 on the packed word; v2 and pack-quantized store a plain 0."""
    path = write(
        tmp_path / "source",
        "gptq-v1-w4-asym",
        qzeros=lambda zeros: ((zeros + 0x11111111) & ~0xF) - 0x11111111,
    )
    convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "gptq_v2")
    zeros = tiny_models.stored_tensors(tmp_path / "to")[f"{FIRST}.qzeros"]
    assert bool((zeros & 0xF == 0).all())


def test_a_zero_point_of_16_of_autogptq_is_refused(tmp_path):
    case = ROWS["gptq-autogptq-w4"]
    tensors = tiny_models.model_tensors(case.format)
    tensors[f"{FIRST}.qzeros"] = tensors[f"{FIRST}.qzeros"] | 0xF
    config = {**case.config, "sym": False, "meta": {"quantizer": ["autogptq:0.7"]}}
    path = tiny_models.write_model(tmp_path / "source", tensors, config)
    with refused("zero points of at most 15", "found: 16", kind=FormatError, tensor=f"{FIRST}.qzeros"):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "gptq_v2")
    assert_nothing_left(tmp_path)


def test_experts_that_gptqmodel_cut_across_gate_and_up_are_refused(tmp_path):
    """No other format can describe the halves, so its readers would use them as gate and up."""
    scheme = next(scheme for scheme in moe_models.SCHEMES if "halves" in scheme.id)
    path = moe_models.write(scheme, lambda name: False).save(tmp_path / "source")
    with refused(
        "into halves that mix gate and up channels. Nothing was written",
        "interleaved channels",
        kind=FormatError,
    ):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "pack-quantized")
    assert_nothing_left(tmp_path)


def test_activation_order_is_refused_for_compressed_tensors(tmp_path):
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    path = write(tmp_path / "source", "gptq-v2-w4-asym", g_idx=lambda g_idx: g_idx[order])
    with refused("activation order", "actorder='group'", kind=FormatError, tensor=f"{FIRST}.g_idx"):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "pack-quantized")


def test_a_quantized_cache_is_refused(tmp_path):
    case = ROWS["fp8-block"]
    tensors = tiny_models.model_tensors(case.format) | {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    path = tiny_models.write_model(tmp_path / "source", tensors, case.config)
    with refused("a quantized KV cache", kind=FormatError, tensor="model.layers.0.self_attn.k_scale"):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "float-quantized")


def test_codes_that_no_dialect_explains_are_not_copied_as_floats(tmp_path):
    case = ROWS["fp8-block"]
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = tiny_models.model_tensors(case.format) | {experts: torch.zeros(2, 8, 8).to(torch.float8_e4m3fn)}
    path = tiny_models.write_model(tmp_path / "source", tensors, case.config)
    with refused("the codes of a quantized layer", kind=FormatError, tensor=experts):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "float-quantized")


def test_layers_that_differ_are_refused_where_one_setting_is_all_there_is(tmp_path):
    case = ROWS["fp8-autofp8-static"]
    tensors = tiny_models.model_tensors(case.format)
    del tensors[f"{FIRST}.input_scale"]
    path = tiny_models.write_model(
        tmp_path / "source", tensors, {**case.config, "activation_scheme": "dynamic"}
    )
    with refused("one setting for all layers", kind=FormatError):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "fp8")


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("gptq-v1-w4-sym", "gptq"),
        ("gptq-v2-w4-asym", "gptq_v2"),
        ("fp8-block", "fp8"),
        ("fp8-channel", "float-quantized"),
    ],
)
def test_a_checkpoint_that_is_there_already_is_refused(tmp_path, name, to):
    path = write(tmp_path / "source", name)
    with refused("already", kind=SetupError):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", to)


def test_a_mistyped_dialect_is_refused_with_the_nearest(tmp_path):
    path = write(tmp_path / "source", "gptq-v1-w4-sym")
    with refused("Did you mean 'gptq_v2'?", kind=SetupError):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "gptq-v2")


def test_an_unquantized_checkpoint_and_a_damaged_one_are_refused(tmp_path):
    dense = tiny_models.DATA / "tiny-llama"
    with refused("not quantized", kind=FormatError):
        convert_checkpoint(Checkpoint.open(dense), tmp_path / "to", "gptq")
    path = write(tmp_path / "source", "gptq-v1-w4-sym", scales=lambda scales: scales[:1])
    with refused("tensor of a quantized layer contradicts its format", kind=FormatError):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "gptq_v2")
    shutil.rmtree(path)
    path = write(tmp_path / "source", "pack-quantized-w8", weight_packed=lambda words: words[:, :7])
    with refused("do not fit its input", kind=FormatError, tensor=FIRST):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "gptq")
    assert_nothing_left(tmp_path)


def test_a_taken_folder_and_a_full_disk_leave_things_as_they_are(tmp_path, monkeypatch):
    path = write(tmp_path / "source", "gptq-v1-w4-sym")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    with refused("cannot be used", kind=CheckpointError):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "taken", "gptq_v2")

    def allocate(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with refused("Nothing was left behind", "No space left on device", kind=CheckpointError):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "gptq_v2")
    assert_nothing_left(tmp_path, "taken")


@pytest.mark.parametrize("fault", ["other values", "other codes", "other size", "interrupted"])
def test_what_does_not_read_back_is_never_given_the_name(tmp_path, monkeypatch, fault):
    path = write(tmp_path / "source", "gptq-v1-w4-sym")

    def spoiled(layer, is_v1):
        plan = plan_gptq(layer, is_v1)
        if fault == "other codes":  # no check of small tensors finds this
            codes = plan.tensors["qweight"]
            plan.tensors["qweight"] = NewTensor(codes.dtype, codes.shape, lambda: layer.read("qweight") ^ 1)
            return plan
        good = plan.tensors["qzeros"]

        def make():
            if fault == "interrupted":
                raise KeyboardInterrupt
            return good.data() + 1 if fault == "other values" else good.data()[:-1]

        plan.tensors["qzeros"] = NewTensor(good.dtype, good.shape, make)
        return plan

    monkeypatch.setattr("hfq.convert.targets.plan_gptq", spoiled)
    expected = KeyboardInterrupt if fault == "interrupted" else CheckpointError
    with pytest.raises(
        expected,
        match={
            "other values": "does not read back",
            "other codes": "differs from the source's",
            "other size": "another size",
        }.get(fault),
    ):
        convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "gptq_v2")
    assert_nothing_left(tmp_path)


def shard(path):
    """Stores every tensor of a layer in another file than its neighbors."""
    tensors = tiny_models.stored_tensors(path)
    parts = [dict(list(tensors.items())[number::3]) for number in range(3)]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        write_safetensors(
            path / file, {name: tiny_models.as_stored(t) for name, t in part.items()}, {"format": "pt"}
        )
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_layer_split_over_files_is_written_into_one(tmp_path):
    path = write(tmp_path / "source", "gptq-v1-w4-asym")
    whole = shutil.copytree(path, tmp_path / "whole")
    shard(path)
    convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "pack-quantized")
    convert_checkpoint(Checkpoint.open(whole), tmp_path / "one", "pack-quantized")
    assert tiny_models.digests(tmp_path / "to") == tiny_models.digests(tmp_path / "one")
    written = Checkpoint.open(tmp_path / "to")
    assert len(written.headers) == 3
    devices = {}
    for name, info in written.tensors.items():
        devices.setdefault(name.rpartition(".")[0], set()).add(info.range.file)
        assert (
            info.range.offset % torch.empty(0, dtype=tiny_models.torch_dtype(info.dtype)).element_size() == 0
        )
    assert all(len(files) == 1 for files in devices.values())


def test_other_files_are_copied_and_the_old_quantizations_are_not(tmp_path):
    path = shutil.copytree(tiny_models.DATA / "tiny-llama-gptq", tmp_path / "source")
    (path / "quantize_config.json").write_text(json.dumps({"bits": 4}))
    (path / "weights.bin").write_bytes(b"x")
    report = convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "pack-quantized")
    assert report.left_out == ("quantize_config.json", "weights.bin")
    assert (tmp_path / "to" / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (path, tmp_path / "to"))
    assert {**before, "quantization_config": None} == {**after, "quantization_config": None}


def test_no_more_than_some_layers_are_in_memory(tmp_path, monkeypatch):
    path = write(tmp_path / "source", "gptq-v1-w4-asym")
    alive, peaks, read = weakref.WeakSet(), [], layer_plan.read_tensor

    def watched(reader, info):
        tensor = read(reader, info)
        alive.add(tensor.untyped_storage())
        peaks.append(sum(storage.nbytes() for storage in alive))
        return tensor

    monkeypatch.setattr(layer_plan, "read_tensor", watched)
    convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "pack-quantized")
    sizes = {}
    for name, info in Checkpoint.open(path).tensors.items():
        if "_proj" in name:
            sizes[name.rpartition(".")[0]] = sizes.get(name.rpartition(".")[0], 0) + info.nbytes
    assert max(peaks) <= 4 * max(sizes.values()) < sum(sizes.values()) / 2
