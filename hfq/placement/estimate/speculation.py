"""Costs of a token if `generate` verifies several drafted tokens in each pass.

Pure data. Each draft is accepted with the same probability, if the one before it was (Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfq.errors import SetupError
from hfq.placement.estimate.estimate import Estimate, ModelSizes, work_of_rows
from hfq.placement.estimate.profile import Profile
from hfq.placement.estimate.roofline import predict

__all__ = ["ACCEPTANCE_RATES", "SpeculationCosts", "speculation_costs", "tokens_per_pass"]

ACCEPTANCE_RATES = (0.5, 0.7, 0.9)
"""Rates that a plan lists if none is given."""


@dataclass(frozen=True)
class SpeculationCosts:
    """Costs of one token, without the time of drafting.

    Attributes:
        num_assistant_tokens: Tokens that are drafted for each pass.
        acceptance_rate: Probability that a draft is accepted.
        tokens_per_pass: Tokens that a pass yields on average, its own included.
        passes_per_token: Its inverse.
        per_token_nbytes: Bytes that are onloaded for a token.
        seconds_per_token: Predicted seconds; 0 if unknown.
    """

    num_assistant_tokens: int
    acceptance_rate: float
    tokens_per_pass: float
    passes_per_token: float
    per_token_nbytes: int
    seconds_per_token: float


def tokens_per_pass(drafted: int, rate: float) -> float:
    """Returns the tokens that a pass yields on average, for drafts of this acceptance rate."""
    return sum(rate**accepted for accepted in range(drafted + 1))


def speculation_costs(
    estimate: Estimate, sizes: ModelSizes, profile: Profile, drafted: int, rates: Sequence[float]
) -> list[SpeculationCosts]:
    """Returns the costs at each acceptance rate.

    Args:
        estimate: The placement.
        sizes: The model.
        profile: Rates of the machine.
        drafted: Tokens that are drafted for each pass.
        rates: Acceptance rates.

    Raises:
        SetupError: A rate is no probability.
    """
    work = work_of_rows(estimate, sizes, drafted + 1)
    seconds, moved = predict(work, profile).known_seconds or 0.0, work.streamed + work.copied
    found = []
    for rate in rates:
        if not 0 <= rate <= 1:
            raise SetupError(
                f"An acceptance rate of {rate:g} is not valid.",
                expected="a number between 0 and 1",
                found=f"{rate:g}",
                fix="Pass the share of drafted tokens that the model accepts, such as 0.7.",
            )
        tokens = tokens_per_pass(drafted, rate)
        found.append(
            SpeculationCosts(drafted, rate, tokens, 1 / tokens, round(moved / tokens), seconds / tokens)
        )
    return found
