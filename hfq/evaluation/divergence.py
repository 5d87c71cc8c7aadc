"""Metrics of logits on a text.

These are the surprise at each token, the divergence from another model, and the agreement on the most likely
token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from hfq.errors import CheckpointError

__all__ = ["Score", "Totals", "score_logits", "surprise"]

_SLAB_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Score:
    """Score of a model on a text, optionally compared with a reference model.

    Attributes:
        tokens: Number of scored tokens.
        perplexity: exp of the mean negative log-likelihood per token, in nats.
        kl_mean: Mean of KL(reference || model) for the next token, in nats. None without a reference.
        kl_p99: 99th percentile of the same divergence.
        top1_agreement: Fraction of tokens for which both models have the same most likely next token.
    """

    tokens: int
    perplexity: float
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None


@dataclass
class Totals:
    """Running totals over batches."""

    tokens: int = 0
    surprise: float = 0.0
    agreed: int = 0
    divergences: list[torch.Tensor] = field(default_factory=list)

    def add(self, surprises: torch.Tensor) -> None:
        """Adds the surprise at each token of a batch, float64 [tokens]."""
        self.tokens += surprises.numel()
        self.surprise += float(surprises.sum())

    def add_comparison(self, divergences: torch.Tensor, agreed: int) -> None:
        """Adds the divergence at each token of a batch, float64 [tokens], and the agreement count."""
        self.divergences.append(divergences)
        self.agreed += agreed

    def score(self) -> Score:
        """Returns the score of everything added so far."""
        perplexity = math.exp(min(self.surprise / self.tokens, 700.0))  # exp(710) is beyond a double
        if not self.divergences:
            return Score(self.tokens, perplexity)
        divergences = torch.cat(self.divergences)
        rank = math.ceil(0.99 * divergences.numel())  # nearest rank: a value that occurred
        p99 = float(divergences.kthvalue(rank).values)
        return Score(self.tokens, perplexity, float(divergences.mean()), p99, self.agreed / self.tokens)


def surprise(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the negative log-likelihood of each token in nats, float64 [tokens].

    Args:
        logits: [tokens, vocabulary].
        targets: int64 [tokens].

    Raises:
        CheckpointError: A logit is not finite.
    """
    found = [
        -part.log_softmax(1).gather(1, targets[rows, None])[:, 0] for rows, (part,) in _slabs(logits)
    ]  # in float64, a few rows at a time
    return torch.cat(found)


def score_logits(reference: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns KL(reference || logits) per token in nats, float64 [tokens], and the agreement.

    The agreement is the number of tokens whose most likely prediction is the same.

    Args:
        reference: [tokens, vocabulary].
        logits: [tokens, vocabulary].

    Raises:
        CheckpointError: A logit is not finite.
    """
    found, agreed = [], 0
    for _, (expected, actual) in _slabs(reference, logits):
        agreed += int((expected.argmax(1) == actual.argmax(1)).sum())
        expected, actual = expected.log_softmax(1), actual.log_softmax(1)
        found.append(
            (expected.exp() * (expected - actual)).sum(1).clamp(min=0)
        )  # only rounding makes it negative
    return torch.cat(found), agreed


def _slabs(*logits: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Yields a few rows of each tensor at a time, in float64 on the CPU.

    A whole batch in float64 would need several times its memory.
    """
    tokens, vocabulary = logits[0].shape
    step = max(_SLAB_ELEMENTS // vocabulary, 1)
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        parts = [each[rows].to("cpu", torch.float64) for each in logits]
        for part in parts:
            if not torch.isfinite(part).all():
                bad = int((~torch.isfinite(part)).sum())
                raise CheckpointError(
                    "The model's logits are not finite. Nothing was scored.",
                    expected="finite logits",
                    found=f"{bad} of {part.numel()} logits that are NaN or infinite",
                    fix="Use --dtype float32. If that does not help, check the checkpoint with "
                    "`hfq compare`.",
                )
        yield rows, parts
