"""Tests of `examples/finetune_lora.py` on two ranks of ZeRO-3.

A classifier is trained, is evaluated, and predicts. A causal model is evaluated.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hfq import HfqConfig
from tests.support.zero_launch import ROOT, start

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "finetune_lora.py"
MODEL = ROOT / "tests" / "data" / "tiny-llama-gptq"
TEXT = ROOT / "tests" / "data" / "tiny-llama" / "held_out.txt"
LABELS = ("keys", "list", "path")
ROWS = [(LABELS[index % 3], f"Return the {LABELS[index % 3]} of item {index}.") for index in range(60)]
HELD_OUT = ROWS[::10]
"""Rows that the example does not train on."""

QUIET = "--use_cpu --bf16 --report_to none --disable_tqdm true"
TRAINS = (
    "--task classification --deepspeed configs/deepspeed/zero3_cpu.json --do_train --do_eval --do_predict "
    "--max_steps 24 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 3e-3 --logging_steps 8 "
    "--save_strategy no"
)
EVALUATES = "--deepspeed configs/deepspeed/inference_zero3_cpu.json --do_eval --per_device_train_batch_size 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns the folder with the example's output: `trained/`, and the printed text."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "rows.tsv").write_text("\n".join(f"{label}\t{text}" for label, text in ROWS), encoding="utf-8")
    (folder / "text.txt").write_text(TEXT.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    runs = [
        f"{TRAINS} {QUIET} --data {folder}/rows.tsv --output_dir {folder}/trained",
        f"{EVALUATES} {QUIET} --data {folder}/text.txt --output_dir {folder}/evaluated",
    ]
    (folder / "runs.json").write_text(json.dumps([run.split() for run in runs]))
    worker = Path(__file__).parent / "example_worker.py"
    start([str(worker), str(EXAMPLE), str(folder / "runs.json")], 2, folder / "printed.txt")
    return folder


def accuracies(folder: Path) -> list[float]:
    """Returns the accuracy that each run printed at its end."""
    return [
        float(found)
        for found in re.findall(r"^  eval_accuracy +=  *([\d.]+)", (folder / "printed.txt").read_text(), re.M)
    ]


def test_a_classifier_learns_and_predicts_what_it_was_not_trained_on(folder):
    losses = [
        float(found) for found in re.findall(r"'loss': '([\d.e-]+)'", (folder / "printed.txt").read_text())
    ]
    assert losses[2] < 0.5 * losses[0]
    assert accuracies(folder)[0] == 1.0
    assert (folder / "trained" / "predictions.txt").read_text().split() == [label for label, _ in HELD_OUT]


def test_its_adapter_and_head_give_an_unsharded_model_the_same_predictions(folder):
    base = AutoModelForSequenceClassification.from_pretrained(
        MODEL, quantization_config=HfqConfig(), dtype=torch.bfloat16, num_labels=3
    )
    model = PeftModel.from_pretrained(base, folder / "trained", autocast_adapter_dtype=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with torch.no_grad():
        found = [model(**tokenizer(text, return_tensors="pt")).logits.argmax().item() for _, text in HELD_OUT]
    assert [LABELS[index] for index in found] == [label for label, _ in HELD_OUT]


def test_a_model_that_is_only_evaluated_is_the_unsharded_one(folder):
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, quantization_config=HfqConfig(), dtype=torch.bfloat16
    ).eval()
    tokens = torch.tensor(
        AutoTokenizer.from_pretrained(MODEL)((folder / "text.txt").read_text())["input_ids"]
    )
    blocks = tokens[: len(tokens) // 64 * 64].view(-1, 64)[::10]
    with torch.no_grad():
        chosen = model(blocks).logits.argmax(-1)
    expected = (chosen[:, :-1] == blocks[:, 1:]).float().mean().item()
    assert accuracies(folder)[1] == pytest.approx(expected, abs=6e-5)  # printed with four digits
