"""Tests of heads that are tied to a quantized embedding, as mlx-lm writes them."""

import dataclasses
import inspect
import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfq import FormatError
from hfq.formats.gemma_qat import GemmaQat
from hfq.formats.mlx.affine import Mlx
from hfq.modules.embedding import QuantizedEmbedding
from tests.support import tiny_models
from tests.support.models import load, logits

QUANTIZATION = {"group_size": 64, "bits": 4, "mode": "affine"}
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
IDS = torch.tensor([[1, 40, 77, 9]])
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}


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


FAMILIES = (
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Gemma3n",
    "Gemma4",
    "Gemma4Unified",
    "VaultGemma",
    "DiffusionGemma",
    "EmbeddingGemma2",
)


def scaled_embedding(folder):
    """Writes a Gemma 3 whose embedding is quantized, and tied to its head."""
    sizes = {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **sizes)).eval()
    weight_format, tensors = GemmaQat(is_embedding=True, num_bits=8), dict(model.state_dict())
    del tensors["lm_head.weight"]
    packed = weight_format.quantize(tensors.pop(f"{EMBEDDING}.weight"))
    tensors |= {f"{EMBEDDING}.{local}": tensor for local, tensor in packed.items()}
    path = tiny_models.write_model(folder, tensors, None)
    config = {**model.config.to_dict(), "architectures": ["Gemma3ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gemma"}}))
    found = dataclasses.replace(weight_format, size=tuple(model.model.embed_tokens.weight.shape))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(found.dequantize(packed))
    return path, model


def test_a_scaled_embedding_looks_up_rows_and_shares_its_bytes_with_the_head(tmp_path, monkeypatch):
    path, plain = scaled_embedding(tmp_path / "source")
    expected = logits(plain, IDS)
    model = load(path)
    assert type(model.model.embed_tokens) is QuantizedEmbedding
    monkeypatch.setattr(GemmaQat, "dequantize", lambda *_: pytest.fail("the whole table was dequantized"))
    resident = logits(model, IDS)
    assert (resident - expected).norm() <= 1e-5 * expected.norm()
    for device_map in ({"": "cpu", EMBEDDING: "disk"}, {"": "disk"}):
        assert torch.equal(logits(load(path, device_map), IDS), resident)
    model.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_forward_of_a_scaled_embedding_is_what_hfq_computes(family):
    name = f"{family}TextScaledWordEmbedding"
    family = re.sub(r"(?<=.)(?=[A-Z][a-z])", "_", family).lower()
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    body = inspect.getsource(getattr(module, name).forward).split("\n", 1)[1].strip()
    assert body == "return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)"
