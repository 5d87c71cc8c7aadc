"""Tests of quantize on load: bytes on every device, peak memory, and cleanup."""

import errno
import gc
import json
import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hfq
from benchmarks.checkpoints import LAYOUTS, make_checkpoint
from hfq import CheckpointError, FormatError, HfqConfig, PlacementError, Recipe, SetupError
from hfq.checkpoint import Checkpoint
from hfq.checkpoint import temporary_file as private
from hfq.formats import FORMATS
from hfq.formats.configs.source_config import source_config
from hfq.loading.loaded_model import loader_of
from hfq.loading.quantize_on_load.requirements import refuse_quantize_on_load
from hfq.machine_profile.probe_models import Architecture
from hfq.recipes.recipe import RECIPE_OPTIONS
from tests.quantization.test_driver_families import FUSED, IDS, MODELS
from tests.support import tiny_models
from tests.support.models import logits

pytest.importorskip("optimum.gptq")
SOURCE = tiny_models.DATA / "tiny-llama"
TOKENS = torch.arange(3, 40)[None]
SMALL = torch.arange(12)[None]
SKIPPED = ["model.layers.1.mlp"]
SPLIT = {"": "cpu", "model.layers.0.mlp": "disk", "model.layers.2": "disk", "lm_head": "disk"}
DEVICES = [None, {"": "disk"}, SPLIT, "auto"]  # "auto" with a limit that puts a part on disk


def config_of(options):
    """Returns the config for options of `HfqConfig` and of a recipe."""
    recipe = {name: value for name, value in options.items() if name in RECIPE_OPTIONS}
    others = {name: value for name, value in options.items() if name not in RECIPE_OPTIONS}
    return HfqConfig(quantize_weights=Recipe(**recipe) if recipe else None, **others)


def load(path, device_map=None, folder=None, max_memory=None, **options):
    return AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=config_of(options),
        device_map=device_map,
        offload_folder=folder,
        max_memory=max_memory,
    )


def private_files():
    """Returns the bytes of each unnamed file that this process holds open, by inode.

    A memory map holds its own descriptor.
    """
    gc.collect()
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target, status = (
                os.readlink(f"/proc/self/fd/{descriptor}"),
                os.stat(f"/proc/self/fd/{descriptor}"),
            )
        except OSError:
            continue
        if "memfd:hfq-packed" in target or ("(deleted)" in target and "/offload" in target):
            found[status.st_ino] = status.st_size
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_models.write_model(
        tmp_path_factory.mktemp("floats"), tiny_models.model_tensors(FORMATS["dense"]()), None
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The output of `hfq quantize --method rtn` for the trained model."""
    folder = tmp_path_factory.mktemp("written") / "rtn"
    hfq.quantize(
        SOURCE, Recipe("rtn", bits=3, group_size=64), output_dir=folder, modules_to_not_convert=SKIPPED
    )
    return folder


@pytest.fixture(scope="module")
def expected(written):
    return logits(load(written), TOKENS)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "offload").mkdir()
    return tmp_path / "offload"


@pytest.mark.parametrize("device_map", DEVICES, ids=str)
def test_every_home_gets_the_bytes_that_quantize_writes(written, expected, device_map, folder, tmp_path):
    before = private_files()
    nbytes = sum(info.nbytes for info in Checkpoint.open(written).tensors.values())
    limit = {"cpu": nbytes * 19 // 20} if device_map == "auto" else None
    model = load(
        SOURCE, device_map, folder, limit, method="rtn", bits=3, group_size=64, modules_to_not_convert=SKIPPED
    )
    assert torch.equal(logits(model, TOKENS), expected)
    assert not list(folder.iterdir())
    devices = {loader_of(model).devices[name] for name in loader_of(model).quantized}
    assert devices == (
        {"cpu"} if device_map is None else {"disk"} if device_map == {"": "disk"} else {"cpu", "disk"}
    )
    assert len(private_files().keys() - before.keys()) == len(devices)
    model.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(written)
    configs = [
        json.loads((path / "config.json").read_text())["quantization_config"]
        for path in (tmp_path / "saved", written)
    ]
    assert configs[0] == configs[1]
    assert (tmp_path / "saved" / "quantize_config.json").read_text() == (
        written / "quantize_config.json"
    ).read_text()
    del model
    assert private_files() == before


@pytest.mark.parametrize(
    "options",
    [
        {"method": "fp8"},
        {"method": "mxfp4"},
        {"method": "w8a8"},
        {"method": "w8a16"},
        {"method": "w4a16"},
        {"method": "rtn", "group_size": -1, "sym": False},
    ],
    ids=str,
)
def test_every_method_that_needs_no_calibration_packs_while_loading(small, options, folder, tmp_path):
    hfq.quantize(small, Recipe(**options), output_dir=tmp_path / "written")
    model = load(small, {"": "cpu", "model.layers.1": "disk"}, folder, **options)
    assert torch.equal(logits(model, SMALL), logits(load(tmp_path / "written"), SMALL))
    model.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(tmp_path / "written")
    assert source_config(Checkpoint.open(tmp_path / "saved")) == loader_of(model).quantizing.source


def test_a_config_that_names_hfq_packs_as_well(small):
    config = hfq.pretrained_config(small, HfqConfig(quantize_weights=Recipe("fp8")))
    model = AutoModelForCausalLM.from_pretrained(small, config=config)
    assert torch.equal(logits(model, SMALL), logits(load(small, method="fp8"), SMALL))


@pytest.fixture
def family(tmp_path, kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**MODELS, **FUSED}[kind], tie_word_embeddings=kind == "opt")
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(tmp_path / "floats")
    return tmp_path / "floats"


@pytest.mark.parametrize("kind", ["gpt2", "opt", "mixtral"])
def test_biases_transposed_layers_and_experts_are_packed_as_quantize_packs_them(
    family, kind, folder, tmp_path
):
    options = {"method": "rtn", "bits": 8, "group_size": 32}
    options |= {"modules_to_not_convert": ["experts.1", "q_proj"]} if kind == "mixtral" else {}
    config = config_of(options)
    skipped = config.modules_to_not_convert
    hfq.quantize(family, config.recipe, tmp_path / "written", modules_to_not_convert=skipped)
    expected = logits(load(tmp_path / "written"), IDS)
    model = load(family, {"": "disk" if kind == "mixtral" else "cpu"}, folder, **options)
    assert torch.equal(logits(model, IDS), expected)
    model.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(tmp_path / "written")


@pytest.mark.parametrize("kind", ["gpt_oss"])
def test_experts_that_are_stored_as_one_tensor_are_refused_or_left_dense(family, kind):
    with pytest.raises(
        SetupError, match=r"(?s)experts, in one tensor.*modules_to_not_convert=\['mlp.experts'\]"
    ):
        load(family, method="rtn", group_size=32)
    model = load(family, method="rtn", group_size=32, modules_to_not_convert=["mlp.experts"])
    assert len(loader_of(model).quantized) == 2 * 4
    assert torch.isfinite(logits(model, IDS)).all()


def test_one_layer_at_a_time_is_in_memory(tmp_path, folder):
    """The peak while 78 MB of bfloat16 are quantized is the memory that stays, plus 32 MB.

    The offload buffer or the quantized model stays.
    """
    architecture = Architecture(512, 8)
    source = make_checkpoint(tmp_path, architecture, "bf16")
    floats = sum(tensor.nbytes for tensor in architecture.tensors(LAYOUTS["bf16"]).values())
    load(SOURCE, {"": "disk"}, folder, method="w4a16")  # imports and compiles everything once
    for device_map in ({"": "disk"}, {"": "cpu"}):
        gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("the system does not reset the peak of a process")
        before = _status("VmRSS")
        model = load(source, device_map, folder, method="w4a16")
        peak, loading = _status("VmHWM") - before, loader_of(model)
        allowed = (32 << 20) + (
            loading.offloader.buffer_nbytes if loading.offloader else loading.plan.resident_nbytes()
        )
        print(f"{device_map}: {peak / 2**20:.1f} MiB at the peak, {allowed / 2**20:.1f} allowed")
        assert peak < allowed < floats
        del model, loading


def _status(field):
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


REFUSED = [
    ({"method": "gptq"}, {}, SetupError, r"quantize_weights='gptq', which needs calibration data"),
    ({"method": "qmoe"}, {}, SetupError, "sizes that depend on the weights"),
    ({"method": "rtn"}, {"tp_plan": "auto"}, SetupError, "tensor parallelism"),
    ({"method": "rtn", "cpu_memory": "shared"}, {}, SetupError, "cpu_memory='shared'"),
    ({"method": "rtn", "cpu_memory": "private"}, {}, SetupError, "cpu_memory='private'"),
    ({"method": "rtn", "group_size": 96}, {}, FormatError, "cannot hold layers"),
    ({"method": "rtn", "modules_to_not_convert": ["mpl"]}, {}, SetupError, "matches nothing"),
    ({"method": "rtn", "modules_to_not_convert": ["layers"]}, {}, SetupError, "No layer is left"),
    ({"method": "rtn"}, {"device_map": {"": "disk"}}, PlacementError, r"without offload_folder"),
    (
        {"method": "rtn"},
        {"device_map": {"": "disk"}, "offload_folder": "/dev/null/folder"},
        CheckpointError,
        "could not be written",
    ),
]


@pytest.mark.parametrize(("options", "arguments", "error", "named"), REFUSED, ids=str)
def test_what_cannot_be_packed_is_refused_by_name(options, arguments, error, named):
    with pytest.raises(error, match=named) as refusal:
        AutoModelForCausalLM.from_pretrained(SOURCE, quantization_config=config_of(options), **arguments)
    assert refusal.value.fix


def test_under_deepspeed_zero_3_is_refused_and_memory_that_nothing_maps_is_given_back(small):
    """DeepSpeed casts tensors separately, so the flat buffers are copies of the private files."""
    pytest.importorskip("deepspeed")
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    with pytest.raises(SetupError, match="ZeRO-3"):
        load(small, method="fp8")
    del alive
    alive, before = (
        HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}),
        private_files(),
    )
    model = load(small, method="fp8")
    assert {before.get(inode, size) for inode, size in private_files().items()} - {*before.values()} == {0}
    del alive
    assert torch.equal(logits(model, SMALL), logits(load(small, method="fp8"), SMALL))


@pytest.mark.parametrize("name", ["tiny-llama-gptq", "tiny-llama-fp8"])
def test_what_is_quantized_already_is_refused(name):
    with pytest.raises(FormatError, match=r"This one is quantized. Nothing was loaded"):
        load(tiny_models.DATA / name, method="rtn", group_size=32)


def test_codes_that_no_config_names_are_refused(tmp_path):
    tiny_models.write_model(tmp_path, tiny_models.model_tensors(FORMATS["fp8"]()), None)
    with pytest.raises(FormatError, match=r"contains quantized codes. Nothing was loaded"):
        load(tmp_path, method="rtn", group_size=32)


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    tensors = tiny_models.model_tensors(FORMATS["dense"]())
    tensors[f"{tiny_models.FIRST}.weight"][3, 5] = float("inf")
    tiny_models.write_model(tmp_path, tensors, None)
    with pytest.raises(SetupError, match=r"(?s)not finite.*layers\.0\.self_attn\.q_proj"):
        load(tmp_path, method="fp8")


def test_a_disk_without_room_is_found_before_anything_is_packed(folder, monkeypatch):
    usage = private.shutil.disk_usage(folder)
    monkeypatch.setattr(private.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"(?s)too little free space.*1,000 bytes free.*offload_folder"):
        load(SOURCE, {"": "disk"}, folder, method="fp8")


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = private_files()
    monkeypatch.setattr(private.os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left"):
        load(SOURCE, {"": "disk"}, folder, method="fp8")
    assert private_files() == before
    assert not list(folder.iterdir())


def test_a_file_system_without_nameless_files_gets_one_whose_name_is_taken_away(
    folder, monkeypatch, expected
):
    monkeypatch.setattr(private, "_WITHOUT_NAME", 0)
    model = load(
        SOURCE, {"": "disk"}, folder, method="rtn", bits=3, group_size=64, modules_to_not_convert=SKIPPED
    )
    assert not list(folder.iterdir())
    assert torch.equal(logits(model, TOKENS), expected)


def test_direct_reads_and_checksums_work_on_private_files(folder, expected):
    options = {"method": "rtn", "bits": 3, "group_size": 64, "modules_to_not_convert": SKIPPED}
    model = load(SOURCE, {"": "disk"}, folder, disk_io="direct", disk_checksum="always", **options)
    assert torch.equal(logits(model, TOKENS), expected)
    assert torch.equal(logits(model, TOKENS), expected)


def test_loads_that_cannot_pack_refuse_the_method():
    refuse_quantize_on_load(HfqConfig(), "hfq.fms.load")
    with pytest.raises(
        SetupError, match=r"(?s)hfq\.fms\.load does not quantize on load.*quantize_weights='fp8'"
    ):
        refuse_quantize_on_load(HfqConfig(quantize_weights=Recipe("fp8")), "hfq.fms.load")
