"""What the ranks of one run say to each other while a model is loaded: who they are, what they found, and what failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hfq.errors import HfqError, PlacementError, SetupError

__all__ = ["attempt", "exchange", "raise_together", "start_distributed"]


def start_distributed() -> tuple[int, int]:
    """(rank, number of ranks) of this process, of whose run DeepSpeed is told if it does not know.

    Raises:
        SetupError: DeepSpeed is not installed, or no launcher has said which rank this is.
    """
    try:
        import deepspeed
    except Exception as error:  # its import also builds and asks for compilers
        raise SetupError(
            "DeepSpeed cannot be imported, and a ZeRO-3 config is active; nothing was loaded.", expected="deepspeed",
            found=f"{type(error).__name__}: {error}", fix="pip install deepspeed",
        ) from error  # fmt: skip
    if not deepspeed.comm.is_initialized():
        if not dist.is_initialized() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            raise SetupError(
                "A ZeRO-3 config is active, and nothing says which rank this process is; nothing was loaded.",
                expected="a launcher, or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT", found="neither",
                fix="start the script with `deepspeed`, `accelerate launch` or `torchrun`",
            )  # fmt: skip
        deepspeed.init_distributed()
    os.environ.setdefault("LOCAL_RANK", "0")
    return dist.get_rank(), dist.get_world_size()


def exchange(value: Any) -> list[Any]:
    """The values of all ranks, in their order; all ranks must call it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def raise_together(error: Exception | None) -> None:
    """Ends all ranks where one of them failed, so that none waits for another; all ranks must call it.

    Args:
        error: What failed here, if anything.

    Raises:
        PlacementError: Another rank failed; names it and its error.
    """
    found = exchange(None if error is None else (str(error), getattr(error, "fix", "see the error of that rank")))
    if error is not None:
        raise error
    for rank, failure in enumerate(found):
        if failure is not None:
            raise PlacementError(
                "Another rank of this run failed; nothing was loaded.", rank=rank, found=failure[0].replace("\n", "; "),
                expected="ranks that all read their parts", fix=failure[1],
            )  # fmt: skip


def attempt(work: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    """(what `work` gives, None), or (None, the error it raised), to be told to the other ranks."""
    try:
        return work(*arguments), None
    except (HfqError, OSError, RuntimeError) as error:
        return None, error
