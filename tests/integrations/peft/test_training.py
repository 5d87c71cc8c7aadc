"""Tests of Trainer with quantized models: arguments, checkpoints, and resumed runs."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, prepare_model_for_kbit_training
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hfq import SetupError
from hfq.integrations.peft.training import prepare_model
from tests.support import programs, tiny_models
from tests.support.lora_runs import DISK, adapt, load, logits

EXAMPLE = Path(__file__).parents[3] / "examples" / "finetune_lora.py"


class Samples(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(5, 200, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(model, folder, **options) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        learning_rate=1e-2,
        seed=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model, arguments, train_dataset=Samples(), eval_dataset=Samples())


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def trained(model) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(losses, adapters, evaluation, folder) of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("run")
    model = adapt(load(), lora_dropout=0.1)
    run = trainer(model, folder)
    run.train()
    return losses(run), trained(model), run.evaluate()["eval_loss"], folder


@pytest.mark.parametrize("device_map", [None, DISK], ids=["resident", "disk"])
def test_a_resumed_run_continues_the_curve_bit_for_bit(whole, device_map):
    expected, adapters, eval_loss, folder = whole
    model = adapt(load(device_map=device_map), lora_dropout=0.1)
    run = trainer(model, folder / "resumed")
    run.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert losses(run) == expected
    assert all(torch.equal(adapters[name], parameter) for name, parameter in trained(model).items())
    assert run.evaluate()["eval_loss"] == eval_loss


def test_a_checkpoint_holds_adapters_and_no_packed_tensor(whole):
    expected, _, _, folder = whole
    assert expected[1] < expected[0]
    assert not any(child.name.startswith("model") for child in (folder / "checkpoint-4").iterdir())
    model = PeftModel.from_pretrained(load(device_map=DISK), folder / "checkpoint-4")
    assert torch.equal(logits(model), logits(PeftModel.from_pretrained(load(), folder / "checkpoint-4")))


def test_gradient_checkpointing_by_trainer_changes_nothing(whole, tmp_path):
    expected, adapters, _, _ = whole
    model = adapt(load(device_map=DISK), lora_dropout=0.1)
    run = trainer(model, tmp_path, gradient_checkpointing=True)
    run.train()
    assert losses(run) == expected
    assert all(torch.equal(adapters[name], parameter) for name, parameter in trained(model).items())


def test_trainer_refuses_a_packed_model_without_adapters_and_takes_it_with_them(tmp_path):
    with pytest.raises(ValueError, match="Please attach trainable adapters"):
        trainer(load(), tmp_path)
    model = load()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    trainer(model, tmp_path)


@pytest.mark.parametrize("prepare", [prepare_model, prepare_model_for_kbit_training])
def test_a_prepared_model_is_frozen_and_keeps_its_dtypes(prepare):
    model = load(dtype=torch.bfloat16)
    before = {name: (parameter.dtype, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    assert prepare(model) is model
    assert {
        name: (parameter.dtype, parameter.data_ptr()) for name, parameter in model.named_parameters()
    } == before
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.model.layers[0].gradient_checkpointing
    assert model.get_input_embeddings()(torch.tensor([5])).requires_grad


def test_checkpointing_is_left_off_where_it_is_not_wanted():
    model = prepare_model(load(), gradient_checkpointing=False)
    assert not model.model.layers[0].gradient_checkpointing


def test_what_cannot_be_prepared_is_refused():
    with pytest.raises(
        SetupError, match=r"(?s)would freeze the adapters.*Fix: Call prepare_model_for_kbit_training before"
    ):
        prepare_model(adapt(load()).base_model.model)
    with pytest.raises(SetupError, match="was not loaded by hfq"):
        prepare_model(AutoModelForCausalLM.from_pretrained(tiny_models.DATA / "tiny-llama"))


def test_pefts_own_preparation_still_casts_models_that_are_not_hfqs():
    model = AutoModelForCausalLM.from_pretrained(tiny_models.DATA / "tiny-llama", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in prepare_model_for_kbit_training(model).parameters()} == {
        torch.float32
    }


@pytest.mark.slow
def test_hfq_does_not_import_peft_and_changes_it_when_it_is_imported():
    done = programs.run("import_peft_after_hfq")
    assert done.returncode == 0, done.stderr
    assert hasattr(PeftModel.save_pretrained, "__wrapped__")  # the helpers of this file import it before hfq


def run_example(monkeypatch, *arguments: str) -> None:
    spec = importlib.util.spec_from_file_location("finetune_lora", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "finetune_lora", module)  # dataclasses look up their module
    spec.loader.exec_module(module)
    options = [
        "--max_steps",
        "2",
        "--use_cpu",
        "--report_to",
        "none",
        "--per_device_train_batch_size",
        "2",
        "--disable_tqdm",
        "true",
    ]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options, *arguments])
    module.main()


def test_the_example_trains_evaluates_and_predicts(tmp_path, monkeypatch, capsys):
    text = (tiny_models.DATA / "tiny-llama" / "held_out.txt").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text[:6000], encoding="utf-8")
    flags = ["--do_train", "--do_eval", "--do_predict", "--gradient_checkpointing"]
    run_example(
        monkeypatch, "--data", str(tmp_path / "text.txt"), "--output_dir", str(tmp_path / "causal"), *flags
    )
    assert "eval_accuracy" in capsys.readouterr().out
    assert (tmp_path / "causal" / "adapter_model.safetensors").exists()
    assert (tmp_path / "causal" / "predictions.txt").read_text(encoding="utf-8").strip()


def test_the_example_classifies(tmp_path, monkeypatch, capsys):
    rows = [f"{'returns' if index % 2 else 'other'}\tReturn item {index} of the list." for index in range(20)]
    (tmp_path / "rows.tsv").write_text("\n".join(rows), encoding="utf-8")
    options = [
        "--task",
        "classification",
        "--data",
        str(tmp_path / "rows.tsv"),
        "--output_dir",
        str(tmp_path),
        "--device",
        "disk",
    ]
    run_example(monkeypatch, *options, "--do_train", "--do_predict")
    assert set((tmp_path / "predictions.txt").read_text(encoding="utf-8").split()) <= {"returns", "other"}
    assert "eval_accuracy" not in capsys.readouterr().out
