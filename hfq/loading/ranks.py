"""Collectives of a load on several ranks: shared values and shared failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hfq.errors import HfqError, PlacementError, SetupError
from hfq.loading.sent_tensors import releasing_tensors

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
    """Error of one rank, as sent to the other ranks."""

    text: str
    fix: str


def is_zero3() -> bool:
    """Returns True if a DeepSpeed config of stage 3 is active in this process."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


def is_deepspeed() -> bool:
    """Returns True if a DeepSpeed config of any stage is active in this process."""
    from transformers.integrations.deepspeed import deepspeed_config

    return deepspeed_config() is not None


def exchange(value: Any) -> list[Any]:
    """Returns the values of all ranks, in rank order.

    All ranks must call it.
    """
    found: list[Any] = [None] * dist.get_world_size()
    with releasing_tensors():
        dist.all_gather_object(found, value)
    return found


def raise_together(error: Exception | None, outcome: str = "Nothing was loaded") -> None:
    """Raises an error on all ranks if one of them failed, so that no rank waits for another.

    All ranks must call it.

    Args:
        error: The error of this rank, or None.
        outcome: Sentence without a period for the message on the other ranks.

    Raises:
        PlacementError: Another rank failed; the message names it and its error.
    """
    found = exchange(None if error is None else _failure(error))
    if error is not None:
        raise error
    _check_others(found, outcome)


@contextlib.contextmanager
def failing_together(start: Callable[[], object]) -> Iterator[None]:
    """Reports an error that this rank raises before `meet` to the other ranks, which wait there.

    Args:
        start: Joins the collectives that the other ranks run on their way to `meet`.
    """
    token = _has_met.set(False)
    try:
        yield
    except Exception as error:
        if not _has_met.get():
            # the other ranks may be gone
            with contextlib.suppress(HfqError, OSError, RuntimeError, ValueError):
                start()
                exchange(_failure(error))
        raise
    finally:
        _has_met.reset(token)


def meet(value: Any) -> list[Any]:
    """Calls `exchange` for the first time in a load under `failing_together`.

    Raises:
        PlacementError: Another rank failed before this call; the message names it and its error.
    """
    _has_met.set(True)
    found = exchange(value)
    _check_others(found)
    return found


def attempt(work: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    """Returns (result of `work`, None), or (None, error) to report to the other ranks."""
    try:
        return work(*arguments), None
    except Exception as error:  # the other ranks wait, for any kind of error
        return None, error


def no_copy(found: str) -> SetupError:
    """Returns the error for a deep copy of a model that several ranks share.

    Such a model depends on hooks that are bound to its original modules.
    """
    return SetupError(
        "A model that several ranks share cannot be copied.",
        expected="a model in one process",
        found=found,
        fix="Load the model a second time on all ranks.",
    )


def _failure(error: Exception) -> _Failure:
    return _Failure(str(error), getattr(error, "fix", "See the error of that rank."))


def _check_others(found: list[Any], outcome: str = "Nothing was loaded") -> None:
    for rank, failure in enumerate(found):
        if isinstance(failure, _Failure):
            raise PlacementError(
                f"Another rank of this run failed. {outcome}.",
                rank=rank,
                found=failure.text.replace("\n", "; "),
                expected="success on all ranks",
                fix=failure.fix,
            )
