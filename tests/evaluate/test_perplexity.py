"""Perplexity against the probabilities of a model that is a table."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from hfq.evaluate.perplexity import perplexity

VOCABULARY = 11


class Bigram(torch.nn.Module):
    """A causal model whose next token depends on the last one alone; the loss is transformers' own mean."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.table = torch.nn.Parameter(logits)
        self.batches = []

    def forward(self, input_ids, labels):
        self.batches.append(tuple(input_ids.shape))
        assert torch.equal(input_ids, labels)
        logits = self.table[input_ids][:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY).double(), labels[:, 1:].reshape(-1))
        self.has_gradient = loss.requires_grad
        return SimpleNamespace(loss=loss)


@pytest.fixture
def model():
    return Bigram(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)))


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def by_hand(model: Bigram, tokens: torch.Tensor, context: int) -> float:
    """exp of the mean of -log p(token | the one before) over all but the first token of each whole window."""
    table, surprises = model.table.detach().tolist(), []
    for first in range(0, len(tokens) - context + 1, context):
        window = tokens[first : first + context].tolist()
        for last, token in pairwise(window):
            total = sum(math.exp(logit) for logit in table[last])
            surprises.append(-math.log(math.exp(table[last][token]) / total))
    return math.exp(sum(surprises) / len(surprises))


@pytest.mark.parametrize("batch_size", [1, 3, 4, 16])
@pytest.mark.parametrize(("count", "context"), [(80, 8), (87, 8), (8, 8), (30, 7), (80, 2)])
def test_it_is_the_mean_surprise_of_every_token_in_its_window(model, count, context, batch_size):
    text = tokens(count)
    # sums of doubles in another order
    assert perplexity(model, text, context, batch_size) == pytest.approx(by_hand(model, text, context), rel=1e-12)


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large():
    # one exp and one log of doubles
    assert perplexity(Bigram(torch.zeros(VOCABULARY, VOCABULARY)), tokens(64), 16) == pytest.approx(VOCABULARY, rel=1e-12)


def test_a_model_that_knows_the_text_is_not_perplexed():
    text = torch.arange(64) % VOCABULARY
    certain = torch.full((VOCABULARY, VOCABULARY), -1e4)
    certain[torch.arange(VOCABULARY), (torch.arange(VOCABULARY) + 1) % VOCABULARY] = 0
    assert perplexity(Bigram(certain), text, 16) == 1.0


def test_the_rest_of_the_text_is_dropped(model):
    text = tokens(87)
    assert perplexity(model, text, 8) == perplexity(model, text[:80], 8)
    assert perplexity(model, text, 8) != perplexity(model, text[:72], 8)


def test_windows_go_in_batches_and_a_ragged_last_batch_counts_by_its_windows(model):
    perplexity(model, tokens(87), 8, batch_size=4)
    assert model.batches == [(4, 8), (4, 8), (2, 8)]


def test_the_defaults_are_windows_of_256_in_batches_of_16(model):
    perplexity(model, tokens(256 * 17 + 5))
    assert model.batches == [(16, 256), (1, 256)]


def test_no_gradient_is_tracked(model):
    perplexity(model, tokens(16), 8)
    assert model.has_gradient is False


@pytest.mark.parametrize("context", [0, 1])
def test_a_window_that_predicts_nothing_is_refused(model, context):
    with pytest.raises(ValueError):
        perplexity(model, tokens(16), context)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_fewer_tokens_than_a_window_are_refused(model, count):
    with pytest.raises(ValueError, match=f"{count} tokens are fewer than one window of 8"):
        perplexity(model, tokens(count), 8)
    assert model.batches == []
