"""Perplexity of a causal language model on a text, and its divergence from another model's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hfq.errors import SetupError
from hfq.evaluation.divergence import Score, Totals, score_logits, surprise
from hfq.evaluation.windows import Batch, cut
from hfq.loading.loaded_model import loader_of
from hfq.runtime.run_batches import run_batches

__all__ = ["perplexity", "score", "score_against"]

_TOKENS_AT_ONCE = 32768
"""The tokens of batches that run together: their activations are held while blocks are brought."""

_LOGITS_NBYTES = 1 << 30
"""The most bytes of a reference's logits that are held, unless one batch has more."""


def perplexity(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    context: int = 256,
    batch_size: int = 16,
    stride: int | None = None,
) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window.

    Args:
        model: Takes `input_ids` and returns `logits`, as transformers' causal models do.
        tokens: int64 [n]; cut into windows of `context`, the rest is dropped.
        context: Tokens of a window.
        batch_size: Windows of a forward.
        stride: How far apart windows begin; `context` by default, so that they do not overlap.

    Raises:
        SetupError: There are fewer tokens than one window, or a window has fewer than two.
        CheckpointError: A logit is not finite.
    """
    return score(model, cut(tokens, context, stride, batch_size)).perplexity


def score(model: torch.nn.Module, batches: Sequence[Batch]) -> Score:
    """The perplexity over all batches; layer by layer where hfq streams the model, so that every block is
    read once.

    Raises:
        CheckpointError: A logit is not finite.
    """
    totals = Totals()
    for surprises in _run(model, batches, lambda batch, logits: surprise(logits, batch.targets)):
        totals.add(surprises)
    return totals.score()


def score_against(
    model: torch.nn.Module, reference: torch.nn.Module, batches: Sequence[Batch], vocabulary: int
) -> tuple[Score, Score, float]:
    """The score of a model beside a reference, the reference's own score, and the seconds that the model
    took.

    Batches go in runs whose reference logits fit into 1 GiB; both models are streamed once for each run.

    Args:
        model: The model.
        reference: What it should be like.
        batches: The text.
        vocabulary: The logits of a token.

    Raises:
        CheckpointError: A logit is not finite.
        SetupError: The two have vocabularies of different sizes.
    """
    totals = Totals()
    expected = Totals()
    spent = 0.0
    for run in _runs(batches, vocabulary):
        kept: dict[int, torch.Tensor] = {}
        for batch, (surprises, logits) in zip(run, _run(reference, run, _surprise_and_logits), strict=True):
            expected.add(surprises)
            kept[id(batch)] = logits
        started = time.perf_counter()
        for surprises, divergences, agreed in _run(model, run, _comparison(kept)):
            totals.add(surprises)
            totals.add_comparison(divergences, agreed)
        spent += time.perf_counter() - started
    return totals.score(), expected.score(), spent


def _surprise_and_logits(batch: Batch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return surprise(logits, batch.targets), logits.clone()  # the scored part alone, and no view of the rest


def _comparison(
    kept: dict[int, torch.Tensor],
) -> Callable[[Batch, torch.Tensor], tuple[torch.Tensor, torch.Tensor, int]]:
    """Compares the logits of a batch with those that were kept of it, and lets these go."""

    def against(batch: Batch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        known = kept.pop(id(batch))
        _check_vocabulary(known, logits)
        return surprise(logits, batch.targets), *score_logits(known, logits)

    return against


def _run(
    model: torch.nn.Module, batches: Sequence[Batch], use: Callable[[Batch, torch.Tensor], Any]
) -> list[Any]:
    """What `use` makes of the scored logits of each batch."""

    def forward(batch: Batch) -> Any:
        with torch.no_grad():
            logits = model(
                input_ids=batch.input_ids.to(getattr(model, "device", "cpu")), use_cache=False
            ).logits
            return use(batch, batch.scored(logits))

    try:
        loader_of(model)
    except SetupError:  # not loaded by hfq: nothing is streamed
        return [forward(batch) for batch in batches]
    max_concurrent = max(_TOKENS_AT_ONCE // max(batch.input_ids.numel() for batch in batches), 1)
    return run_batches(model, batches, forward, max_concurrent=max_concurrent)


def _runs(batches: Sequence[Batch], vocabulary: int) -> list[list[Batch]]:
    runs: list[list[Batch]] = []
    room = 0
    for batch in batches:
        nbytes = batch.targets.numel() * vocabulary * 4
        if not runs or nbytes > room:
            runs.append([])
            room = _LOGITS_NBYTES
        runs[-1].append(batch)
        room -= nbytes
    return runs


def _check_vocabulary(reference: torch.Tensor, logits: torch.Tensor) -> None:
    if reference.shape[1] != logits.shape[1]:
        raise SetupError(
            "The reference has another vocabulary, so that its logits cannot be compared.",
            expected=f"{logits.shape[1]} tokens",
            found=f"{reference.shape[1]} tokens",
            fix="pass the model that this one was quantized from as --reference",
        )
