"""Tests that `ignore_mismatched_sizes` gives a new unquantized head, and refuses quantized tensors by name."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hfq import HfqConfig
from hfq.errors import FormatError, PlacementError, SetupError
from tests.support import tiny_models
from tests.support.models import GPTQ, load

TOKENS = torch.arange(8)[None]
FLOATS = tiny_models.DATA / "tiny-llama"


@pytest.fixture(scope="module", params=["quantized", "quantized on load"])
def classifier(request, tmp_path_factory):
    """Returns (a checkpoint with a head of two labels, options of its load)."""
    folder = tmp_path_factory.mktemp("classifier")
    if request.param == "quantized":
        AutoModelForSequenceClassification.from_pretrained(
            GPTQ, quantization_config=HfqConfig(), num_labels=2
        ).save_pretrained(folder)
        return folder, HfqConfig()
    AutoModelForSequenceClassification.from_pretrained(FLOATS, num_labels=2).save_pretrained(folder)
    return folder, HfqConfig(quantize_weights="fp8")


def classify(classifier, device_map=None, **options):
    folder, config = classifier
    return AutoModelForSequenceClassification.from_pretrained(
        folder, quantization_config=config, device_map=device_map, dtype=torch.float32, **options
    )


@pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu", "model": "disk"}])
def test_a_head_of_another_size_is_initialized(classifier, device_map, tmp_path):
    options = {"num_labels": 5, "ignore_mismatched_sizes": True, "offload_folder": tmp_path}
    model = classify(classifier, device_map, **options)
    head = model.score.weight
    assert (head.shape, bool(head.isfinite().all()), head.requires_grad) == ((5, 128), True, True)
    assert 0 < head.std() < 0.1
    expected = model(TOKENS).logits
    assert expected.shape == (1, 5)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", cls=AutoModelForSequenceClassification)
    assert torch.equal(again(TOKENS).logits, expected)


def test_a_head_of_the_stored_size_is_read(classifier):
    stored, model = classify(classifier), classify(classifier, ignore_mismatched_sizes=True)
    assert torch.equal(model.score.weight, stored.score.weight)


def test_a_head_of_another_size_is_an_error_without_the_argument(classifier):
    with pytest.raises(FormatError, match=r"score\.weight: expected \[5, 128\]"):
        classify(classifier, num_labels=5)


def test_a_new_head_on_disk_is_refused(classifier):
    with pytest.raises(PlacementError, match=r"\{\"score\": \"cpu\"\}"):
        classify(classifier, {"": "disk"}, num_labels=5, ignore_mismatched_sizes=True)


def test_quantized_tensors_of_another_size_are_refused():
    with pytest.raises(FormatError, match=r"mlp\.down_proj"):
        AutoModelForCausalLM.from_pretrained(
            GPTQ, quantization_config=HfqConfig(), intermediate_size=512, ignore_mismatched_sizes=True
        )


def test_a_tied_vocabulary_of_another_size_is_initialized():
    model = AutoModelForCausalLM.from_pretrained(
        GPTQ, quantization_config=HfqConfig(), vocab_size=99, ignore_mismatched_sizes=True
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(TOKENS).logits.shape == (1, 8, 99)


def test_ranks_are_refused():
    with pytest.raises(SetupError, match=r"ignore_mismatched_sizes=True\) does not support several ranks"):
        AutoModelForCausalLM.from_pretrained(
            FLOATS, quantization_config=HfqConfig(), tp_plan="auto", ignore_mismatched_sizes=True
        )
