"""Fine-tune a quantized model with LoRA and transformers' Trainer.

The model is a causal language model or a text classifier.

python examples/finetune_lora.py --do_train --do_eval --max_steps 20
python examples/finetune_lora.py --task classification --data LABELS_AND_TEXTS.tsv --do_train --do_eval
--do_predict deepspeed examples/finetune_lora.py --deepspeed configs/deepspeed/zero3_cpu.json --do_train
--do_eval

Every flag of `TrainingArguments` works; without one of the three it trains and evaluates. A tenth of the data
is held out for --do_eval and --do_predict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.integrations import is_deepspeed_zero3_enabled

import hfq

DATA = Path(__file__).parents[1] / "tests" / "data"
BLOCK = 64


@dataclass
class Arguments:
    model: str = field(
        default=str(DATA / "tiny-llama-gptq"), metadata={"help": "a quantized checkpoint of any format"}
    )
    task: str = field(default="causal", metadata={"choices": ["causal", "classification"]})
    data: str = field(
        default=str(DATA / "tiny-llama" / "held_out.txt"),
        metadata={"help": "text file, or lines of label, tab, and text"},
    )
    rank: int = field(default=8, metadata={"help": "the rank of the adapters"})
    device: str | None = field(
        default=None, metadata={"help": "device of the quantized weights without ZeRO: cpu, disk, or cuda:0"}
    )


def read(arguments: Arguments, tokenizer) -> tuple[list[dict], list[str]]:
    """Returns (samples, labels of a classifier)."""
    text = Path(arguments.data).read_text(encoding="utf-8")
    if arguments.task == "causal":
        tokens = torch.tensor(tokenizer(text)["input_ids"])
        blocks = tokens[: len(tokens) // BLOCK * BLOCK].view(-1, BLOCK)
        return [{"input_ids": block, "labels": block} for block in blocks], []
    rows = [line.split("\t", 1) for line in text.splitlines() if "\t" in line]
    labels = sorted({label for label, _ in rows})
    return [
        {**tokenizer(text, truncation=True, max_length=BLOCK), "labels": labels.index(label)}
        for label, text in rows
    ], labels


def load(arguments: Arguments, labels: list[str]):
    options = {"quantization_config": hfq.HfqConfig()}
    if arguments.device is not None:
        options["device_map"] = {"": arguments.device}
    if not labels:
        return AutoModelForCausalLM.from_pretrained(arguments.model, **options)
    return AutoModelForSequenceClassification.from_pretrained(
        arguments.model, num_labels=len(labels), **options
    )


def main() -> None:
    # TrainingArguments must exist first: they tell from_pretrained whether to load into ZeRO-3
    arguments, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    samples, labels = read(arguments, tokenizer)
    held_out, samples = samples[::10], [sample for index, sample in enumerate(samples) if index % 10]

    model = prepare_model_for_kbit_training(
        load(arguments, labels), use_gradient_checkpointing=training.gradient_checkpointing
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    task = "SEQ_CLS" if labels else "CAUSAL_LM"
    # ZeRO-3 computes without autocast: a head that is trained whole has to be in the model's dtype; DeepSpeed
    # keeps float32 masters
    lora, is_float32 = (
        LoraConfig(task_type=task, r=arguments.rank, target_modules="all-linear"),
        not is_deepspeed_zero3_enabled(),
    )
    model = get_peft_model(model, lora, autocast_adapter_dtype=is_float32)
    model.print_trainable_parameters()

    def accuracy(found):
        chosen, wanted = (
            (found.predictions, found.label_ids)
            if labels
            else (found.predictions[:, :-1], found.label_ids[:, 1:])
        )
        return {"accuracy": float((chosen == wanted).mean())}

    trainer = Trainer(
        model,
        training,
        train_dataset=samples,
        eval_dataset=held_out,
        compute_metrics=accuracy,
        data_collator=DataCollatorWithPadding(tokenizer) if labels else default_data_collator,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
    )
    is_asked = training.do_train or training.do_eval or training.do_predict
    if training.do_train or not is_asked:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model()  # only the adapters
    if training.do_eval or not is_asked:
        trainer.log_metrics("eval", trainer.evaluate())
    if training.do_predict:
        chosen = trainer.predict(held_out).predictions
        lines = [labels[index] if labels else " ".join(tokenizer.decode(index).split()) for index in chosen]
        if trainer.is_world_process_zero():
            Path(training.output_dir, "predictions.txt").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
