"""Tests of bad input of `hfq.quantize`: each raises an `HfqError`, and no output folder exists."""

import errno
import fcntl
import json
import os
import shutil

import pytest
import torch

import hfq
from hfq import CheckpointError, FormatError, HfqConfig, Recipe, SetupError
from hfq.checkpoint import writer
from hfq.formats import FORMATS
from hfq.quantization import driver
from hfq.quantization.calibration_data import calibrate
from tests.quantization.conftest import SOURCE
from tests.support import tiny_models

GPTQ = Recipe("gptq", group_size=64)
RTN = Recipe("rtn", group_size=64)


def refused(error, named, target, *arguments, **options):
    with pytest.raises(error, match=named) as caught:
        hfq.quantize(*arguments, output_dir=target, **options)
    assert not target.exists() or not list(target.glob("*.safetensors"))
    return caught.value


def made(folder, change=lambda tensors: None):
    """A modified random float model."""
    tensors = tiny_models.model_tensors(FORMATS["dense"]())
    change(tensors)
    return tiny_models.write_model(folder, tensors, None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "gtpq"}, "Did you mean 'gptq'"),
        ({"method": "gptq", "bits": 5}, "bits=5"),
        ({"method": "gptq", "bits": True}, "bits=True"),
        ({"method": "gptq", "group_size": 0}, "group_size=0"),
        ({"method": "gptq", "damp_percent": 0}, "damp_percent=0"),
        ({"method": "gptq", "sym": "no"}, "sym='no'"),
        ({"method": "gptq", "clip_search": 1}, "clip_search=1"),
        ({"method": "gptq", "static_groups": True}, "static_groups"),
        ({"nbits": 4}, "no option 'nbits'"),
        ({"method": "gptq", "sim": True}, "no option 'sim'. Did you mean 'sym'"),
        ({"method": "fp8", "bits": 4}, "method='fp8' has no `bits`"),
        ({"method": "rtn", "desc_act": True}, "method='rtn' has no `desc_act`"),
        ({"method": "mxfp4", "group_size": 16}, "method='mxfp4' has no `group_size`"),
        ({"method": "w4a16", "bits": 8}, "method='w4a16' has no `bits`"),
    ],
)
def test_a_recipe_is_checked_when_it_is_written_down(options, named):
    with pytest.raises(SetupError, match=named):
        HfqConfig(quantize_weights=options)


def test_a_recipe_survives_a_round_trip():
    config = HfqConfig(quantize_weights=Recipe("gptq", bits=3, sym=False))
    assert HfqConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_a_taken_folder_is_left_as_it_is(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    refused(CheckpointError, "cannot be used", tmp_path / "taken", SOURCE, RTN)
    assert [file.name for file in tmp_path.rglob("*")] == ["taken", "file"]
    refused(CheckpointError, "into its source", SOURCE / "within", SOURCE, RTN)
    refused(
        CheckpointError,
        "parent folder of the new checkpoint does not exist",
        tmp_path / "no" / "folder",
        SOURCE,
        RTN,
    )


def test_without_a_method_nothing_is_done(tmp_path):
    refused(SetupError, "requires a recipe", tmp_path / "out", SOURCE, HfqConfig())


def test_a_quantized_source_is_refused(tmp_path):
    refused(FormatError, "already quantized", tmp_path / "out", tiny_models.DATA / "tiny-llama-gptq", RTN)
    shutil.copytree(tiny_models.DATA / "tiny-llama-fp8", tmp_path / "nameless")
    config = json.loads((tmp_path / "nameless" / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "nameless" / "config.json").write_text(json.dumps(config))
    refused(FormatError, "contains quantized codes", tmp_path / "out", tmp_path / "nameless", RTN)


def test_a_model_that_hfq_did_not_load_is_refused(tmp_path):
    refused(SetupError, "not loaded by hfq", tmp_path / "out", torch.nn.Linear(2, 2), RTN)


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_sizes_that_do_not_divide_are_refused_before_anything_is_written(tmp_path, method):
    error = refused(
        FormatError,
        "cannot hold layers",
        tmp_path / "out",
        SOURCE,
        Recipe(method, group_size=96),
        dataset=["x"],
        max_seq_length=1,
    )
    assert not list(tmp_path.iterdir())
    assert error.problems == (
        "[128, 128]: 16 layers, such as model.layers.0.self_attn.q_proj",
        "[384, 128]: 8 layers, such as model.layers.0.mlp.gate_proj",
    )
    dense = ["gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert error.fix == f"Choose another group size or method, or pass modules_to_not_convert={dense}."


@pytest.mark.parametrize(("method", "other"), [("rtn", "group size or method"), ("mxfp4", "method")])
def test_the_fix_for_sizes_that_do_not_divide_leaves_a_layer(method, other):
    with pytest.raises(FormatError) as caught:
        Recipe(method).check_sizes({"layers.0.q_proj": (48, 48), "layers.1.q_proj": (64, 256)})
    assert caught.value.fix == f"Choose another {other}."


def test_a_name_that_is_not_in_the_model_is_refused(tmp_path):
    refused(
        SetupError, "matches nothing", tmp_path / "out", SOURCE, Recipe("rtn"), modules_to_not_convert=["mpl"]
    )
    refused(
        SetupError,
        "No layer is left",
        tmp_path / "out",
        SOURCE,
        Recipe("rtn"),
        modules_to_not_convert=["layers"],
    )


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    source = made(
        tmp_path / "source", lambda tensors: tensors[f"{tiny_models.FIRST}.weight"].fill_(float("inf"))
    )
    refused(SetupError, "not finite", tmp_path / "out", source, RTN)


def test_activations_that_are_not_finite_are_named(tmp_path):
    source = made(
        tmp_path / "source",
        lambda tensors: tensors["model.layers.0.input_layernorm.weight"].fill_(float("nan")),
    )
    refused(
        SetupError,
        "inputs of a layer are not finite",
        tmp_path / "out",
        source,
        GPTQ,
        dataset=[torch.arange(64)[None]],
        num_calibration_samples=1,
        max_seq_length=64,
    )


def test_a_layer_that_no_signal_reaches_is_named(tmp_path):
    source = made(
        tmp_path / "source", lambda tensors: tensors["model.layers.1.input_layernorm.weight"].zero_()
    )
    refused(
        SetupError,
        "No calibration token",
        tmp_path / "out",
        source,
        GPTQ,
        dataset=[torch.arange(64)[None]],
        num_calibration_samples=1,
        max_seq_length=64,
    )


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(driver.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(CheckpointError, "too little free space", tmp_path / "out", SOURCE, RTN)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_meanwhile_leaves_what_is_finished(tmp_path, monkeypatch):
    written, replace = [], writer._replace

    def full(path, parts):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        replace(path, parts)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_replace", full)
        with pytest.raises(
            CheckpointError, match="decoder layers are kept"
        ) as kept:  # a notebook keeps the last error with its frames, too
            hfq.quantize(SOURCE, RTN, output_dir=tmp_path / "out")
    assert len(list((tmp_path / ".out.quantizing").glob("*.safetensors"))) == 2
    assert hfq.quantize(SOURCE, RTN, output_dir=tmp_path / "out").resumed == 1
    assert kept.value.found == "No space left on device"


def test_a_damaged_journal_is_named(tmp_path):
    source = made(tmp_path / "source")
    (tmp_path / ".out.quantizing").mkdir()
    (tmp_path / ".out.quantizing" / ".hfq-journal.json").write_text("{")
    refused(CheckpointError, "journal", tmp_path / "out", source, RTN)


def test_two_processes_do_not_write_into_one_folder(tmp_path):
    (tmp_path / ".out.quantizing").mkdir()
    descriptor = os.open(tmp_path / ".out.quantizing", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # locks of one process exclude each other, too
    try:
        refused(SetupError, "Another process", tmp_path / "out", SOURCE, RTN)
    finally:
        os.close(descriptor)


class Tokenizer:
    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ([" \n"], {}, "empty"),
        (["short"], {}, "shorter than one sequence"),
        (["ä" * 64], {}, "does not know"),
        ([torch.full((1, 64), 200)], {}, "does not know"),
        ([torch.full((1, 64), -1)], {}, "does not know"),
        ([torch.zeros(1, 8, dtype=torch.int64)], {}, "shorter than one sequence"),
        ([torch.zeros(1, 64)], {}, "neither text nor tokens"),
        ([], {}, "neither text nor tokens"),
        ("no such file", {}, "cannot be read"),
        (["x" * 64], {"length": 0}, "max_seq_length"),
        (["x" * 64], {"samples": -1}, "num_calibration_samples"),
        (["x" * 64], {"longest": 8}, "positions"),
    ],
    ids=str,
)
def test_unusable_calibration_sets_are_named(text, options, named):
    with pytest.raises(SetupError, match=named):
        calibrate(text, **{"tokenizer": Tokenizer, "vocabulary": 128, "samples": 4, "length": 16, **options})


def test_sequences_are_spread_over_the_text_and_fewer_are_told_of(caplog, tmp_path):
    (tmp_path / "text").write_text("".join(map(chr, range(100))))
    found = calibrate(tmp_path / "text", Tokenizer, 128, 3, 10)
    assert found.tokens[:, 0].tolist() == [0, 30, 60]
    assert not caplog.text
    assert len(calibrate(tmp_path / "text", Tokenizer, 128, 20, 10).tokens) == 10
    assert "instead of 20" in caplog.text
    assert [
        len(batch)
        for batch in calibrate([torch.zeros(5, 1000, dtype=torch.int64)], Tokenizer, 1, 5, 1000).batches()
    ] == [
        2,
        2,
        1,
    ]


def test_calibration_is_asked_for(tmp_path):
    refused(SetupError, "requires calibration data", tmp_path / "out", SOURCE, GPTQ)
