"""Tests of the scripts that create the tiny models."""

import importlib.util
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import tiny_models

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = tiny_models.DATA / "tiny-llama"


def train_tiny():
    spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLES / "train_tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_fp8_version_is_made_again_byte_for_byte(tmp_path):
    script = EXAMPLES / "quantize_tiny_fp8.py"
    done = subprocess.run(
        [sys.executable, script, TINY, tmp_path], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for made in sorted(tmp_path.iterdir()):
        assert made.read_bytes() == (tiny_models.DATA / "tiny-llama-fp8" / made.name).read_bytes(), made.name


def test_the_trained_model_has_the_perplexity_that_its_card_says():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokens = torch.tensor(tokenizer((TINY / "held_out.txt").read_text(encoding="utf-8"))["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    from hfq.evaluation.perplexity import perplexity

    assert perplexity(model, tokens) == pytest.approx(
        32.298, rel=2e-2
    )  # the figure on the model card ends each document with </s>


@pytest.mark.slow  # only the script uses it, not hfq
def test_training_is_deterministic():
    module = train_tiny()
    tokens = torch.randint(0, module.VOCABULARY, (2000,), generator=torch.Generator().manual_seed(0))
    first, second = (module.train(tokens, steps=2).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow  # only the script uses it, not hfq
def test_the_script_writes_a_model_with_its_tokenizer_and_text(tmp_path, monkeypatch, capsys):
    module = train_tiny()
    documents = [
        f"{name}: {pydoc_data.topics.topics[name]}" for name in sorted(pydoc_data.topics.topics)[:60]
    ]
    assert any(map(module.is_held_out, documents))
    monkeypatch.setattr(module, "read_documents", lambda: documents)
    monkeypatch.setattr("sys.argv", ["train_tiny.py", str(tmp_path), "--steps", "1"])
    try:
        module.main()
    finally:
        torch.use_deterministic_algorithms(False)
    assert "60 documents, " in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size
        == module.VOCABULARY
        >= len(tokenizer)
    )
    assert (tmp_path / "held_out.txt").stat().st_size > 0


@pytest.mark.slow  # parses the whole standard library
def test_the_text_is_found_in_this_installation():
    documents = train_tiny().read_documents()
    assert len(documents) > 300
    assert 10 < sum(map(train_tiny().is_held_out, documents)) < len(documents) / 10
