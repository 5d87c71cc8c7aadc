"""Configs of conversions from and to GGUF, which the metadata of the file must confirm."""

import json

import pytest
import torch

from hfq import FormatError
from hfq.checkpoint import Checkpoint
from hfq.convert import convert_checkpoint
from hfq.loading.gguf.conversion import check_template, with_model_config
from tests.support import models
from tests.support.checkpoint_files import refused
from tests.support.gguf_files import write_gguf
from tests.support.gguf_models import make_model, write_model

TOKENS = torch.arange(1, 25)[None]


def logits(path, **options):
    return models.logits(models.load(path, kernel="reference", **options), TOKENS)


def rewrite(folder, **changed):
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


def test_without_config_json_it_is_made_of_the_metadata(tmp_path):
    pytest.importorskip("gguf")
    source = write_model(tmp_path / "source", "llama", make_model("llama"))
    (source / "config.json").unlink()
    found = with_model_config(Checkpoint.open(source))
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    convert_checkpoint(found, tmp_path / "packed", "pack-quantized")
    assert torch.equal(logits(tmp_path / "packed", dtype="auto"), logits(source, dtype="auto"))


def test_an_architecture_without_a_tested_config_requires_config_json(tmp_path):
    source = write_model(tmp_path / "source", "gemma", make_model("gemma"))
    (source / "config.json").unlink()
    with refused("requires a config.json next to it", kind=FormatError):
        with_model_config(Checkpoint.open(source))


def test_of_a_multimodal_model_it_is_the_config_of_the_language_model(tmp_path):
    source = write_model(tmp_path / "source", "gemma3", make_model("gemma3"))
    text = json.loads((source / "config.json").read_text())
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "dtype": "float32"}
    (source / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    found = with_model_config(Checkpoint.open(source))
    assert (found.config["model_type"], found.config["architectures"]) == (
        "gemma3_text",
        ["Gemma3ForCausalLM"],
    )
    convert_checkpoint(found, tmp_path / "packed", "pack-quantized")
    assert torch.equal(logits(tmp_path / "packed"), logits(source))


def test_a_config_of_another_model_is_refused(tmp_path):
    source = write_model(tmp_path / "source", "llama", make_model("llama"))
    convert_checkpoint(Checkpoint.open(source), tmp_path / "packed", "pack-quantized")
    check_template(Checkpoint.open(tmp_path / "packed"), Checkpoint.open(source))
    for folder in (source, tmp_path / "packed"):
        rewrite(folder, rms_norm_eps=0.5)
    words = ("contradicts the GGUF file", "rms_norm_eps of the config is 0.5")
    with refused(*words, "Nothing was loaded.", "Fix: Download config.json", kind=FormatError):
        with_model_config(Checkpoint.open(source))
    with refused(*words, "Nothing was written.", "Fix: Pass a GGUF file of this model.", kind=FormatError):
        check_template(Checkpoint.open(tmp_path / "packed"), Checkpoint.open(source))


def test_factors_of_rope_that_the_template_lacks_are_an_error(tmp_path):
    source = write_model(tmp_path / "source", "llama", make_model("llama"))
    convert_checkpoint(Checkpoint.open(source), tmp_path / "packed", "pack-quantized")
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    rewrite(tmp_path / "packed", rope_parameters=rope)
    with refused("template lacks a tensor", kind=FormatError, tensor="rope_freqs.weight"):
        check_template(Checkpoint.open(tmp_path / "packed"), Checkpoint.open(source))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rope.dimension_count", 16, "the config rotates 32 channels"),
        ("attention.scale", 0.25, "the config scales by 0.176777"),
    ],
)
def test_a_template_of_another_attention_is_refused(tmp_path, key, value, words):
    source = write_model(tmp_path / "source", "llama", make_model("llama"))
    convert_checkpoint(Checkpoint.open(source), tmp_path / "packed", "pack-quantized")
    known = Checkpoint.open(source).gguf.keys
    keys = {name: known[name] for name in known if isinstance(known[name], (int, str))}
    found = [
        Checkpoint.open(write_gguf(tmp_path / f"{number}.gguf", keys | {f"llama.{key}": told}, {}))
        for number, told in enumerate((value, {16: 32, 0.25: 32**-0.5}[value]))
    ]
    packed = Checkpoint.open(tmp_path / "packed")
    check_template(packed, found[1])
    with refused("contradicts the GGUF file", f"llama.{key} is {value}", words, kind=FormatError):
        check_template(packed, found[0])


def test_a_type_of_rope_that_no_file_can_tell_is_refused(tmp_path):
    source = write_model(tmp_path / "source", "llama", make_model("llama"))
    convert_checkpoint(Checkpoint.open(source), tmp_path / "packed", "pack-quantized")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    rewrite(tmp_path / "packed", rope_parameters=rope)
    with refused("how this model computes RoPE", "found: dynamic", kind=FormatError):
        check_template(Checkpoint.open(tmp_path / "packed"), Checkpoint.open(source))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TOLD = {"scaling.type": "yarn", "scaling.factor": 4.0}
FACTORS = {"long_factor": [2.0] * 16, "short_factor": [1.0] * 16}


@pytest.mark.parametrize(
    ("rope", "told", "key"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {}, "scaling.type"),
        ({"rope_type": "yarn", "factor": 4.0}, {}, "scaling.type"),
        ({"rope_type": "linear", "factor": 4.0}, {"scaling.type": "linear"}, "scaling.factor"),
        ({"rope_type": "default", "rope_theta": 5e5}, {"freq_base": None}, "freq_base"),
        ({**YARN, "beta_fast": 24.0}, TOLD, "scaling.yarn_beta_fast"),
        ({**YARN, "beta_slow": 2.0}, TOLD, "scaling.yarn_beta_slow"),
        ({**YARN, "attention_factor": 1.0}, TOLD, "scaling.yarn_attn_factor"),
        ({**YARN, "rope_type": "longrope", **FACTORS}, {}, "scaling.attn_factor"),
    ],
)
def test_a_template_that_says_nothing_about_rope_is_an_error(tmp_path, rope, told, key):
    """Readers of the file would compute RoPE without scaling, and with a base of 10000."""
    source = write_model(tmp_path / "source", "llama", make_model("llama"))
    convert_checkpoint(Checkpoint.open(source), tmp_path / "packed", "pack-quantized")
    rewrite(tmp_path / "packed", rope_parameters={"rope_theta": 10000.0, **rope})
    known = Checkpoint.open(source).gguf.keys
    keys = {name: known[name] for name in known if "rope" not in name and isinstance(known[name], (int, str))}
    told = {f"llama.rope.{name}": value for name, value in {"freq_base": 10000.0, **told}.items()}
    keys |= {name: value for name, value in told.items() if value is not None}
    template = Checkpoint.open(write_gguf(tmp_path / "template.gguf", keys, {}))
    with refused("does not say how", f"the key llama.rope.{key}, because", kind=FormatError):
        check_template(Checkpoint.open(tmp_path / "packed"), template)
