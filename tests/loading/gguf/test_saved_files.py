"""Saved GGUF files: the bytes of the source, with the values that the model has changed."""

import json

import pytest
import torch

from tests.loading.gguf.test_stored_floats import PLACEMENTS, TOKENS, load
from tests.support.checkpoint_files import refused
from tests.support.gguf_files import write_gguf
from tests.support.gguf_models import make_model, write_model
from tests.support.models import logits


def write(tmp_path, name, **options):
    return write_model(tmp_path / "source", name, make_model(name), **options)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["llama-biased", "gemma3", "qwen3moe", "deepseek3"])
def test_an_unchanged_model_is_saved_as_the_bytes_of_its_file(tmp_path, name, placement):
    source = write(tmp_path, name)
    model = load(source, PLACEMENTS[placement], torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.gguf").read_bytes() == (source / "model.gguf").read_bytes()
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {
        "model.gguf",
        "config.json",
        "generation_config.json",
    }
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert torch.equal(logits(load(tmp_path / "saved", None, torch.bfloat16), TOKENS), logits(model, TOKENS))


@pytest.mark.parametrize("name", ["llama-biased", "gemma3", "qwen35"])
def test_changed_values_are_saved_as_the_file_stores_them(tmp_path, name):
    source = write(tmp_path, name)
    model = load(source)
    changed = [
        parameter
        for parameter in model.parameters()
        if parameter.dim() == 1 and parameter.is_floating_point()
    ]
    with torch.no_grad():
        for parameter in changed:
            parameter.mul_(1.25)
    model.save_pretrained(tmp_path / "saved")
    found = load(tmp_path / "saved")
    for (path, parameter), (_, other) in zip(model.named_parameters(), found.named_parameters(), strict=True):
        assert torch.allclose(parameter.float(), other.float(), rtol=1e-6, atol=1e-6), path
    assert (logits(found, TOKENS) - logits(model, TOKENS)).norm() <= 1e-5 * logits(model, TOKENS).norm()
    assert not torch.equal(logits(load(source), TOKENS), logits(model, TOKENS))


def test_layers_that_the_model_lacks_are_saved(tmp_path):
    extra = {
        "blk.2.attn_norm.weight": ("F32", (8,), bytes(32)),
        "blk.2.nextn.eh_proj.weight": ("Q8_0", (1, 32), bytes(34)),
    }
    keys = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    source = write(tmp_path, "glm4moe", extra=extra, metadata=keys)
    model = load(source)
    assert list(model.hf_quantizer.loading.checkpoint.gguf.kept) == list(extra)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.gguf").read_bytes() == (source / "model.gguf").read_bytes()


def test_a_folder_with_another_checkpoint_is_refused(tmp_path):
    model = load(write(tmp_path, "llama"))
    target = tmp_path / "saved"
    target.mkdir()
    for other in ("model.safetensors", "other.gguf"):
        (target / other).touch()
        with refused("the folder holds another checkpoint", other):
            model.save_pretrained(target)
        assert [file.name for file in target.iterdir()] == [other]
        (target / other).unlink()
    model.save_pretrained(target)
    model.save_pretrained(target)  # again, over its own files


def test_every_part_of_a_split_is_saved(tmp_path):
    source = write(tmp_path, "llama")
    split(source)
    load(source).save_pretrained(tmp_path / "saved")
    names = [f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert [(tmp_path / "saved" / name).read_bytes() for name in names] == [
        (source / name).read_bytes() for name in names
    ]


def split(folder):
    """Splits the file of a folder into two parts."""
    from hfq.checkpoint.gguf.header import read_gguf_header
    from tests.loading.gguf.test_stored_floats import scalars, shape_of
    from tests.support.checkpoint_files import stored_bytes

    header = read_gguf_header(folder / "model.gguf")
    tensors = {
        name: (info.blocks.type, shape_of(info), stored_bytes(info)) for name, info in header.tensors.items()
    }
    names = list(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        keys |= scalars(header) if number == 0 else {}
        write_gguf(
            folder / f"model-0000{number + 1}-of-00002.gguf", keys, {name: tensors[name] for name in part}
        )
    (folder / "model.gguf").unlink()
