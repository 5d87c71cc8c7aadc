"""Tests of `evaluate`: quantized tiny Llamas and their reference, in memory and on disk."""

import json
import math
import shutil

import pytest
import torch

from hfq import CheckpointError, SetupError
from hfq.evaluation import perplexity
from hfq.evaluation.evaluate import evaluate
from tests.support import tiny_models

LLAMA, GPTQ, FP8 = (tiny_models.DATA / name for name in ("tiny-llama", "tiny-llama-gptq", "tiny-llama-fp8"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text((LLAMA / "held_out.txt").read_text(encoding="utf-8")[:3500], encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def reports():
    return []


@pytest.fixture(scope="module")
def rows(text, reports):
    return evaluate(
        [GPTQ, FP8], text, reference=LLAMA, max_seq_length=64, batch_size=6, on_progress=reports.append
    )


def test_progress_names_each_checkpoint_and_counts_every_batch(rows, reports):
    assert [*dict.fromkeys(report.step for report in reports)] == [
        f"{LLAMA} (reference)",
        str(GPTQ),
        str(FP8),
    ]
    total = reports[-1].total
    assert total % 4 == 0
    assert [*dict.fromkeys(report.done for report in reports)] == [*range(total + 1)]
    assert {report.total for report in reports} == {total}


def test_fp8_is_nearer_to_the_reference_than_four_bits(rows):
    reference, gptq, fp8 = rows
    assert [row.is_reference for row in rows] == [True, False, False]
    assert (reference.score.kl_mean, reference.score.kl_p99, reference.score.top1_agreement) == (
        None,
        None,
        None,
    )
    assert 0 < fp8.score.kl_mean < gptq.score.kl_mean / 5
    assert fp8.score.kl_mean < fp8.score.kl_p99 < gptq.score.kl_p99
    assert gptq.score.top1_agreement < fp8.score.top1_agreement < 1
    assert reference.score.tokens == gptq.score.tokens == fp8.score.tokens
    assert reference.score.tokens % 63 == 0
    assert reference.score.perplexity < gptq.score.perplexity


def test_bits_and_bytes_are_those_of_the_files(rows):
    for row, path in zip(rows, (LLAMA, GPTQ, FP8), strict=True):
        stored = tiny_models.stored_tensors(path)
        assert row.nbytes == (path / "model.safetensors").stat().st_size
        assert row.bits_per_weight == 8 * sum(tensor.nbytes for tensor in stored.values()) / row.weights
        assert (
            row.weights
            == 1049728
            == sum(tensor.numel() for tensor in tiny_models.stored_tensors(LLAMA).values())
        )
    reference, gptq, fp8 = rows
    assert (reference.bits_per_quantized_weight, reference.bits_per_weight, reference.formats) == (
        None,
        16.0,
        "unquantized",
    )
    assert (
        4
        < gptq.bits_per_quantized_weight
        < 4.5
        < gptq.bits_per_weight
        < 8
        < fp8.bits_per_quantized_weight
        < 8.01
    )
    assert gptq.formats == "gptq v1 int4 g128 sym"
    assert reference.seconds is None
    assert gptq.seconds > 0


def test_from_disk_the_numbers_are_the_same_and_each_layer_is_read_once(text, rows, monkeypatch):
    calls, run = [], perplexity.run_batches
    monkeypatch.setattr(
        perplexity,
        "run_batches",
        lambda model, batches, *a, **k: calls.append((model, len(batches))) or run(model, batches, *a, **k),
    )
    found = evaluate([GPTQ], text, reference=LLAMA, max_seq_length=64, batch_size=6, device_map="disk")
    assert [row.score for row in found] == [row.score for row in rows[:2]]
    assert [count for _, count in calls] == [math.ceil(rows[0].score.tokens / 63 / 6)] * 2
    for model, _ in calls:
        assert model.hf_quantizer.loading.plan.resident_nbytes() == 0
        assert model.hf_quantizer.loading.offloader.passes <= 2


def test_without_a_reference_there_is_perplexity_alone(text, rows):
    (row,) = evaluate([GPTQ], text, max_seq_length=64, batch_size=6)
    assert row.score.perplexity == rows[1].score.perplexity
    assert row.score.kl_mean is None
    json.dumps(row.to_dict())


def test_it_is_what_the_models_own_loss_says(text, rows):
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    tokens = torch.tensor(
        AutoTokenizer.from_pretrained(LLAMA)(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    )
    windows = tokens[: len(tokens) // 64 * 64].view(-1, 64)
    with torch.no_grad():
        expected = math.exp(model(input_ids=windows, labels=windows).loss.item())
    assert rows[0].score.perplexity == pytest.approx(expected, rel=1e-5)  # transformers sums in float32


def copy(source, target):
    shutil.copytree(source, target)
    return target


class Never:
    def __getattr__(self, name):
        raise AssertionError("a model was loaded")


@pytest.fixture
def unloaded(monkeypatch):
    """Makes loading fail, because bad input must raise an error before a model is loaded."""
    monkeypatch.setattr("hfq.evaluation.evaluate.load_model", lambda *_, **__: Never().loaded)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        (" \n\t", "is empty"),
        ("one word", "shorter than one sequence"),
        (b"\xff\xfe\x00", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_text_is_refused(tmp_path, unloaded, content, match):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SetupError, match=match):
        evaluate([GPTQ], file)


def test_a_sequence_longer_than_the_model_takes_is_refused(text, unloaded):
    with pytest.raises(SetupError, match="exceeds a model's limit"):
        evaluate([GPTQ], text, max_seq_length=1 << 20)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path, text, unloaded):
    path = copy(GPTQ, tmp_path / "bare")
    for file in path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(SetupError, match="tokenizer cannot be loaded") as error:
        evaluate([path], text)
    assert str(path) == str(error.value.file)


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused(tmp_path, text, unloaded):
    path = copy(GPTQ, tmp_path / "small")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(SetupError, match="has more tokens"):
        evaluate([path], text)


def test_a_reference_of_another_tokenizer_is_refused(tmp_path, text, unloaded):
    path = copy(LLAMA, tmp_path / "other")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:100]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SetupError, match="different tokenizers"):
        evaluate([GPTQ], text, reference=path)


def changed(source, target, **fields):
    """Returns a copy whose config.json has other values of these fields."""
    path = copy(source, target)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    return path


def test_a_reference_of_another_vocabulary_is_refused(tmp_path, text, unloaded):
    path = changed(LLAMA, tmp_path / "padded", vocab_size=4096)
    with pytest.raises(SetupError, match="reference has another vocabulary") as error:
        evaluate([GPTQ], text, reference=path)
    assert f"expected: the 4096 tokens of {path}" in str(error.value)
    assert "Fix: Pass the unquantized original" in str(error.value)


def test_a_reference_that_is_another_model_is_named(tmp_path, text, unloaded, caplog):
    path = changed(LLAMA, tmp_path / "deeper", num_hidden_layers=9)
    with pytest.raises(AssertionError, match="a model was loaded"):
        evaluate([GPTQ, path], text, reference=path)
    (said,) = caplog.messages
    assert said == (
        f"{GPTQ} is not a version of the reference {path}: num_hidden_layers 4 instead of 9. "
        "The divergence is that of two models."
    )


def test_a_model_whose_logits_are_not_finite_is_refused(tmp_path, text):
    from hfq.checkpoint import write_safetensors

    path = copy(LLAMA, tmp_path / "nan")
    tensors = tiny_models.stored_tensors(path)
    tensors["model.norm.weight"][3] = float("nan")
    write_safetensors(
        path / "model.safetensors",
        {name: tiny_models.as_stored(t) for name, t in tensors.items()},
        {"format": "pt"},
    )
    with pytest.raises(CheckpointError, match="logits are not finite"):
        evaluate([path], text, max_seq_length=64)
