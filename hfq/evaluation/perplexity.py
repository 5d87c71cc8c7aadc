"""Perplexity of a causal language model on a text, and divergence from another model."""

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
"""Tokens of batches that run together. Their activations stay in memory while layers are onloaded."""

_LOGITS_NBYTES = 1 << 30
"""Most bytes of a reference's logits in memory, unless one batch needs more."""


def perplexity(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    context: int = 256,
    batch_size: int = 16,
    stride: int | None = None,
) -> float:
    """Returns exp of the mean negative log-likelihood per token.

    Args:
        model: Model that accepts `input_ids` and returns `logits`, like transformers' causal models.
        tokens: int64 [n] or [1, n]. They are cut into windows of `context`, and the rest is dropped.
        context: Tokens per window.
        batch_size: Windows per forward pass.
        stride: Tokens between the starts of two windows. None means `context`, without overlap.

    Raises:
        SetupError: The tokens are not one sequence of integers, there are fewer than one window, or a window
            has fewer than two.
        CheckpointError: A logit is not finite.
    """
    return score(model, cut(_sequence(tokens), context, stride, batch_size)).perplexity


def _sequence(tokens: torch.Tensor) -> torch.Tensor:
    """Returns the tokens as [n]; a tokenizer returns one text as [1, n]."""
    sequence = tokens[0] if tokens.dim() == 2 and len(tokens) == 1 else tokens
    if sequence.dim() != 1 or sequence.dtype not in (torch.int64, torch.int32):
        raise SetupError(
            "The tokens are not one sequence of token ids.",
            expected="int64 [n] or [1, n]",
            found=f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}",
            fix='Pass tokenizer(text, return_tensors="pt").input_ids of one text.',
        )
    return sequence


def score(
    model: torch.nn.Module, batches: Sequence[Batch], on_batch: Callable[[], None] | None = None
) -> Score:
    """Returns the score over all batches.

    An offloaded model runs layer by layer, so that every decoder layer is read once.

    Args:
        model: The model.
        batches: The text.
        on_batch: Function that is called after each batch.

    Raises:
        CheckpointError: A logit is not finite.
    """
    totals = Totals()
    for surprises in _run(model, batches, lambda batch, logits: surprise(logits, batch.targets), on_batch):
        totals.add(surprises)
    return totals.score()


def score_against(
    model: torch.nn.Module,
    reference: torch.nn.Module,
    batches: Sequence[Batch],
    vocabulary: int,
    on_batch: Callable[[], None] | None = None,
) -> tuple[Score, Score, float]:
    """Returns the scores of a model and its reference, and the seconds that the model took.

    Batches run in groups whose reference logits fit in 1 GiB. Both models are onloaded once per group.

    Args:
        model: The model.
        reference: Model to compare with.
        batches: The text.
        vocabulary: Number of logits per token.
        on_batch: Function that is called after each batch of each model.

    Raises:
        CheckpointError: A logit is not finite.
        SetupError: The models have vocabularies of different sizes.
    """
    totals = Totals()
    expected = Totals()
    spent = 0.0
    for run in _runs(batches, vocabulary):
        kept: dict[int, torch.Tensor] = {}
        for batch, (surprises, logits) in zip(
            run, _run(reference, run, _surprise_and_logits, on_batch), strict=True
        ):
            expected.add(surprises)
            kept[id(batch)] = logits
        started = time.perf_counter()
        for surprises, divergences, agreed in _run(model, run, _comparison(kept), on_batch):
            totals.add(surprises)
            totals.add_comparison(divergences, agreed)
        spent += time.perf_counter() - started
    return totals.score(), expected.score(), spent


def _surprise_and_logits(batch: Batch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return surprise(logits, batch.targets), logits.clone()  # a copy, since a view would keep all logits alive


def _comparison(
    kept: dict[int, torch.Tensor],
) -> Callable[[Batch, torch.Tensor], tuple[torch.Tensor, torch.Tensor, int]]:
    """Compares a batch's logits with the stored ones, and releases the stored ones."""

    def against(batch: Batch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        known = kept.pop(id(batch))
        _check_vocabulary(known, logits)
        return surprise(logits, batch.targets), *score_logits(known, logits)

    return against


def _run(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    use: Callable[[Batch, torch.Tensor], Any],
    on_batch: Callable[[], None] | None,
) -> list[Any]:
    """Returns the result of `use` for the logits of each batch; calls `on_batch` after each."""

    def forward(batch: Batch) -> Any:
        with torch.no_grad():
            logits = model(
                input_ids=batch.input_ids.to(getattr(model, "device", "cpu")), use_cache=False
            ).logits
            found = use(batch, batch.scored(logits))
        if on_batch is not None:
            on_batch()
        return found

    try:
        loader_of(model)
    except SetupError:  # not loaded by hfq, so not offloaded
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
            "The logits cannot be compared, because the reference has another vocabulary.",
            expected=f"{logits.shape[1]} tokens",
            found=f"{reference.shape[1]} tokens",
            fix="Pass the unquantized original of this model as --reference.",
        )
