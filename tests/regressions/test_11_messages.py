"""Tests that an error names its cause, and that its fix works."""

import errno
import os
import re

import pytest
import torch
import transformers
from typer.testing import CliRunner

import hfq
from hfq import CheckpointError, HfqConfig, PlacementError, SetupError
from hfq.checkpoint import Checkpoint
from hfq.cli.main import app, main
from hfq.errors import error_of_limit
from hfq.kernels.cuda import triton_linear
from hfq.placement.estimate.estimate import Workload, estimate_placement
from hfq.placement.estimate.hardware import Hardware, parse_size
from hfq.placement.estimate.profile import PUBLISHED
from tests.placement.estimate.test_estimate import MIB, SIZES
from tests.support import tiny_models
from tests.support.models import GPTQ, load, logits

FLOATS = str(tiny_models.DATA / "tiny-llama")
TOKENS = torch.arange(8)[None]


def refused(**arguments):
    """Returns the error of a load with these arguments of `from_pretrained`."""
    with pytest.raises((SetupError, PlacementError, CheckpointError)) as caught:
        transformers.AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=HfqConfig(), **arguments)
    return caught.value


def printed(capsys, *arguments):
    """Returns what `hfq` prints about an error."""
    with pytest.raises(SystemExit):
        main(list(map(str, arguments)))
    return capsys.readouterr().err


def test_a_tensor_that_ends_within_a_byte_is_named_by_its_elements(tmp_path):
    header = b'{"x":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(CheckpointError, match="does not end at a whole byte") as caught:
        Checkpoint.open(tmp_path)
    assert (caught.value.expected, caught.value.found) == ("a multiple of 2 elements", "3 elements of F4 [3]")


def test_a_hint_ends_its_sentence_once():
    with pytest.raises(SetupError) as caught:
        load(modules_to_not_convert=["lmhead"])
    assert caught.value.message.endswith("in the model. Did you mean 'lm_head'? Nothing was loaded.")


@pytest.mark.parametrize(("text", "hint"), [("24QB", ""), ("24BY", ""), ("24GBB", " Did you mean 'GB'?")])
def test_a_unit_is_never_corrected_to_bytes(text, hint):
    with pytest.raises(PlacementError) as caught:
        parse_size(text, "--cpu")
    assert caught.value.message == f"--cpu {text} is not a size.{hint}"


def test_no_way_out_is_longer_than_the_model(capsys):
    fix = printed(capsys, "plan", GPTQ, "--cpu", "5MB").rpartition("Fix: ")[2]
    assert "--max-model-len 256;" in fix


def test_what_does_not_fit_is_not_called_a_part_of_what_is_there():
    with pytest.raises(PlacementError) as caught:
        estimate_placement(SIZES, Hardware(cpu=9 * MIB), Workload(1, 4096), PUBLISHED)
    assert caught.value.found == f"{9 * MIB:,} B on cpu"
    assert re.match(r"weights, and [\d,]+ B of KV cache and [\d,]+ B of activations", caught.value.expected)


def test_a_machine_without_a_gpu_is_not_sent_to_install_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_linear.reason_missing() == "this machine has no CUDA device"


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--method", "awq"), ("--method awq requires", "in --dataset", "without --distill-steps")),
        (("--method", "fp8", "--bits", "4"), ("--method fp8 has no --bits", "Remove --bits")),
        (("--bits", "99"), ("--bits 99 is not", "expected: 2, 3", "value for --bits")),
        (("--method", "rtn", "--group-size", "96"), ("--method rtn cannot hold", "--modules-to-not-convert")),
        (("--method", "rtn", "--modules-to-not-convert", "x"), ("--modules-to-not-convert names 'x'",)),
    ],
    ids=lambda arguments: " ".join(arguments) if arguments[0].startswith("--m") else "",
)
def test_an_error_of_a_verb_names_options_as_typed(arguments, texts, tmp_path, capsys):
    error = printed(capsys, "quantize", FLOATS, tmp_path / "out", *arguments)
    assert all(text in error for text in texts), error
    own = re.sub(r"  tensor: .*|such as \S+|--modules-to-not-convert \w+", "", error)
    assert not re.search(r"\w=|[a-z]_[a-z]", own)


def test_every_verb_names_options_as_typed(capsys):
    error = printed(capsys, "plan", GPTQ, "--zero-stage", "2", "--offload-param-device", "cpu")
    assert "omit --offload-param-device" in error
    error = printed(capsys, "evaluate", FLOATS, "--text", __file__, "--device-map", '{"model": "cpu"}')
    assert "--device-map does not cover" in error


@pytest.mark.parametrize(
    ("typed", "verb"), [("info", "inspect"), ("eval", "evaluate"), ("verify", "compare")]
)
def test_a_verb_of_another_tool_gets_a_suggestion(typed, verb):
    done = CliRunner().invoke(app, [typed, str(GPTQ)])
    assert done.exit_code == 2
    assert f"Did you mean '{verb}'?" in done.stderr


def test_a_hub_id_that_a_function_takes_for_a_folder_gets_the_command_that_downloads_it(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        hfq.quantize("org/model", hfq.Recipe("rtn"), tmp_path / "out")
    assert "hf download org/model --local-dir org/model" in caught.value.fix


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_in_4bit": True}, "from_pretrained(load_in_4bit=…) cannot be used with HfqConfig."),
        ({"dtype": "fp16"}, "from_pretrained(dtype='fp16') names no dtype of torch. Did you mean 'float16'?"),
        ({"device_mp": "auto"}, "from_pretrained has no argument device_mp. Did you mean 'device_map'?"),
        ({"device_map": "auto", "max_memory": {"cpu": "700000"}}, "max_memory['cpu'] is not a size."),
        ({"device_map": "auto", "max_memory": {"gpu": "1GB"}}, "max_memory has the key 'gpu'"),
        ({"device_map": "auto", "max_memory": ["1GB"]}, "from_pretrained(max_memory=…) is not a dict."),
        ({"offload_folder": 5}, "offload_folder is not a path."),
        ({"offload_folder": ""}, "offload_folder is not a path."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_not_blamed_on_the_config(arguments, message):
    error = refused(**arguments)
    assert error.message.startswith(message)
    assert "config.json" not in str(error)


def test_an_argument_that_transformers_refuses_is_named():
    assert "correct the argument attn_implementation" in refused(attn_implementation="flash").fix


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_device_may_be_the_whole_device_map(device):
    model = load(device_map=device)
    devices = {str(entry.device) for entry in model.hf_quantizer.loading.plan.entries}
    assert devices == {device}
    assert torch.equal(logits(model, TOKENS), logits(load(), TOKENS))


def test_a_map_with_gaps_lists_modules():
    error = refused(device_map={"model.layers.0": "disk"})
    assert set(error.problems) == {f"model.layers.{i}" for i in (1, 2, 3)} | {
        "model.embed_tokens",
        "model.norm",
        "lm_head",
    }


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
        (FileNotFoundError(f"No such file or directory: {GPTQ / 'model.safetensors'}"), "ulimit -n"),
        (MemoryError(), "Free memory"),
    ],
)
def test_a_used_up_limit_of_the_machine_is_not_blamed_on_the_config(error, remedy, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(transformers.LlamaForCausalLM, "_load_pretrained_model", fail)
    caught = refused()
    assert caught.message == "A limit of this machine or process was reached."
    assert remedy in caught.fix


def test_a_file_that_cannot_be_opened_for_lack_of_descriptors_is_not_blamed_on_its_path(monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("hfq.checkpoint.header.open_regular", fail)
    with pytest.raises(SetupError) as caught:
        Checkpoint.open(GPTQ)
    assert "ulimit -n" in caught.value.fix


def test_a_limit_may_be_the_cause_of_an_error():
    assert error_of_limit(ValueError("wrong")) is None
    outer = RuntimeError("x")
    outer.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert error_of_limit(outer) is not None
