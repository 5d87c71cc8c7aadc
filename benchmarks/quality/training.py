"""Small OPT and Llama models, trained reproducibly on one machine.

Muon trains hidden matrices (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"),
because it needs fewer steps than AdamW. AdamW trains all other parameters.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.corpus import Corpus, kept, publish

__all__ = ["CONTEXT", "LLAMA", "OPT", "SMALL", "Trained", "Training", "train", "trained"]

CONTEXT = 256
_TOOK = "training.json"
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MUON_LR, _ADAM_LR, _WARMUP = 0.02, 3e-3, 20
_MOMENTUM = 0.95
_NEWTON_SCHULZ, _ITERATIONS = (3.4445, -4.7750, 2.0315), 4
_OPTIMIZERS = (_MUON_LR, _ADAM_LR, _WARMUP, _MOMENTUM, _NEWTON_SCHULZ, _ITERATIONS)


@dataclass(frozen=True)
class Training:
    """A model and its training.

    Attributes:
        family: `"opt"` or `"llama"`.
        hidden: Hidden size, with four heads. An OPT's MLP is four times as wide, a Llama's 2.75 times.
        layers: Number of decoder layers.
        vocabulary: Number of tokens.
        steps: Number of steps.
        batch: Windows of 256 tokens per step.
    """

    family: str
    hidden: int = 256
    layers: int = 6
    vocabulary: int = 2048
    steps: int = 160
    batch: int = 4

    def config(self) -> Any:
        """Returns the transformers config."""
        from transformers import LlamaConfig, OPTConfig

        sizes = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": True,
            **_SPECIAL,
        }
        if self.family == "opt":
            return OPTConfig(ffn_dim=4 * self.hidden, word_embed_proj_dim=self.hidden, dropout=0.0, **sizes)
        return LlamaConfig(intermediate_size=self.hidden * 11 // 4, num_key_value_heads=2, **sizes)

    def key(self, corpus: Corpus) -> str:
        """Returns a key that changes with everything that affects the trained model."""
        versions = (torch.__version__, importlib.metadata.version("transformers"))
        return hashlib.sha256(repr((self, _OPTIMIZERS, corpus.key, versions)).encode()).hexdigest()[:16]


OPT, LLAMA = Training("opt"), Training("llama")
SMALL = Training("opt", hidden=128, layers=4, vocabulary=1024, steps=60)


@dataclass(frozen=True)
class Trained:
    """A trained float32 model, and the wall seconds and processor seconds of its training."""

    model: Any
    seconds: float
    processor_seconds: float


def trained(training: Training, corpus: Corpus, folder: Path, say: Callable[[str], None]) -> Trained:
    """Returns the trained model, from `folder` if an earlier run left it there.

    Args:
        training: The model and its training.
        corpus: The text.
        folder: Folder that keeps corpora and models between runs.
        say: Function that receives progress lines.

    Raises:
        CheckpointError: The results of an earlier run are damaged.
    """
    from transformers import AutoModelForCausalLM

    path = folder / f"quality-{training.family}-{training.key(corpus)}"
    if not path.is_dir():
        started = time.perf_counter(), time.process_time()
        model = train(training, corpus.tokens["training"], say)
        took = (time.perf_counter() - started[0], time.process_time() - started[1])

        def write(made: Path) -> None:
            model.save_pretrained(made)
            (made / _TOOK).write_text(json.dumps(took), encoding="utf-8")

        publish(path, write)
    with kept(path):
        seconds, processor_seconds = json.loads((path / _TOOK).read_text(encoding="utf-8"))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return Trained(model.eval(), seconds, processor_seconds)


def train(training: Training, tokens: torch.Tensor, say: Callable[[str], None]) -> Any:
    """Trains a model on windows drawn from `tokens` [n]."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(training.config()).train()
        hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers." in name]
        known = {id(p) for p in hidden}
        others = [p for p in model.parameters() if id(p) not in known]
        adam = torch.optim.AdamW(others, lr=_ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)
        muon = Muon(hidden)
        for step in range(training.steps):
            share = min((step + 1) / _WARMUP, 2 * (1 - step / training.steps), 1.0)
            starts = torch.randint(0, tokens.numel() - CONTEXT, (training.batch,)).tolist()
            batch = torch.stack([tokens[start : start + CONTEXT] for start in starts])
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            adam.param_groups[0]["lr"] = _ADAM_LR * share
            adam.step()
            muon.step(_MUON_LR * share)
            model.zero_grad()
            if step % 20 == 0 or step + 1 == training.steps:
                say(f"{training.family}: step {step + 1} of {training.steps}, loss {loss.item():.3f}")
    return model.eval()


class Muon:
    """Momentum with orthogonalized updates in float32. Matrices of one shape are batched."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter]) -> None:
        self.by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            self.by_shape.setdefault(matrix.shape, []).append(matrix)
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.by_shape.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Updates every matrix by its gradient, which must exist."""
        for shape, group in self.by_shape.items():
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum = self.momenta[shape].lerp_(gradients, 1 - _MOMENTUM)
            updates = orthogonalized(gradients.lerp(momentum, _MOMENTUM))
            for matrix, update in zip(group, updates, strict=True):
                matrix.add_(update, alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)


def orthogonalized(matrices: torch.Tensor, steps: int = _ITERATIONS) -> torch.Tensor:
    """Moves the singular values of matrices [n, rows, columns] to about one.

    Uses a Newton-Schulz iteration of degree five.
    """
    first, third, fifth = _NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices
    found = found / (found.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(
            found, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first
        )
    return found.mT if is_tall else found
