"""What the ranks of one run say to each other while a model is loaded: who they are, what they found, and
what failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hfq.errors import HfqError, PlacementError, SetupError

__all__ = [
    "attempt",
    "exchange",
    "failing_together",
    "is_deepspeed",
    "is_zero3",
    "meet",
    "no_copy",
    "raise_together",
]

_has_met: ContextVar[bool] = ContextVar("hfq_has_met", default=False)


@dataclass(frozen=True)
class _Failure:
    """An error as another rank is told it."""

    text: str
    fix: str


def is_zero3() -> bool:
    """Whether a DeepSpeed config of stage 3 is alive in this process."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


def is_deepspeed() -> bool:
    """Whether a DeepSpeed config of any stage is alive in this process."""
    from transformers.integrations.deepspeed import deepspeed_config

    return deepspeed_config() is not None


def exchange(value: Any) -> list[Any]:
    """The values of all ranks, in their order; all ranks must call it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def raise_together(error: Exception | None, outcome: str = "Nothing was loaded") -> None:
    """Ends all ranks where one of them failed, so that none waits for another; all ranks must call it.

    Args:
        error: What failed here, if anything.
        outcome: What that means for the user, for the other ranks' message.

    Raises:
        PlacementError: Another rank failed; names it and its error.
    """
    found = exchange(None if error is None else _failure(error))
    if error is not None:
        raise error
    _check_others(found, outcome)


@contextlib.contextmanager
def failing_together(start: Callable[[], object]) -> Iterator[None]:
    """During this, an error of this rank before `meet` is told to the others, who wait for it there.

    Args:
        start: Takes part in the collectives that the others go through on their way to `meet`.
    """
    token = _has_met.set(False)
    try:
        yield
    except Exception as error:
        if not _has_met.get():
            with contextlib.suppress(
                HfqError, OSError, RuntimeError, ValueError
            ):  # there may be nobody to tell
                start()
                exchange(_failure(error))
        raise
    finally:
        _has_met.reset(token)


def meet(value: Any) -> list[Any]:
    """`exchange`, the first of a load under `failing_together`.

    Raises:
        PlacementError: Another rank failed before it came here; names it and its error.
    """
    _has_met.set(True)
    found = exchange(value)
    _check_others(found)
    return found


def attempt(work: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    """(what `work` gives, None), or (None, the error it raised), to be told to the other ranks."""
    try:
        return work(*arguments), None
    except Exception as error:  # whatever it is, the others wait
        return None, error


def no_copy(found: str) -> SetupError:
    """The error of a deep copy of a model that ranks share: what makes it one model is bound to the modules
    it was made for.
    """
    return SetupError(
        "A model that several ranks share cannot be copied.",
        expected="a model that one process holds",
        found=found,
        fix="load it a second time instead, on all ranks",
    )


def _failure(error: Exception) -> _Failure:
    return _Failure(str(error), getattr(error, "fix", "see the error of that rank"))


def _check_others(found: list[Any], outcome: str = "Nothing was loaded") -> None:
    for rank, failure in enumerate(found):
        if isinstance(failure, _Failure):
            raise PlacementError(
                f"Another rank of this run failed. {outcome}.",
                rank=rank,
                found=failure.text.replace("\n", "; "),
                expected="ranks that all do their parts",
                fix=failure.fix,
            )
