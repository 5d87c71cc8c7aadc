"""Templates of GGUF files that are not of the model, and tensors that a file cannot hold."""

import json

import pytest
import torch

from hfq import FormatError, SetupError
from hfq.checkpoint import Checkpoint
from hfq.convert import convert_checkpoint
from tests.contract.cases import CASES
from tests.convert.test_gguf_file import convert, template, write_gptq
from tests.support import tiny_models
from tests.support.checkpoint_files import refused
from tests.support.gguf_files import write_gguf
from tests.support.gguf_models import make_model, write_model
from tests.support.reshard_files import assert_nothing_left

ROWS = {case.id: case for case in CASES}
FIRST = tiny_models.FIRST
OTHER_MODELS = {
    "no tokenizer": ({"tokenizer.ggml.tokens": None}, "metadata with a tokenizer", "no tokenizer"),
    "tokens": ({"tokenizer.ggml.tokens": ["t"] * 95}, "metadata of 96 tokens", "95 tokens, and 128 channels"),
    "width": ({"llama.embedding_length": 64}, "embeddings of 128 channels", "96 tokens, and 64 channels"),
    "more layers": ({"llama.block_count": 3}, "metadata of 2 layers", "3 layers"),
    "fewer layers": ({"llama.block_count": 1}, "model.layers.1.", "those of 1 layers"),
    "architecture": ({"general.architecture": "gpt2", "gpt2.block_count": 2}, "a GGUF file of", "gpt2"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_metadata_of_another_model_are_refused(tmp_path, name):
    changed, expected, found = OTHER_MODELS[name]
    source = write_gptq(tmp_path)
    with refused("template cannot be used", expected, f"found: {found}", kind=FormatError):
        convert(source, tmp_path / "to", "gguf", template(tmp_path, **changed))
    assert_nothing_left(tmp_path, "template")


def test_a_template_with_weights_of_another_size_is_refused(tmp_path):
    source, found = write_gptq(tmp_path), template(tmp_path)
    keys = {
        key: value for key, value in Checkpoint.open(found).gguf.keys.items() if isinstance(value, (int, str))
    }
    norm = {"blk.0.attn_norm.weight": ("F32", (64,), bytes(256))}
    found = write_gguf(found, {**keys, "tokenizer.ggml.tokens": ["t"] * 96}, norm)
    with refused("input_layernorm.weight of (128,)", "found: (64,)", kind=FormatError):
        convert(source, tmp_path / "to", "gguf", found)


def test_a_template_without_the_rows_of_no_token_is_refused_and_one_with_them_is_taken(tmp_path):
    source = write_model(tmp_path / "source", "gemma3", make_model("gemma3", tie_word_embeddings=True))
    convert(source, tmp_path / "packed", "pack-quantized")
    fewer = make_model("gemma3", tie_word_embeddings=True, vocab_size=32)
    fewer = write_model(tmp_path / "fewer", "gemma3", fewer)
    words = ("The template lacks tokens", "metadata of 40 tokens", "found: 32 tokens", "with all 40 tokens")
    with refused(*words, kind=FormatError):
        convert(tmp_path / "packed", tmp_path / "to", "gguf", fewer)
    convert(tmp_path / "packed", tmp_path / "to", "gguf", source)


def test_gguf_takes_a_template_and_other_formats_take_none(tmp_path):
    source = write_gptq(tmp_path)
    with refused("takes a template", "Pass --template FILE.gguf", kind=SetupError):
        convert(source, tmp_path / "to", "gguf")
    other = template(tmp_path, **{"llama.attention.head_count": 3})
    with refused("takes no template", "Leave out --template", kind=SetupError):
        convert(source, tmp_path / "to", "gptq_v2", other)
    with refused("already in format gguf", kind=SetupError):
        convert(write_model(tmp_path / "gguf", "llama", make_model("llama")), tmp_path / "to", "gguf", other)


def test_a_template_is_a_gguf_file_and_agrees_with_the_config(tmp_path):
    source = write_gptq(tmp_path)
    config = json.loads((source / "config.json").read_text())
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    with refused("template cannot be used", "found: safetensors", kind=FormatError):
        convert(source, tmp_path / "to", "gguf", source)
    with refused("template lacks a tensor", kind=FormatError, tensor="rope_freqs.weight"):
        convert(source, tmp_path / "to", "gguf", template(tmp_path))
    with pytest.raises(TypeError, match="requires check_template"):
        convert_checkpoint(
            Checkpoint.open(source), tmp_path / "to", "gguf", template=Checkpoint.open(template(tmp_path))
        )
    assert_nothing_left(tmp_path, "template")


def order(g_idx):
    return g_idx[torch.randperm(128, generator=torch.Generator().manual_seed(0))]


REFUSED = [
    ("gptq-v1-w4-asym", {}, "qzeros", "zero points of 8"),
    ("gptq-v1-w4-sym", {"g_idx": order}, "g_idx", "channels in activation order"),
    ("gptq-v1-w3-sym", {}, "", "4, 5, or 8 bits"),
    ("gptq-v1-w4-sym", {"scales": lambda scales: scales.float() / 3}, "scales", "F16 holds exactly"),
    ("fp8-block", {}, "", "a format with the same numbers as gguf"),
    ("mxint4", {}, "", "found: mxint4"),
]


@pytest.mark.parametrize(
    ("name", "changed", "local", "words"), REFUSED, ids=[f"{row[0]}-{row[2]}" for row in REFUSED]
)
def test_what_blocks_cannot_hold_is_refused_by_name(tmp_path, name, changed, local, words):
    tensors = tiny_models.model_tensors(ROWS[name].format)
    for each, change in changed.items():
        tensors[f"{FIRST}.{each}"] = change(tensors[f"{FIRST}.{each}"])
    source = tiny_models.write_model(tmp_path / "source", tensors, ROWS[name].config)
    with refused("without loss", words, kind=FormatError) as caught:
        convert(source, tmp_path / "to", "gguf", template(tmp_path))
    assert caught.value.tensor == f"{FIRST}.{local}".removesuffix(".")
    assert_nothing_left(tmp_path, "template")


def test_a_tensor_without_a_place_in_the_file_is_refused(tmp_path):
    case, name = ROWS["gptq-v1-w4-sym"], "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = tiny_models.model_tensors(case.format) | {name: torch.ones(4)}
    source = tiny_models.write_model(tmp_path / "source", tensors, case.config)
    with refused("GGUF files of this architecture do not have", kind=FormatError, tensor=name):
        convert(source, tmp_path / "to", "gguf", template(tmp_path))


@pytest.mark.parametrize(
    ("value", "found"), [(1e-12, "would be rounded"), (torch.nan, "found: a value of NaN")]
)
def test_a_norm_that_one_cannot_be_added_to_is_refused(tmp_path, value, found):
    """The file of a Gemma stores its norms plus one, which rounds small numbers away."""
    model = make_model("gemma3")
    source = write_model(tmp_path / "source", "gemma3", model)
    convert(source, tmp_path / "packed", "pack-quantized")
    tensors = tiny_models.stored_tensors(tmp_path / "packed")
    tensors["model.norm.weight"][3] = value
    config = Checkpoint.open(tmp_path / "packed").config
    small = tiny_models.write_model(tmp_path / "small", tensors, config["quantization_config"])
    (small / "config.json").write_bytes((tmp_path / "packed" / "config.json").read_bytes())
    with refused("(x + 1) - 1 equals x", found, kind=FormatError, tensor="output_norm.weight"):
        convert(small, tmp_path / "to", "gguf", source)
    assert not (tmp_path / "to").exists()
