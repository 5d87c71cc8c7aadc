"""`resize_token_embeddings` of models with quantized embeddings and heads."""

import pytest
import torch

from hfq.errors import SetupError
from hfq.formats.mlx.affine import Mlx
from tests.support import tiny_models
from tests.support.models import load, logits

TOKENS = torch.arange(3, 12)[None]


def rounded():
    return load(dtype=torch.bfloat16, quantize_output_head="fp8")


def test_a_quantized_head_is_refused_before_anything_changes(tmp_path):
    model = rounded()
    before, rows = logits(model, TOKENS), model.config.vocab_size
    with pytest.raises(SetupError, match="lm_head is quantized") as caught:
        model.resize_token_embeddings(rows + 1)
    assert caught.value.fix == "Load the model without quantize_output_head, and resize that."
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == rows
    assert torch.equal(logits(model, TOKENS), before)
    model.save_pretrained(tmp_path)
    assert torch.equal(
        logits(load(tmp_path, dtype=torch.bfloat16, quantize_output_head="fp8"), TOKENS), before
    )


def test_a_quantized_embedding_is_refused(tmp_path):
    tensors = tiny_models.model_tensors(Mlx())
    weight = tensors.pop("model.embed_tokens.weight").float()
    for name, tensor in Mlx().quantize(weight).items():
        tensors[f"model.embed_tokens.{name}"] = tensor
    quantization = {"quant_method": "mlx", "group_size": 64, "bits": 4, "mode": "affine"}
    model = load(tiny_models.write_model(tmp_path / "model", tensors, quantization))
    with pytest.raises(SetupError, match=r"model\.embed_tokens is quantized") as caught:
        model.resize_token_embeddings(len(weight) + 1)
    assert caught.value.fix == "Resize the unquantized model, and quantize it again."


def test_a_multiple_that_changes_the_size_of_a_quantized_head_is_refused():
    model = rounded()
    with pytest.raises(SetupError, match="cannot get another number of tokens") as caught:
        model.resize_token_embeddings(pad_to_multiple_of=1000)
    assert caught.value.found == "2,000 tokens"


@pytest.mark.parametrize("arguments", [{}, {"new_num_tokens": 1536}, {"pad_to_multiple_of": 512}])
def test_the_same_size_is_no_change(arguments):
    model = rounded()
    before = logits(model, TOKENS)
    assert model.resize_token_embeddings(**arguments) is model.get_input_embeddings()
    assert torch.equal(logits(model, TOKENS), before)


def test_all_arguments_are_passed_on_by_position():
    model = load()
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows + 1, 64, False)
    assert model.get_output_embeddings().weight.shape[0] == rows + 64


def test_an_unquantized_head_is_resized(tmp_path):
    model = load()
    before, rows = logits(model, TOKENS), model.config.vocab_size
    model.resize_token_embeddings(rows + 8)
    assert torch.equal(logits(model, TOKENS)[..., :rows], before)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path), TOKENS), logits(model, TOKENS))
