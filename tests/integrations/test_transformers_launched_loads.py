"""Loads of programs that do not name hfq, with hfq enabled by the environment."""

import json
import shutil
import threading

import huggingface_hub.constants
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils.quantization_config import GPTQConfig

from hfq import HfqConfig, pretrained_config
from hfq.errors import CheckpointError, FormatError, PlacementError, SetupError
from hfq.integrations.transformers import launched_loads
from hfq.integrations.transformers.launched_loads import LaunchOptions
from hfq.integrations.transformers.load_lock import one_load
from hfq.launch_environment import CONFIG, ENABLE, RECORD
from tests.support import tiny_models
from tests.support.fake_hub import FakeHub, running
from tests.support.gguf_models import write_random_llama
from tests.support.models import logits

FP8 = str(tiny_models.DATA / "tiny-llama-fp8")
GPTQ, FLOAT = str(tiny_models.DATA / "tiny-llama-gptq"), str(tiny_models.DATA / "tiny-llama")
PARTS = {"": "cpu", "model.layers.1": "disk"}
TOKENS = torch.arange(12).reshape(1, 12)


@pytest.fixture
def enable(monkeypatch):
    """enable(**options): enables hfq with these options for every load."""

    def enable(**options):
        monkeypatch.setenv(ENABLE, "1")
        monkeypatch.setenv(CONFIG, json.dumps(options))

    return enable


def method(model):
    return getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)


@pytest.mark.parametrize("owner", [AutoModelForCausalLM, LlamaForCausalLM])
def test_a_quantized_checkpoint_loads_with_the_options(enable, capsys, tmp_path, monkeypatch, owner):
    expected = logits(LlamaForCausalLM.from_pretrained(GPTQ, quantization_config=HfqConfig()), TOKENS)
    enable(device_map=PARTS, disk_io="direct")
    (tmp_path / "record").touch()
    monkeypatch.setenv(RECORD, str(tmp_path / "record"))
    model = owner.from_pretrained(GPTQ)
    assert method(model).disk_io == "direct"
    assert torch.equal(logits(model, TOKENS), expected)
    line = f"loaded {GPTQ}: gptq v1 int4 g128 sym; 741 kB on cpu, 116 kB on disk.\n"
    assert capsys.readouterr().err.count(f"hfq: {line}") == 1
    assert (tmp_path / "record").read_text() == line


def test_a_float_checkpoint_stays_with_plain_transformers(enable, capsys):
    enable(device_map="disk")
    model = AutoModelForCausalLM.from_pretrained(FLOAT)
    assert method(model) is None
    line = (
        f"plain transformers loads {FLOAT}: it is not quantized. It does not use device_map of hfq launch.\n"
    )
    assert f"hfq: {line}" in capsys.readouterr().err


def test_quantize_weights_quantizes_float_checkpoints_and_keeps_others(enable, capsys):
    enable(quantize_weights="fp8")
    assert method(AutoModelForCausalLM.from_pretrained(FLOAT)).recipe.method == "fp8"
    assert f"hfq: loaded {FLOAT}: fp8 e4m3" in capsys.readouterr().err
    assert method(AutoModelForCausalLM.from_pretrained(GPTQ)).recipe is None


def test_without_the_variable_nothing_changes(monkeypatch, capsys):
    monkeypatch.setenv(CONFIG, json.dumps({"quantize_weights": "fp8"}))
    monkeypatch.delenv(ENABLE, raising=False)
    assert method(AutoModelForCausalLM.from_pretrained(FLOAT)) is None
    assert "hfq:" not in capsys.readouterr().err


def test_pickled_weights_are_left_to_transformers(enable, tmp_path, capsys):
    enable()
    model = AutoModelForCausalLM.from_pretrained(FLOAT)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))
    assert f"{tmp_path}: hfq could not look at its tensors: " in capsys.readouterr().err


def test_a_gguf_file_loads_with_hfq(enable, tmp_path):
    write_random_llama(tmp_path, "Q4_K")
    arguments = {"pretrained_model_name_or_path": tmp_path, "gguf_file": "model.gguf"}
    expected = LlamaForCausalLM.from_pretrained(**arguments, quantization_config=HfqConfig())
    enable(device_map="disk")
    model = LlamaForCausalLM.from_pretrained(**arguments)
    assert set(model.hf_quantizer.loading.plan.nbytes_by_device()) == {"disk"}
    assert torch.equal(logits(model, TOKENS), logits(expected, TOKENS))


def test_errors_of_auto_classes_stay_those_of_transformers(enable):
    enable()
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSeq2SeqLM.from_pretrained(GPTQ)


def test_a_quantized_checkpoint_that_hfq_cannot_read_is_an_error(enable, tmp_path):
    enable()
    config = AutoConfig.from_pretrained(GPTQ)
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_the_program_s_own_config_wins(enable, capsys):
    enable(device_map="disk", disk_io="direct")
    model = AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=HfqConfig(disk_io="buffered"))
    assert method(model).disk_io == "buffered"
    assert f"hfq: loaded {GPTQ} with the program's own HfqConfig: gptq" in capsys.readouterr().err
    config = pretrained_config(GPTQ, HfqConfig(disk_io="buffered"))
    model = LlamaForCausalLM.from_pretrained(GPTQ, config=config)
    assert method(model).disk_io == "buffered"


def test_a_config_of_the_checkpoint_s_own_method_is_no_other_choice(enable):
    """lm_eval passes the config of the checkpoint again."""
    enable()
    for owner in (AutoModelForCausalLM, LlamaForCausalLM):  # only the first passes a config
        model = owner.from_pretrained(GPTQ, quantization_config=GPTQConfig(bits=4))
        assert isinstance(method(model), HfqConfig)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
            "the program passes quantization_config=BitsAndBytesConfig",
        ),
        ({"load_in_8bit": True}, "the program passes load_in_8bit=True"),
    ],
)
def test_another_method_of_the_program_wins(arguments, reason):
    options = LaunchOptions.of({"quantize_weights": "fp8"})
    assert launched_loads._choose_config(options, FLOAT, arguments) == (None, reason)


def test_a_state_dict_of_the_program_stays_with_plain_transformers(enable, capsys):
    enable(quantize_weights="fp8")
    config = AutoConfig.from_pretrained(FLOAT)
    state = LlamaForCausalLM(config).state_dict()
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)
    assert method(model) is None
    line = "hfq: plain transformers loads LlamaForCausalLM: the program passes state_dict.\n"
    assert line in capsys.readouterr().err


SAID = " The program's {} replaces device_map of hfq launch."


@pytest.mark.parametrize(
    ("program", "used", "said"),
    [
        ({}, PARTS, ""),
        ({"device_map": "auto"}, PARTS, ""),
        ({"device_map": "auto", "max_memory": {}}, PARTS, ""),  # lm_eval without an accelerator
        ({"device_map": {"": "cpu"}}, {"": "cpu"}, SAID.format("device_map={'': 'cpu'}")),
        ({"device_map": PARTS}, PARTS, ""),
        (
            {"device_map": "auto", "max_memory": {"cpu": 9}},
            "auto",
            SAID.format("max_memory={'cpu': 9}"),
        ),
        ({"tp_plan": "auto"}, None, SAID.format("tp_plan='auto'")),
        ({"distributed_config": 2}, None, SAID.format("distributed_config=2")),
    ],
)
def test_explicit_placements_of_the_program_win(program, used, said):
    kwargs = dict(program)
    assert launched_loads._place({"device_map": PARTS}, kwargs) == said
    assert kwargs.get("device_map") == used


def test_zero3_replaces_a_device_map(monkeypatch):
    monkeypatch.setattr(launched_loads, "is_zero3", lambda: True)
    kwargs = {}
    assert launched_loads._place({"device_map": PARTS}, kwargs) == SAID.format("ZeRO-3")
    assert kwargs == {}


def test_limits_of_memory_ask_for_an_automatic_map():
    options = LaunchOptions.of({"max_memory": {"cpu": "1GiB"}, "offload_folder": "/tmp"})
    kwargs = {"device_map": None, "offload_folder": "mine"}
    assert launched_loads._place(options.placement, kwargs) == ""
    assert kwargs == {"device_map": "auto", "max_memory": {"cpu": "1GiB"}, "offload_folder": "mine"}
    kwargs = {"device_map": {"": "cpu"}}
    assert launched_loads._place(options.placement, kwargs).endswith(
        "replaces device_map and max_memory of hfq launch."
    )
    assert kwargs == {"device_map": {"": "cpu"}, "offload_folder": "/tmp"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devcie_map": "disk"}, SetupError, "unknown key 'devcie_map'. Did you mean 'device_map'?"),
        ({"disk_io": "fast"}, SetupError, "disk_io='fast' is not valid."),
        ({"quantize_weights": "fp9"}, SetupError, "fp9"),
        ({"device_map": "dsk"}, PlacementError, "dsk"),
        ({"max_memory": {"cpu": "8"}}, SetupError, "max_memory['cpu'] is not a size."),
        ({"max_memory": {"7": "8GiB"}}, PlacementError, "max_memory[7]"),
        ({"max_memory": {"²": "8GiB"}}, SetupError, "max_memory has the key '²', which is not a device."),
        ({"max_memory": 5}, SetupError, "from_pretrained(max_memory=…) is not a dict."),
        ({"offload_folder": 5}, SetupError, "offload_folder is not a path."),
    ],
)
def test_wrong_options_are_errors_of_the_load(enable, options, error, message):
    enable(**options)
    with pytest.raises(error) as raised:
        AutoModelForCausalLM.from_pretrained(GPTQ)
    assert message in str(raised.value)
    assert "\nFix: " in str(raised.value)


def test_declared_and_detected_checkpoints_are_quantized(tmp_path):
    assert launched_loads._look("organization/model", {"gguf_file": "model.gguf"}) == ({}, "")
    folder = shutil.copytree(GPTQ, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    for side_file in folder.glob("quant*_config.json"):
        side_file.unlink()
    assert launched_loads._look(folder, {}) == ({}, "")
    assert launched_loads._look(tmp_path, {"subfolder": "model"}) == ({}, "")
    assert launched_loads._look(FLOAT, {}) == (None, "")
    unseen = "hfq could not look at its tensors: There is no checkpoint at this path"
    assert launched_loads._look(tmp_path / "nowhere", {}) == (None, unseen)


def test_a_hub_id_without_an_organization_is_said_to_be_one(hub):
    unseen = "hfq could not look at its tensors: on the Hub, it only looks at models named organization/model"
    assert launched_loads._look("gpt2", {"local_files_only": True}) == (None, unseen)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Hub with a checkpoint that only hf_quant_config.json declares, in a model and in a subfolder of one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folder = shutil.copytree(FP8, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    side_file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(side_file))
    shutil.copytree(folder, tmp_path / "parts" / "text" / "model")
    models = {
        "tests/fp8": folder,
        "tests/parts": tmp_path / "parts",
        "tests/float": tiny_models.DATA / "tiny-llama",
    }
    with running(FakeHub(models), monkeypatch) as started:
        yield started


def test_a_model_on_the_hub_is_quantized_by_its_side_file_and_tensors(hub):
    for kwargs in ({}, {"config": LlamaConfig()}, {"revision": hub.commit("tests/fp8")}):
        chosen, reason = launched_loads._choose_config(LaunchOptions(), "tests/fp8", kwargs)
        assert isinstance(chosen, HfqConfig), reason
    assert launched_loads._look("tests/fp8", {}) == ({"quant_method": "modelopt", "quant_algo": "FP8"}, "")
    assert hub.sent < (tiny_models.DATA / "tiny-llama-fp8" / "model.safetensors").stat().st_size
    config = {"config": LlamaConfig()}
    reason = launched_loads._choose_config(LaunchOptions(), "tests/float", config)[1]
    assert reason == "it is not quantized"


def test_a_model_on_the_hub_loads_with_hfq(hub, enable, capsys):
    folder = hub.models["tests/fp8"]
    expected = LlamaForCausalLM.from_pretrained(folder, quantization_config=HfqConfig())
    enable(device_map=PARTS)
    for owner in (AutoModelForCausalLM, LlamaForCausalLM):  # the second time from the Hub's cache
        model = owner.from_pretrained("tests/fp8", revision=hub.commit("tests/fp8"))
        assert torch.equal(logits(model, TOKENS), logits(expected, TOKENS))
        assert "hfq: loaded tests/fp8: fp8 e4m3" in capsys.readouterr().err


def test_a_subfolder_on_the_hub_is_looked_at(hub):
    kwargs = {"config": LlamaConfig(), "subfolder": "text/model"}
    chosen, reason = launched_loads._choose_config(LaunchOptions(), "tests/parts", kwargs)
    assert isinstance(chosen, HfqConfig), reason
    asked = hub.answers[:]
    assert asked
    assert all(path.startswith("tests/parts/text/model/") for path, _, _ in asked)
    launched_loads._choose_config(LaunchOptions(), "tests/parts", kwargs)
    assert hub.answers == asked, "the headers were not kept"


def test_the_hub_is_asked_with_the_token_of_the_load(hub):
    hub.token = "right"
    config = {"config": LlamaConfig()}
    chosen, reason = launched_loads._choose_config(LaunchOptions(), "tests/fp8", {**config, "token": "right"})
    assert isinstance(chosen, HfqConfig), reason
    for kwargs in (config, {**config, "token": "wrong"}):
        chosen, reason = launched_loads._choose_config(LaunchOptions(), "tests/fp8", kwargs)
        assert (chosen, reason) == (
            None,
            "hfq could not look at its tensors: The Hub denies access to this model",
        )


def test_a_load_from_the_cache_alone_asks_no_hub(hub, tmp_path):
    commit, folder = hub.commit("tests/fp8"), hub.models["tests/fp8"]
    kwargs = {"config": LlamaConfig(), "local_files_only": True, "cache_dir": tmp_path / "own"}
    chosen, reason = launched_loads._choose_config(LaunchOptions(), "tests/fp8", kwargs)
    assert chosen is None
    assert reason.endswith("The model is not in the Hub's cache, and local_files_only prevents a download")
    cache = tmp_path / "own" / "models--tests--fp8"
    shutil.copytree(folder, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    for revision in (None, "main", commit):
        chosen, reason = launched_loads._choose_config(
            LaunchOptions(), "tests/fp8", {**kwargs, "revision": revision}
        )
        assert isinstance(chosen, HfqConfig), reason
    assert hub.answers == []


def test_pickles_on_the_hub_are_quantized_if_their_config_says_so(hub, tmp_path, monkeypatch):
    (tmp_path / "pickled").mkdir()
    hub.models["tests/pickled"] = tmp_path / "pickled"
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    commit = hub.commit("tests/pickled")
    config, nested = {"model_type": "llama"}, {"quantization_config": {"quant_method": "gptq"}}
    for text, is_quantized in ((config, False), ({**config, "text_config": nested}, True)):
        (tmp_path / "pickled" / "config.json").write_text(json.dumps(text))
        kwargs = {"revision": commit, "cache_dir": tmp_path / str(is_quantized)}
        stored, unseen = launched_loads._look("tests/pickled", kwargs)
        assert (stored is not None) == is_quantized
        assert "neither a safetensors checkpoint nor a GGUF file" in unseen


def test_an_adapter_is_quantized_if_its_base_is(tmp_path):
    for base, is_quantized in ((GPTQ, True), (FLOAT, False), (str(tmp_path), False)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        assert (launched_loads._look(tmp_path, {})[0] is not None) == is_quantized


def test_tensors_that_contradict_the_config_are_quantized(monkeypatch):
    def contradicting(*_):
        raise FormatError("a contradiction", fix="none")

    monkeypatch.setattr(launched_loads, "detect_formats", contradicting)
    assert launched_loads._look(GPTQ, {})[0]["quant_method"] == "gptq"


def test_a_load_of_plain_transformers_waits_for_other_loads(enable):
    enable()
    found = []
    thread = threading.Thread(target=lambda: found.append(AutoModelForCausalLM.from_pretrained(FLOAT)))
    with one_load():
        thread.start()
        thread.join(1)
        assert thread.is_alive()
        assert not found
    thread.join()
    assert torch.equal(logits(found[0], TOKENS), logits(AutoModelForCausalLM.from_pretrained(FLOAT), TOKENS))
