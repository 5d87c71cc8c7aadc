"""Tests that a saved KV cache resumes in another process, or is refused by name."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hfq
from hfq.errors import CheckpointError, HfqError, SetupError
from tests.support import tiny_models
from tests.support.models import GPTQ, load

PROMPT = torch.arange(3, 20)[None]
IN_A_CHILD = """
import sys, torch, hfq
from tests.support.models import load
with hfq.OffloadedCache(load(), sys.argv[1]) as cache:
    found = load().generate(cache.tokens, past_key_values=cache, max_new_tokens=6, do_sample=False)
    cache.save(found)
"""


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture
def saved(model, tmp_path):
    """A folder with a conversation of 23 tokens, of which 22 are in the cache."""
    with hfq.OffloadedCache(model, tmp_path / "cache") as cache:
        cache.save(generate(model, cache, PROMPT, 6))
    return tmp_path / "cache"


def others_of(folder):
    """Returns the file of the layers that are not offloaded."""
    return next(folder.glob("other_layers_*.pt"))


def generate(model, cache, tokens, count):
    return model.generate(tokens, past_key_values=cache, max_new_tokens=count, do_sample=False)


def test_another_process_continues(model, saved):
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", IN_A_CHILD, str(saved)], check=True, env=environment, cwd=root)
    expected = generate(model, DynamicCache(config=model.config), PROMPT, 18)
    with hfq.OffloadedCache(model, saved) as cache:
        assert cache.get_seq_length() == 28
        assert torch.equal(generate(model, cache, cache.tokens, 6), expected)


def test_what_was_not_saved_is_forgotten(model, saved):
    with hfq.OffloadedCache(model, saved) as cache:
        generate(model, cache, cache.tokens, 9)
        assert cache.get_seq_length() == 31
    with hfq.OffloadedCache(model, saved) as cache:
        assert cache.get_seq_length() == 22
        assert cache.tokens.shape == (1, 23)


@pytest.mark.parametrize("change", ["crop", "reset", "reorder_cache", "batch_repeat_interleave"])
def test_changed_rows_forget_the_saved_state(model, saved, change):
    arguments = {"crop": (-9,), "reorder_cache": (torch.tensor([0]),), "batch_repeat_interleave": (2,)}
    with hfq.OffloadedCache(model, saved) as cache:
        getattr(cache, change)(*arguments.get(change, ()))
    with hfq.OffloadedCache(model, saved) as cache:
        assert cache.get_seq_length() == 0
        assert cache.tokens is None


def test_a_crop_of_tokens_that_were_not_saved_keeps_the_saved_state(model, saved):
    with hfq.OffloadedCache(model, saved) as cache:
        generate(model, cache, cache.tokens, 9)
        cache.crop(-9)
    with hfq.OffloadedCache(model, saved) as cache:
        assert cache.get_seq_length() == 22


def test_another_model_is_refused(saved, tmp_path):
    with pytest.raises(SetupError, match="another model or kind") as caught:
        hfq.OffloadedCache(load(tiny_models.DATA / "tiny-llama-fp8"), saved)
    assert caught.value.file == saved / "kv_cache.json"


def test_other_weights_of_the_same_sizes_are_refused(saved, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in GPTQ.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            start = 8 + int.from_bytes(data[:8], "little")
            for place in range(start, start + 393_216, 512):  # the embeddings in bfloat16
                data[place] ^= 1
        (other / file.name).write_bytes(data)
    with pytest.raises(SetupError, match="another model or kind"):
        hfq.OffloadedCache(load(other), saved)


def test_a_model_that_rounds_activations_is_another_one(tmp_path):
    path, options = tiny_models.DATA / "tiny-llama", {"quantize_weights": "w8a8", "offload_folder": tmp_path}
    plain = load(path, **options)
    with hfq.OffloadedCache(plain, tmp_path / "cache") as cache:
        cache.save(generate(plain, cache, PROMPT, 6))
    with pytest.raises(SetupError, match="another model or kind"):
        hfq.OffloadedCache(load(path, quantize_activations=True, **options), tmp_path / "cache")
    hfq.OffloadedCache(load(path, **options), tmp_path / "cache").close()


def test_another_dtype_of_the_cache_is_refused(model, saved):
    with pytest.raises(SetupError, match="another model or kind") as caught:
        hfq.OffloadedCache(model, saved, kv_cache_dtype="fp8")
    assert caught.value.expected == "kv_cache_dtype fp8"


def test_one_cache_uses_a_folder_at_a_time(model, saved):
    with hfq.OffloadedCache(model, saved), pytest.raises(SetupError, match="Another KV cache"):
        hfq.OffloadedCache(model, saved)
    hfq.OffloadedCache(model, saved).close()


@pytest.mark.parametrize("file", ["kv_cache.json", "layer_00001.kv", "other_layers"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage"])
def test_a_damaged_folder_is_refused_before_a_token_is_computed(model, saved, file, damage):
    path = others_of(saved) if file == "other_layers" else saved / file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "truncated" else b"\x80garbage")
    if (file, damage) == ("kv_cache.json", "missing"):
        assert hfq.OffloadedCache(model, saved).get_seq_length() == 0
        return
    for _ in range(2):  # an error releases the folder
        with pytest.raises(CheckpointError) as caught:
            hfq.OffloadedCache(model, saved)
        assert "Fix: Delete the folder" in str(caught.value)


def test_a_changed_byte_of_the_saved_tokens_is_refused(model, saved):
    path = saved / "layer_00002.kv"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not match its checksum") as caught:
        hfq.OffloadedCache(model, saved)
    assert caught.value.file == path
    assert caught.value.expected.endswith(", of 22 tokens of layer 2")
    assert caught.value.expected.split(",")[0] != caught.value.found


def test_files_of_two_layers_that_were_swapped_are_refused(model, saved):
    first, second = saved / "layer_00000.kv", saved / "layer_00001.kv"
    assert first.stat().st_size == second.stat().st_size
    first.rename(saved / "moved")
    second.rename(first)
    (saved / "moved").rename(second)
    with pytest.raises(CheckpointError, match="does not match its checksum") as caught:
        hfq.OffloadedCache(model, saved)
    assert caught.value.file == first


def test_a_cache_that_was_saved_without_checksums_resumes(model, saved):
    path = saved / "kv_cache.json"
    description = json.loads(path.read_text())
    assert len(description.pop("checksums")) == 4
    for name in ("checksum", "others_checksum", "length"):
        del description[name]
    path.write_text(json.dumps(description))
    with hfq.OffloadedCache(model, saved) as cache:
        found = generate(model, cache, cache.tokens, 6)
    assert torch.equal(found, generate(model, DynamicCache(config=model.config), PROMPT, 12))


def test_a_description_of_layers_without_sequences_is_refused(model, saved):
    path = saved / "kv_cache.json"
    description = json.loads(path.read_text())
    del description["checksum"]
    description["layers"]["0"]["batch"] = 0
    path.write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="damaged"):
        hfq.OffloadedCache(model, saved)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """A model all of whose layers have a sliding window of six tokens."""
    path = tmp_path_factory.mktemp("sliding") / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(2)
    config = AutoConfig.for_model("mistral", **sizes, **heads, sliding_window=6)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return load(path)


def test_a_changed_byte_of_a_layer_that_is_not_offloaded_is_refused(sliding, tmp_path):
    with hfq.OffloadedCache(sliding, tmp_path) as cache:
        cache.save(generate(sliding, cache, PROMPT, 6))
        keys = cache.layers[1].keys.numpy().tobytes()[:64]
    path = others_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(keys)] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not match its checksum") as caught:
        hfq.OffloadedCache(sliding, tmp_path)
    assert caught.value.file == path


def test_a_cache_without_offloaded_layers_is_saved_whole_or_not_at_all(sliding, tmp_path, monkeypatch):
    with hfq.OffloadedCache(sliding, tmp_path) as cache:
        tokens = generate(sliding, cache, PROMPT, 6)
        with pytest.raises(SetupError, match="all token ids"):
            cache.save(tokens[:, :9])
        cache.save(tokens)
        more = generate(sliding, cache, tokens, 6)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", killed_at("kv_cache"))
            cache.save(more)
    with hfq.OffloadedCache(sliding, tmp_path) as cache:
        assert cache.tokens.shape == (1, 23)
        assert cache.get_seq_length() == 22
        assert torch.equal(generate(sliding, cache, cache.tokens, 6), more)


def test_a_closed_cache_writes_to_no_folder(model, saved):
    closed = hfq.OffloadedCache(model, saved)
    tokens = closed.tokens
    closed.close()
    more = torch.tensor([[9] * 6])
    with hfq.OffloadedCache(model, saved) as cache:
        continued = generate(model, cache, tokens, 6)
        for use in (
            lambda: generate(model, closed, torch.cat([tokens, more], 1), 3),
            lambda: closed.save(tokens),
            lambda: closed.crop(-1),
            lambda: closed.reorder_cache(torch.tensor([0])),
            closed.reset,
        ):
            with pytest.raises(SetupError, match="was closed"):
                use()
        found = generate(model, cache, continued, 6)
    assert torch.equal(found, generate(model, DynamicCache(config=model.config), PROMPT, 18))


@pytest.mark.parametrize("count", [1, 4])
def test_checksums_follow_cropped_and_repeated_tokens(model, saved, count):
    """Tokens are saved, cropped and replaced by others, and saved again, in one process."""
    with hfq.OffloadedCache(model, saved) as cache:
        tokens = cache.tokens[:, : 22 - count]
        cache.crop(-count)
        found = generate(model, cache, torch.cat([tokens, tokens[:, :1] + 1], 1), 5)
        cache.save(found)
        cache.save(generate(model, cache, found, 3))
    with hfq.OffloadedCache(model, saved) as cache:
        assert cache.get_seq_length() == 22 - count + 1 + 4 + 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", {"9": {}}),
        ("layers", {"0": {"tokens": "x"}}),
        ("layers", 3),
        ("checksums", 3),
        ("tokens", [[1], [2, 3]]),
        ("tokens", [[1] * 23]),
        ("others_checksum", 3),
        ("checksum", 3),
        ("checksum", "3.5"),
    ],
)
def test_a_changed_description_is_refused(model, saved, field, value):
    path = saved / "kv_cache.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(HfqError):
        hfq.OffloadedCache(model, saved)


@pytest.mark.parametrize("name", ["other_layers", "kv_cache"])
def test_a_save_that_is_killed_leaves_the_earlier_one(model, saved, name, monkeypatch):
    with hfq.OffloadedCache(model, saved) as cache:
        tokens = generate(model, cache, cache.tokens, 9)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", killed_at(name))
            cache.save(tokens)
    with hfq.OffloadedCache(model, saved) as cache:
        assert cache.get_seq_length() == 22
        assert torch.equal(generate(model, cache, cache.tokens, 9), tokens)
        cache.save(tokens)
    assert len(list(saved.glob("other_layers_*"))) == 1


@pytest.mark.parametrize("kind", ["states", "description", "synchronize"])
@pytest.mark.parametrize("more", [0, 9])
def test_a_full_disk_leaves_the_earlier_save_and_no_file(model, saved, kind, more, monkeypatch):
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), sorted(saved.iterdir())
    limit = {"states": 9, "description": others_of(saved).stat().st_size + 9}
    with hfq.OffloadedCache(model, saved) as cache:
        tokens = generate(model, cache, cache.tokens, more) if more else cache.tokens
        with monkeypatch.context() as patch, pytest.raises(SetupError, match="could not be saved") as caught:
            if kind == "synchronize":
                patch.setattr(os, "fsync", no_space)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit[kind], limits[1]))
            try:
                cache.save(tokens.repeat(1, 99))  # a description that is longer than the states
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert sorted(saved.iterdir()) == before
        assert caught.value.found == {"synchronize": "No space left on device"}.get(kind, "File too large")
    with hfq.OffloadedCache(model, saved) as cache:
        assert cache.get_seq_length() == 22
        cache.save(generate(model, cache, cache.tokens, 9))
    with hfq.OffloadedCache(model, saved) as cache:
        assert cache.get_seq_length() == 31


def killed_at(name):
    """Returns an os.replace that is interrupted before a file whose name begins so gets it."""
    replace = os.replace

    def killed(source, target):
        if Path(target).name.startswith(name):
            raise KeyboardInterrupt
        replace(source, target)

    return killed


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("change", ["another adapter", "another scale", "no adapter"])
def test_a_changed_adapter_is_refused(tmp_path, change):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(load(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    hfq.OffloadedCache(adapted, tmp_path).save()
    hfq.OffloadedCache(adapted, tmp_path).close()
    for name, parameter in adapted.named_parameters():
        if change == "another adapter" and "lora_B" in name:
            torch.nn.init.ones_(parameter)
    for module in adapted.modules():
        if change == "another scale" and isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 2
    other = load() if change == "no adapter" else adapted
    with pytest.raises(SetupError, match="another model or kind"):
        hfq.OffloadedCache(other, tmp_path)


def test_too_few_tokens_are_refused(model, saved):
    with (
        hfq.OffloadedCache(model, saved) as cache,
        pytest.raises(SetupError, match="all token ids") as caught,
    ):
        cache.save(cache.tokens[:, :9])
    assert caught.value.expected == "[batch, 22 or more]"


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_of_a_beam_search_are_refused_since_the_cache_holds_beams(model, tmp_path, count):
    options = {"num_beams": 3, "num_return_sequences": count, "max_new_tokens": 10, "do_sample": False}
    with hfq.OffloadedCache(model, tmp_path) as cache:
        tokens = model.generate(PROMPT, past_key_values=cache, **options)
        with pytest.raises(SetupError, match="holds the beams"):
            cache.save(tokens)
        cache.reset()
        cache.save(generate(model, cache, tokens, 3))
    with hfq.OffloadedCache(model, tmp_path) as cache:
        found = generate(model, cache, cache.tokens, 3)
    assert torch.equal(found, generate(model, None, tokens, 6))


def test_a_folder_that_cannot_be_made_is_named(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be used") as caught:
        hfq.OffloadedCache(model, tmp_path / "file")
    assert caught.value.file == tmp_path / "file"
