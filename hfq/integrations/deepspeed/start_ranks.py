"""Start of the process group of a DeepSpeed run."""

from __future__ import annotations

import os

import torch.distributed as dist

from hfq.errors import SetupError

__all__ = ["start_distributed"]


def start_distributed() -> tuple[int, int]:
    """Initializes DeepSpeed's process group if needed, and returns (rank, number of ranks).

    Raises:
        SetupError: DeepSpeed cannot be imported, or no launcher has set the rank of this process.
    """
    try:
        import deepspeed
    except Exception as error:  # its import also looks for compilers and builds extensions
        raise SetupError(
            "A ZeRO-3 config is active, but DeepSpeed cannot be imported. Nothing was loaded.",
            expected="deepspeed",
            found=f"{type(error).__name__}: {error}",
            fix="Run pip install deepspeed.",
        ) from error
    if not deepspeed.comm.is_initialized():
        if not dist.is_initialized() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            raise SetupError(
                "A ZeRO-3 config is active, but the rank of this process is unknown. Nothing was loaded.",
                expected="a launcher, or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, and MASTER_PORT",
                found="neither",
                fix="Start the script with `deepspeed`, `accelerate launch`, or `torchrun`.",
            )
        deepspeed.init_distributed()
    os.environ.setdefault("LOCAL_RANK", "0")
    return dist.get_rank(), dist.get_world_size()
