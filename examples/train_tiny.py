"""Train the tiny Llama of `tests/data/tiny-llama`: real English, no network, the same result on every run of
one machine.

The text is what every Python installation carries: the docstrings of the standard library, the language
reference behind `help()` (`pydoc_data.topics`) and Python's licence. One document in twenty is held out and
never trained on.

    python examples/train_tiny.py OUTPUT_FOLDER [--steps 1500]
"""

import argparse
import hashlib
import math
import pathlib
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(
    0, str(pathlib.Path(__file__).parents[1])
)  # the root of the checkout, which contains benchmarks
from benchmarks.quality.corpus import read_documents

VOCABULARY, CONTEXT, BATCH = 1536, 256, 16


def is_held_out(document: str) -> bool:
    return hashlib.sha256(document.encode()).digest()[0] % 20 == 0


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    rows = ([*ids, tokenizer.eos_token_id] for ids in tokenizer(documents)["input_ids"])
    return torch.tensor([token for row in rows for token in row])


def perplexity(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    windows = tokens[: tokens.numel() // CONTEXT * CONTEXT].view(-1, CONTEXT)
    with torch.no_grad():
        losses = [
            model(input_ids=batch, labels=batch).loss.item() * len(batch) for batch in windows.split(16)
        ]
    return math.exp(sum(losses) / len(windows))


def train(tokens: torch.Tensor, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / warmup, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    for step in range(steps):
        starts = torch.randint(0, tokens.numel() - CONTEXT, (BATCH,))
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}  loss {loss.item():.3f}", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    documents = read_documents()
    held_out = [text for text in documents if is_held_out(text)]
    training = [text for text in documents if not is_held_out(text)]
    tokenizer = train_tokenizer(training)
    model = train(encode(tokenizer, training), arguments.steps).to(torch.bfloat16)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    text = "\n\n".join(held_out)[:60_000]
    (arguments.output / "held_out.txt").write_text(text, encoding="utf-8")
    parameters = sum(tensor.numel() for tensor in model.parameters())
    score = perplexity(model.float(), encode(tokenizer, [text]))
    print(f"{len(documents)} documents, {parameters} parameters, held-out perplexity {score:.3f}")


if __name__ == "__main__":
    main()
