"""Progress of an evaluation or a comparison."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress"]


@dataclass(frozen=True)
class Progress:
    """Report on a running evaluation or comparison.

    Attributes:
        step: The current step, such as a checkpoint or a weight.
        done: Number of finished steps: batches of an evaluation, or weights of a comparison.
        total: Number of all steps.
    """

    step: str
    done: int
    total: int
