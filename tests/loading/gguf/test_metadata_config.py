"""config.json and the metadata: contradictions are errors before a weight is read."""

import json
import math

import numpy as np
import pytest
import torch

from hfq import CheckpointError, FormatError, HfqConfig, SetupError
from hfq.checkpoint import Reader
from hfq.loading.meta_model import load_meta_model
from tests.loading.gguf.test_saved_files import split
from tests.loading.gguf.test_stored_floats import TOKENS, load
from tests.support.checkpoint_files import refused
from tests.support.gguf_models import make_model, write_model
from tests.support.models import logits

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def nothing_is_read(request, monkeypatch):
    """Fails a test of an error if a weight was read before it."""
    if "refused" in request.node.name or "named" in request.node.name:

        def read_vectored(self, source, targets):
            raise AssertionError(f"{source} was read")

        monkeypatch.setattr(Reader, "read_vectored", read_vectored)


def factors(config):
    """Returns the tensor `rope_freqs.weight` as the converter of llama.cpp computes it."""
    size = config.head_dim
    found = []
    for frequency in 1.0 / LLAMA3["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float32) / size):
        wavelength, old = 2 * np.pi / frequency, LLAMA3["original_max_position_embeddings"]
        if wavelength < old / LLAMA3["high_freq_factor"]:
            found.append(1)
        elif wavelength > old / LLAMA3["low_freq_factor"]:
            found.append(LLAMA3["factor"])
        else:
            smooth = (old / wavelength - 1) / (LLAMA3["high_freq_factor"] - 1)
            found.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.head_count", 8, "num_attention_heads of the config is 4"),
        ("attention.head_count_kv", 4, "num_key_value_heads of the config is 2"),
        ("attention.layer_norm_rms_epsilon", 1e-5, "rms_norm_eps of the config is 1e-06"),
        ("rope.freq_base", 500000.0, "rope_theta of the config is 10000.0"),
        ("rope.scaling.type", "yarn", "rope_type of the config is default"),
        ("rope.scaling.type", "linear", "rope_type of the config is default"),
    ],
)
def test_metadata_that_contradict_the_config_are_refused(tmp_path, key, value, words):
    folder = write_model(tmp_path, "llama", make_model("llama"), metadata={f"llama.{key}": value})
    told = f"found: other values of llama.{key}"
    with refused("The config contradicts the GGUF file", told, f"llama.{key} is", words, kind=FormatError):
        load(folder)


@pytest.mark.parametrize("kind", ["gemma", "granite"])
def test_a_config_of_another_architecture_with_the_same_tensors_is_refused(tmp_path, kind):
    folder = write_model(tmp_path, "llama", make_model("llama"))
    written = json.loads((folder / "config.json").read_text()) | {"model_type": kind, "architectures": None}
    (folder / "config.json").write_text(json.dumps(written))
    words = f"general.architecture is 'llama', and model_type of the config is '{kind}'"
    with refused("The config contradicts the GGUF file", words, kind=FormatError):
        load(folder)


def test_another_factor_is_refused(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = make_model("llama", rope_parameters=rope)
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    folder = write_model(tmp_path, "llama", model, metadata=keys)
    with refused("llama.rope.scaling.factor is 2.0, and factor of the config is 4.0", kind=FormatError):
        load(folder)


def test_another_original_length_is_refused(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    model = make_model("llama", rope_parameters=rope | {"original_max_position_embeddings": 16})
    key = "llama.rope.scaling.original_context_length"
    load(write_model(tmp_path / "same", "llama", model, metadata={key: 16}))
    folder = write_model(tmp_path / "other", "llama", model, metadata={key: 32})
    words = f"{key} is 32, and original_max_position_embeddings of the config is 16"
    with refused(words, kind=FormatError):
        load(folder)


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("yarn_beta_fast", 32.0, 24.0),
        ("yarn_beta_slow", 2.0, 1.0),
        ("yarn_attn_factor", 0.5, 1.0),
        ("yarn_attn_factor", 1.25, 0.1 * math.log(4.0) + 1),
    ],
)
def test_another_parameter_of_yarn_is_refused(tmp_path, key, wrong, right):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 24.0}
    model = make_model("llama", rope_parameters=rope | {"original_max_position_embeddings": 16})
    key = f"llama.rope.scaling.{key}"
    load(write_model(tmp_path / "same", "llama", model, metadata={key: right}))
    folder = write_model(tmp_path / "other", "llama", model, metadata={key: wrong})
    with refused(f"{key} is {wrong}, and ", kind=FormatError):
        load(folder)


def test_another_attention_factor_of_phi3_is_an_error(tmp_path):
    """Its converter writes no `rope.scaling.type`."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    rope |= {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
    model = make_model("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    key, usual = "phi3.rope.scaling.attn_factor", math.sqrt(1 + math.log(64 / 16) / math.log(16))
    extra = {
        f"rope_factors_{name}.weight": ("F32", (8,), np.full(8, value, np.float32).tobytes())
        for name, value in (("long", 2), ("short", 1))
    }
    load(write_model(tmp_path / "same", "phi3", model, extra=extra, metadata={key: usual}))
    folder = write_model(tmp_path / "other", "phi3", model, extra=extra, metadata={key: 1.0})
    with refused(f"{key} is 1.0, and attention_factor of the config is 1.2247", kind=FormatError):
        load(folder)


def test_metadata_that_repeat_the_config_are_no_error(tmp_path):
    keys = {
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
        "gemma2.rope.scaling.type": "none",
    }
    load(write_model(tmp_path, "gemma2", make_model("gemma2"), metadata=keys))


def test_frequencies_that_repeat_the_config_are_no_error(tmp_path):
    model = make_model("llama", rope_parameters=dict(LLAMA3))
    stored = factors(model.config)
    extra = {"rope_freqs.weight": ("F32", stored.shape, stored.tobytes())}
    folder = write_model(tmp_path, "llama", model, extra=extra)
    expected = logits(model, TOKENS)
    assert (logits(load(folder), TOKENS) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("case", ["without scaling", "other factors", "other size"])
def test_other_frequencies_are_an_error(tmp_path, case):
    model = make_model("llama", rope_parameters=dict(LLAMA3))
    stored = factors(model.config) * (1.001 if case == "other factors" else 1)
    stored = stored[:8].copy() if case == "other size" else stored.astype(np.float32)
    if case == "without scaling":
        model = make_model("llama")
    extra = {"rope_freqs.weight": ("F32", stored.shape, stored.tobytes())}
    folder = write_model(tmp_path, "llama", model, extra=extra)
    words = "by other factors" if case == "other factors" else "and the config does not"
    with refused("rope_freqs.weight scales the frequencies", words, kind=FormatError):
        load(folder)


def test_a_config_of_another_size_is_refused(tmp_path):
    folder = write_model(tmp_path, "llama", make_model("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with refused("does not match LlamaForCausalLM", "model.layers.2.self_attn.q_proj", kind=FormatError):
        load(folder)


@pytest.mark.parametrize("name", ["gpt2", "qwen3moe", "mixtral", "deepseek3"])
@pytest.mark.parametrize("stub", [False, True])
def test_an_untested_architecture_without_a_config_is_named(tmp_path, name, stub):
    folder = write_model(tmp_path, name, make_model(name))
    (folder / "config.json").unlink()
    if stub:
        (folder / "config.json").write_text('{"model_type": "llama"}')
    with refused("requires a config.json next to it", kind=FormatError, file=folder / "model.gguf"):
        load(folder)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "qwen35", "gemma2", "gemma3", "phi3"])
def test_the_metadata_make_a_config_of_tested_architectures(tmp_path, name):
    if name != "qwen35":
        pytest.importorskip("gguf")
    model = make_model(name, **({"head_dim": 16} if name == "qwen2" else {}))
    folder = write_model(tmp_path, name, model)
    (folder / "config.json").unlink()
    expected = logits(model, TOKENS)
    found = load(folder)
    assert (logits(found, TOKENS) - expected).norm() <= 1e-5 * expected.norm()


def test_a_file_without_the_package_gguf_is_named(tmp_path, monkeypatch):
    from transformers import AutoConfig

    folder = write_model(tmp_path, "llama", make_model("llama"))
    (folder / "config.json").unlink()

    def missing(*arguments, **options):
        raise ImportError("Please install torch and gguf>=0.10.0 to load a GGUF checkpoint in PyTorch.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", missing)
    with refused("requires the package gguf", "Run pip install 'hfq[gguf]'", kind=SetupError):
        load(folder)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *arguments, **options: {}["context_length"])
    with refused("cannot make a config", "KeyError: 'context_length'", kind=FormatError):
        load(folder)


def test_a_missing_part_is_named(tmp_path):
    folder = write_model(tmp_path, "llama", make_model("llama"))
    split(folder)
    expected = logits(load(folder), TOKENS)
    for file in ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf"):
        assert torch.equal(logits(load(folder / file), TOKENS), expected)
    (folder / "model-00002-of-00002.gguf").rename(folder / "elsewhere")
    with refused("model-00002-of-00002.gguf is missing", kind=CheckpointError):
        load(folder)


def test_the_head_in_another_part_is_found_without_a_config(tmp_path):
    pytest.importorskip("gguf")
    model = make_model("llama")
    folder = write_model(tmp_path, "llama", model)
    split(folder)
    (folder / "config.json").unlink()
    expected = logits(model, TOKENS)
    assert (logits(load(folder), TOKENS) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("file", ["../x.gguf", "/x.gguf", "a\\b.gguf"])
def test_a_file_outside_of_the_folder_is_refused(tmp_path, file):
    from transformers import AutoModelForCausalLM

    from hfq import HfqConfig

    folder = write_model(tmp_path / "folder", "llama", make_model("llama"))
    with refused("outside its folder", kind=CheckpointError):
        AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, quantization_config=HfqConfig())


@pytest.mark.parametrize("file", ["x.safetensors", 7, "x"])
def test_another_name_is_refused(tmp_path, file):
    from transformers import AutoModelForCausalLM

    from hfq import HfqConfig

    with refused("gguf_file=…) is not the name of a GGUF file", kind=SetupError):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file, quantization_config=HfqConfig())


def test_safetensors_are_preferred_unless_the_file_is_named(tmp_path):
    from transformers import AutoModelForCausalLM

    from hfq import HfqConfig

    folder = write_model(tmp_path, "llama", make_model("llama"))
    quantized = logits(load(folder), TOKENS)
    make_model("llama").save_pretrained(folder)
    assert not torch.equal(logits(load(folder), TOKENS), quantized)
    options = {"quantization_config": HfqConfig(), "gguf_file": "model.gguf", "dtype": torch.float32}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder, **options), TOKENS), quantized)


@pytest.mark.parametrize("is_tied", [True, False])
def test_of_a_multimodal_config_the_language_model_is_built(tmp_path, is_tied):
    from transformers import Gemma3Config

    model = make_model("gemma3", tie_word_embeddings=is_tied)
    folder = write_model(tmp_path, "gemma3", model)
    whole = Gemma3Config(text_config=model.config.to_dict(), tie_word_embeddings=not is_tied)
    whole.architectures = ["Gemma3ForConditionalGeneration"]
    whole.save_pretrained(folder)
    assert "vision_config" in json.loads((folder / "config.json").read_text())
    found, expected = load(folder), logits(model, TOKENS)
    assert type(found).__name__ == type(model).__name__ == "Gemma3ForCausalLM"
    assert type(load_meta_model(folder).model).__name__ == "Gemma3ForCausalLM"
    assert (logits(found, TOKENS) - expected).norm() <= 1e-5 * expected.norm()
    assert found.config.tie_word_embeddings is is_tied


@pytest.mark.parametrize("is_multimodal", [True, False])
def test_rows_without_a_token_may_be_missing_in_gemma3(tmp_path, is_multimodal):
    """As in Gemma 3 4B, whose config has 262,208 tokens, and many files 262,144."""
    from transformers import Gemma3Config

    model = make_model("gemma3", tie_word_embeddings=True)
    folder = write_model(tmp_path, "gemma3", model)
    text = model.config.to_dict() | {"vocab_size": model.config.vocab_size + 64}
    whole = Gemma3Config(text_config=text) if is_multimodal else type(model.config)(**text)
    whole.architectures = [f"Gemma3For{'ConditionalGeneration' if is_multimodal else 'CausalLM'}"]
    whole.save_pretrained(folder)
    found, expected = load(folder), logits(model, TOKENS)
    assert (logits(found, TOKENS) - expected).norm() <= 1e-5 * expected.norm()
    assert found.config.vocab_size == model.config.vocab_size
    assert load_meta_model(folder).model.config.vocab_size == model.config.vocab_size


def test_a_passed_config_with_more_tokens_is_an_error_whose_fix_works(tmp_path):
    from transformers import AutoModelForCausalLM

    model = make_model("gemma3", tie_word_embeddings=True)
    folder = write_model(tmp_path, "gemma3", model)
    config = type(model.config)(**(model.config.to_dict() | {"vocab_size": 104}))
    words = ("The config counts more tokens", "vocab_size=104", "Fix: Set vocab_size of the config to 40")
    options = {"config": config, "quantization_config": HfqConfig(), "dtype": torch.float32}
    with refused(*words, kind=FormatError):
        AutoModelForCausalLM.from_pretrained(folder, **options)
    config.vocab_size = 40
    assert AutoModelForCausalLM.from_pretrained(folder, **options).config.vocab_size == 40


def test_more_rows_than_tokens_are_refused(tmp_path):
    model = make_model("gemma3", tie_word_embeddings=True)
    folder = write_model(tmp_path, "gemma3", model)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    with refused("model.embed_tokens.weight", kind=FormatError):
        load(folder)


def test_fewer_rows_than_tokens_are_refused(tmp_path):
    model = make_model("gemma3", tie_word_embeddings=True)
    count = model.config.vocab_size + 64
    folder = write_model(tmp_path, "gemma3", model, metadata={"tokenizer.ggml.tokens": ["t"] * count})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": count}))
    with refused("model.embed_tokens.weight", kind=FormatError):
        load(folder)


def test_a_sliding_window_of_mistral_is_applied_without_a_config(tmp_path):
    pytest.importorskip("gguf")
    model = make_model("mistral", sliding_window=4)
    keys = {"general.name": "mistral", "llama.attention.sliding_window": 4}
    folder = write_model(tmp_path, "mistral", model, metadata=keys)
    (folder / "config.json").unlink()
    found, expected = load(folder), logits(model, TOKENS)
    assert found.config.sliding_window == 4 < TOKENS.shape[-1]
    assert (logits(found, TOKENS) - expected).norm() <= 1e-5 * expected.norm()


def test_a_sliding_window_that_a_llama_cannot_have_is_refused(tmp_path):
    key = "llama.attention.sliding_window"
    folder = write_model(tmp_path, "llama", make_model("llama"), metadata={key: 4})
    with refused(f"{key} is 4, and llama has no sliding_window", kind=FormatError):
        load(folder)


def test_a_sliding_window_of_phi3_is_applied_without_a_config(tmp_path):
    pytest.importorskip("gguf")
    model = make_model("phi3", sliding_window=4)
    folder = write_model(tmp_path, "phi3", model, metadata={"phi3.attention.sliding_window": 4})
    (folder / "config.json").unlink()
    found, expected = load(folder), logits(model, TOKENS)
    assert found.config.sliding_window == 4 < TOKENS.shape[-1]
    assert (logits(found, TOKENS) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_attention_by_its_width_without_a_config(tmp_path, name, layers):
    """No key tells it. The scale of Gemma 2 27B is 4608 / 32, and its heads have 128 channels."""
    pytest.importorskip("gguf")
    model = make_model(name, num_hidden_layers=layers, head_dim=32)
    folder = write_model(tmp_path, name, model)
    (folder / "config.json").unlink()
    config = model.config
    found = load_meta_model(folder).model.config
    assert found.head_dim == config.head_dim
    assert found.query_pre_attn_scalar == config.hidden_size // config.num_attention_heads != found.head_dim
