"""What logits say of a text: surprise at each token, divergence from another model's logits, agreement on the
likeliest token.
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
    """A text under a model, and the model beside a reference.

    Attributes:
        tokens: The tokens that were scored.
        perplexity: exp of the mean negative log-likelihood of a token, in nats.
        kl_mean: The mean over tokens of KL(reference || model) of the next token, in nats; None without a
            reference.
        kl_p99: Its 99th percentile.
        top1_agreement: The share of tokens for which both models hold the same next token likeliest.
    """

    tokens: int
    perplexity: float
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None


@dataclass
class Totals:
    """Sums up batches."""

    tokens: int = 0
    surprise: float = 0.0
    agreed: int = 0
    divergences: list[torch.Tensor] = field(default_factory=list)

    def add(self, surprises: torch.Tensor) -> None:
        """Adds the surprise at each token of a batch, float64 [tokens]."""
        self.tokens += surprises.numel()
        self.surprise += float(surprises.sum())

    def add_comparison(self, divergences: torch.Tensor, agreed: int) -> None:
        """Adds the divergence at each token of a batch, float64 [tokens], and how often both models agree."""
        self.divergences.append(divergences)
        self.agreed += agreed

    def score(self) -> Score:
        """The score of all that was added."""
        perplexity = math.exp(min(self.surprise / self.tokens, 700.0))  # exp(710) is beyond a double
        if not self.divergences:
            return Score(self.tokens, perplexity)
        divergences = torch.cat(self.divergences)
        rank = math.ceil(0.99 * divergences.numel())  # nearest rank: a value that occurred
        p99 = float(divergences.kthvalue(rank).values)
        return Score(self.tokens, perplexity, float(divergences.mean()), p99, self.agreed / self.tokens)


def surprise(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood of each token in nats, float64 [tokens].

    Args:
        logits: [tokens, vocabulary].
        targets: int64 [tokens].

    Raises:
        CheckpointError: A logit is not finite.
    """
    found = [
        -part.log_softmax(1).gather(1, targets[rows, None])[:, 0] for rows, (part,) in _slabs(logits)
    ]  # computed in float64, some rows at a time
    return torch.cat(found)


def score_logits(reference: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, int]:
    """KL(reference || logits) of each token in nats, float64 [tokens], and on how many tokens the likeliest
    is the same.

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
        )  # below zero by rounding alone
    return torch.cat(found), agreed


def _slabs(*logits: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Some rows of each at a time, in float64 on the CPU: a whole batch in float64 would be several times its
    size.
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
                    found=f"{bad} of {part.numel()} logits NaN or infinite",
                    fix="the checkpoint is damaged, or its dtype too narrow: try --dtype float32, or run "
                    "`hfq compare` on it",
                )
        yield rows, parts
