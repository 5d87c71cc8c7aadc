"""Tests of heads that are tied to a quantized embedding, as mlx-lm writes them."""

import json

import pytest
import torch

from hfq import FormatError
from hfq.formats.mlx.affine import Mlx
from tests.support import tiny_models
from tests.support.models import load, logits

QUANTIZATION = {"group_size": 64, "bits": 4, "mode": "affine"}
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
IDS = torch.tensor([[1, 40, 77, 9]])


def write(folder, stored=(EMBEDDING,), is_tied=True, quantization=QUANTIZATION):
    """Writes a checkpoint in the form of mlx-lm.

    Its config.json has `quantization` and no quant_method.
    """
    tensors = tiny_models.model_tensors(Mlx())
    weight = tensors.pop("model.embed_tokens.weight").float()
    del tensors["lm_head.weight"]
    for number, module in enumerate(stored):
        tensors |= {f"{module}.{local}": tensor for local, tensor in Mlx().quantize(weight + number).items()}
    path = tiny_models.write_model(folder, tensors, None)
    config = json.loads((path / "config.json").read_text()) | {
        "tie_word_embeddings": is_tied,
        "quantization": quantization,
    }
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return path


@pytest.mark.parametrize("stored", [EMBEDDING, HEAD])
def test_a_tied_head_multiplies_with_the_embeddings_bytes(stored, tmp_path):
    path = write(tmp_path / "tied", [stored])
    untied = write(tmp_path / "untied", [EMBEDDING, HEAD], is_tied=False)
    copy = {
        f"{HEAD}.{key}": tiny_models.stored_tensors(untied)[f"{EMBEDDING}.{key}"]
        for key in ("weight", "scales", "biases")
    }
    tensors = tiny_models.stored_tensors(untied) | copy
    tiny_models.write_model(untied, tensors, {"quant_method": "mlx", **QUANTIZATION})
    expected = logits(load(untied), IDS)
    for device_map in (None, {"": "cpu", EMBEDDING: "disk"}, {"": "disk"}):
        model = load(path, device_map)
        assert torch.equal(logits(model, IDS), expected)
        model.tie_weights()  # transformers ties the weights a second time
        assert torch.equal(logits(model, IDS), expected)
    model.save_pretrained(tmp_path / "saved")
    saved, source = (tiny_models.digests(folder) for folder in (tmp_path / "saved", path))
    assert saved.keys() == source.keys()
    assert all(
        saved[name] == source[name] for name in source if "norm" not in name
    )  # norms are in float32 here
    assert torch.equal(logits(load(tmp_path / "saved"), IDS), expected)


def test_both_stored_under_a_config_that_ties_them_are_refused(tmp_path):
    with pytest.raises(FormatError, match="set tie_word_embeddings to false"):
        load(write(tmp_path, [EMBEDDING, HEAD]))


def test_a_dense_head_beside_a_packed_embedding_that_it_is_tied_to_is_refused(tmp_path):
    """One of the two would be ignored silently."""
    path = write(tmp_path)
    tensors = tiny_models.stored_tensors(path) | {"lm_head.weight": torch.ones(96, 128)}
    config = (path / "config.json").read_text()
    tiny_models.write_model(path, tensors, None)
    (path / "config.json").write_text(config)
    with pytest.raises(FormatError, match="set tie_word_embeddings to false"):
        load(path)


def test_where_the_configs_two_copies_differ_quantization_config_counts(tmp_path):
    path = write(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "metal", "bits": 3}})
    )
    with pytest.raises(FormatError, match="contradict the config"):
        load(path)
