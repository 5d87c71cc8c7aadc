"""Tests of perplexity against the probabilities of a table model."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfq import CheckpointError, HfqConfig, SetupError
from hfq.evaluation import perplexity as module
from hfq.evaluation.perplexity import perplexity, score_against
from hfq.evaluation.windows import cut
from tests.support.tiny_models import DATA

VOCABULARY = 11


class Bigram(torch.nn.Module):
    """Causal model whose next token depends only on the last one."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.table = torch.nn.Parameter(logits)
        self.batches = []

    def forward(self, input_ids, use_cache):
        self.batches.append(tuple(input_ids.shape))
        logits = self.table[input_ids]
        self.has_gradient = logits.requires_grad
        return SimpleNamespace(logits=logits)


@pytest.fixture
def model():
    return Bigram(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)))


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def probabilities(model: Bigram) -> list[list[float]]:
    rows = [[math.exp(logit) for logit in row] for row in model.table.detach().tolist()]
    return [[each / sum(row) for each in row] for row in rows]


def by_hand(model: Bigram, tokens: torch.Tensor, context: int, stride: int) -> float:
    """Returns exp of the mean of -log p(token | previous token), each token with context once."""
    table, text = probabilities(model), tokens.tolist()
    begins = range(0, len(text) - context + 1, stride)
    scored = sorted({place for begin in begins for place in range(begin + 1, begin + context)})
    return math.exp(sum(-math.log(table[text[place - 1]][text[place]]) for place in scored) / len(scored))


def test_a_sequence_with_a_batch_dimension_is_one_text(model):
    text = tokens(80)
    assert perplexity(model, text[None], 8) == perplexity(model, text, 8)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (tokens(80).reshape(2, 40), "int64 [2, 40]"),
        (tokens(80).reshape(1, 1, 80), "int64 [1, 1, 80]"),
        (tokens(1)[0], "int64 []"),
        (tokens(80).float(), "float32 [80]"),
        (tokens(80)[None].double(), "float64 [1, 80]"),
    ],
)
def test_tokens_that_are_no_sequence_of_ids_are_refused(model, other, found):
    with pytest.raises(SetupError, match="not one sequence of token ids") as caught:
        perplexity(model, other, 8)
    assert (caught.value.expected, caught.value.found) == ("int64 [n] or [1, n]", found)
    assert not model.batches


@pytest.mark.parametrize("batch_size", [1, 3, 4, 16])
@pytest.mark.parametrize(
    ("count", "context", "stride"),
    [(80, 8, 8), (87, 8, 8), (8, 8, 8), (30, 7, 7), (80, 2, 2), (87, 8, 3), (80, 8, 7), (30, 6, 1)],
)
def test_it_is_the_mean_surprise_of_every_token_that_has_context(model, count, context, stride, batch_size):
    text = tokens(count)
    found = perplexity(model, text, context, batch_size, stride)
    assert found == pytest.approx(
        by_hand(model, text, context, stride), rel=1e-12
    )  # sums of doubles in another order


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large():
    # one exp and one log of doubles
    assert perplexity(Bigram(torch.zeros(VOCABULARY, VOCABULARY)), tokens(64), 16) == pytest.approx(
        VOCABULARY, rel=1e-12
    )


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
    with pytest.raises(SetupError, match="is out of range"):
        perplexity(model, tokens(16), context)


@pytest.mark.parametrize("stride", [0, 9, -1])
def test_a_stride_that_leaves_gaps_is_refused(model, stride):
    with pytest.raises(SetupError, match="is out of range for sequences of 8 tokens"):
        perplexity(model, tokens(16), 8, stride=stride)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_fewer_tokens_than_a_window_are_refused(model, count):
    with pytest.raises(SetupError, match="shorter than one sequence") as error:
        perplexity(model, tokens(count), 8)
    assert error.value.found == f"{count} tokens"
    assert model.batches == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(model, bad):
    model.table.data[3, 5] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        perplexity(model, tokens(64), 8)


def divergences(reference: Bigram, model: Bigram, text: list[int], context: int) -> list[float]:
    p, q = probabilities(reference), probabilities(model)
    before = [text[place - 1] for place in range(len(text) // context * context) if place % context]
    return [sum(a * math.log(a / b) for a, b in zip(p[last], q[last], strict=True)) for last in before]


@pytest.mark.parametrize("held", [1 << 30, 1])
def test_the_divergence_is_that_of_the_two_tables(model, held, monkeypatch):
    monkeypatch.setattr(module, "_LOGITS_NBYTES", held)  # all batches in one run, or each in a run of its own
    reference = Bigram(
        model.table.detach() + torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5))
    )
    text = tokens(807)
    found, own, seconds = score_against(model, reference, cut(text, 8, batch_size=4), VOCABULARY)
    expected = sorted(divergences(reference, model, text.tolist(), 8))
    assert found.tokens == own.tokens == len(expected) == 700
    # float64 on both sides, in another order
    assert found.kl_mean == pytest.approx(sum(expected) / 700, rel=1e-12)
    assert found.kl_p99 == pytest.approx(expected[692], rel=1e-12)
    assert found.perplexity == perplexity(model, text, 8, 4)
    assert own.perplexity == perplexity(reference, text, 8, 4)
    table = (reference.table.argmax(1) == model.table.argmax(1)).tolist()
    before = [int(text[place - 1]) for place in range(800) if place % 8]
    assert found.top1_agreement == sum(table[last] for last in before) / 700
    assert seconds > 0
    assert reference.batches == model.batches


def test_a_model_does_not_diverge_from_itself(model):
    found, own, _ = score_against(model, model, cut(tokens(64), 8), VOCABULARY)
    assert (found.kl_mean, found.kl_p99, found.top1_agreement) == (0.0, 0.0, 1.0)
    assert found.perplexity == own.perplexity


def test_another_vocabulary_is_refused(model):
    with pytest.raises(SetupError, match="another vocabulary"):
        score_against(model, Bigram(torch.zeros(VOCABULARY, VOCABULARY + 1)), cut(tokens(64), 8), VOCABULARY)


@pytest.mark.slow
def test_small_quantized_models_lose_little_and_the_same_in_every_placement():
    text = AutoTokenizer.from_pretrained(DATA / "tiny-llama")(
        (DATA / "tiny-llama" / "held_out.txt").read_text(encoding="utf-8"), return_tensors="pt"
    )["input_ids"][0][:8192]

    def found(name, **options):
        return perplexity(
            AutoModelForCausalLM.from_pretrained(DATA / name, dtype=torch.float32, **options), text
        )

    half = {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}
    fp8, gptq = (
        {
            found(f"tiny-llama-{name}", quantization_config=HfqConfig(), device_map=placement)
            for placement in ({"": "cpu"}, half, {"": "disk"})
        }
        for name in ("fp8", "gptq")
    )
    assert len(fp8) == len(gptq) == 1
    dense = found("tiny-llama")
    assert dense < min(fp8) < min(gptq) < dense * 1.03  # measured: 33.18, 33.25, 33.59
