"""Start of the process group of a DeepSpeed run."""

from __future__ import annotations

import os

import torch.distributed as dist

from hfq.errors import SetupError

__all__ = ["start_distributed"]


def start_distributed() -> tuple[int, int]:
    """(rank, number of ranks) of this process, of whose run DeepSpeed is told if it does not know.

    Raises:
        SetupError: DeepSpeed is not installed, or no launcher has said which rank this is.
    """
    try:
        import deepspeed
    except Exception as error:  # its import also builds and asks for compilers
        raise SetupError(
            "DeepSpeed cannot be imported, and a ZeRO-3 config is active. Nothing was loaded.",
            expected="deepspeed",
            found=f"{type(error).__name__}: {error}",
            fix="pip install deepspeed",
        ) from error
    if not deepspeed.comm.is_initialized():
        if not dist.is_initialized() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            raise SetupError(
                "A ZeRO-3 config is active, and nothing says which rank this process is. Nothing was loaded.",
                expected="a launcher, or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
                found="neither",
                fix="start the script with `deepspeed`, `accelerate launch` or `torchrun`",
            )
        deepspeed.init_distributed()
    os.environ.setdefault("LOCAL_RANK", "0")
    return dist.get_rank(), dist.get_world_size()
